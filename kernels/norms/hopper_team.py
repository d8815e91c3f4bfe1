"""Norms of rows and their gradients on a Hopper GPU, by the teams of a block.

The warpgroups of a block form teams. A team takes steps of a few whole rows, one after
the other, as they are copied into a ring of shared memory. The columns of a row are
spread over all lanes of the team; the team adds the lanes' partial sums when it needs a
row's sum. Where chunks of columns do not fill a row, the last one begins earlier, and
leaves out what the chunk before has, too. Rows are read again from shared memory for
each sum that needs the one before. So registers hold only sums over rows: the
cotangents of scale and bias. The teams of a block add those up at the end, and XLA
those of all blocks.

The gradients compute the statistics from the rows again: nothing is saved for them.

An addend is streamed like the rows. It is added to x each time that x is read from
shared memory, and rounded as XLA would round the sum, which is a result too. It is
added to x's cotangent before that is rounded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.norms.hopper_config import (
    LANES,
    Norm,
    Teams,
    chunks_of,
    rows_of,
    steps_of,
    vector_of,
)
from rewriter.kernels.shared import pallas_gpu, pallas_gpu_rows

if TYPE_CHECKING:
    from jax import Array


@dataclass(frozen=True)
class Team:
    """The work of one warpgroup of a team.

    Attributes:
        norm: What is computed.
        config: The teams.
        refs: Arrays in global memory by name.
        shared: Shared memory by name.
        out: The results.
        warpgroup: The index of this warpgroup in the block.
        program: The index of this block.
        programs: The number of blocks.
    """

    norm: Norm
    config: Teams
    refs: dict[str, Any]
    shared: dict[str, Any]
    out: Sequence[Any]
    warpgroup: Any
    program: Any
    programs: Any

    def __post_init__(self) -> None:
        # Traced once and before any loop: JAX takes long for each operation.
        _ = self.team, self.part, self.every_chunk

    # --------------------------------------------------------- place and sizes
    @functools.cached_property
    def team(self) -> Any:
        """The index of this team in the block."""
        return lax.div(self.warpgroup, jnp.int32(self.config.warpgroups))

    @functools.cached_property
    def part(self) -> Any:
        """The index of this warpgroup's part of the columns."""
        return lax.rem(self.warpgroup, jnp.int32(self.config.warpgroups))

    @property
    def number(self) -> Any:
        """The index of this team among those of all blocks."""
        return self.program * self.config.teams + self.team

    @property
    def rows(self) -> int:
        """The number of rows of a step."""
        return rows_of(self.norm.m, self.config, self.backward)

    @property
    def backward(self) -> bool:
        """Whether gradients are computed."""
        return "cotangent" in self.refs

    @property
    def width(self) -> int:
        """Columns that are computed at once."""
        return LANES * vector_of(self.norm, self.config)

    @property
    def chunks(self) -> int:
        """The number of chunks of that width."""
        return chunks_of(self.norm, self.config)

    def columns(self, chunk: int) -> Any:
        """The columns of this warpgroup in a chunk."""
        return self.every_chunk[chunk]

    @functools.cached_property
    def every_chunk(self) -> list[Any]:
        """The columns of this warpgroup in each chunk."""
        return [self._columns(chunk) for chunk in range(self.chunks)]

    def _columns(self, chunk: int) -> Any:
        own = self.norm.d // self.config.warpgroups
        if own % self.width == 0:
            first = (self.part * self.chunks + chunk) * self.width
            return pl.ds(pl.multiple_of(first, self.width), self.width)
        first = self.part * own + min(chunk * self.width, own - self.width)
        vector = self.width // LANES
        return pl.ds(pl.multiple_of(first, vector), self.width)

    def skipped(self, chunk: int) -> int:
        """The columns at the front of a chunk that the one before has, too."""
        own = self.norm.d // self.config.warpgroups
        return max(0, (chunk + 1) * self.width - own)

    # ------------------------------------------------------------------ streaming
    def over_steps(self, one: Callable[..., Any], carry: Any) -> Any:
        """Runs ``carry = one(turn, slot, carry)`` for each of this team's steps."""
        for turn in range(self.config.stages):
            self.fetch(turn, turn < self.steps)
        self.keep()

        def take(turn: Any, carry: Any) -> Any:
            slot = self.slot(turn)
            plgpu.barrier_wait(self.shared["ready"].at[slot])
            return one(turn, slot, carry)

        return lax.fori_loop(0, self.steps, take, carry)

    @property
    def steps(self) -> Any:
        """The number of this team's steps."""
        every = steps_of(self.norm.m, self.config, self.backward)
        stride = self.programs * self.config.teams
        return lax.div(every - self.number + stride - 1, stride)

    def slot(self, turn: Any) -> Any:
        """The slot of a step's rows in the ring."""
        stages = self.config.stages
        return self.team * stages + lax.rem(turn, jnp.int32(stages))

    def row(self, turn: Any) -> Any:
        """The first row of a step; the last step ends with the last row."""
        step = turn * self.programs * self.config.teams + self.number
        first = step * self.rows
        if self.norm.m % self.rows == 0:
            return first
        return jnp.minimum(first, self.norm.m - self.rows)

    def fetch(self, turn: Any, wanted: Any) -> None:
        """Fills a step's slot in the ring, by one warpgroup of a team."""

        @pallas_gpu.when((self.part == 0) & wanted)
        def _() -> None:
            slot = self.slot(jnp.int32(turn))
            rows = pl.ds(self.row(jnp.int32(turn)), self.rows)
            for name, ring in self.rings.items():
                ready = self.shared["ready"].at[slot]
                _copy(self.refs[name].at[rows], ring.at[slot], ready)

    def refill(self, turn: Any) -> None:
        """Refills the slot of the step before this one.

        It is called after a wait for the team within this step: all have read it then.
        """
        after = turn - 1 + self.config.stages
        self.fetch(after, (turn > 0) & (after < self.steps))

    def keep(self) -> None:
        """Copies what there is for each column, as scale and bias, to shared memory."""
        if "kept" not in self.shared:
            return
        ready = self.shared["kept"].at[0]

        @pallas_gpu.when(self.warpgroup == 0)
        def _() -> None:
            for name, place in self.shared.items():
                if name.startswith("kept_"):
                    _copy(self.refs[name.removeprefix("kept_")], place, ready)

        plgpu.barrier_wait(ready)

    # -------------------------------------------------------------------- of rows
    @property
    def rings(self) -> dict[str, Any]:
        """The rings of streamed arrays, by name: these arrays come first in `refs`."""
        return dict(zip(self.refs, self.shared["rows"][0], strict=False))

    def streamed(self, name: str, slot: Any, row: int, chunk: int) -> Array:
        """A part of a row in registers."""
        ring = self.rings[name]
        return pallas_gpu_rows.loaded(ring.at[slot, row, self.columns(chunk)])

    def x(self, slot: Any, row: int, chunk: int, level: Any = None) -> Array:
        """A part of a row of x, or of x and its addend, `level` subtracted."""
        x = self.streamed("x", slot, row, chunk)
        if self.adds_to_x:
            x = x + self.streamed("addend", slot, row, chunk)
            x = x.astype(self.norm.dtype).astype(jnp.float32)
        return x if level is None else x - level

    @property
    def adds_to_x(self) -> bool:
        """Whether the addend is added to x, and not to x's cotangent."""
        return self.norm.addend and not self.backward

    def up(self, slot: Any, row: int, chunk: int) -> Array:
        """A part of a row of the result's cotangent."""
        return self.streamed("cotangent", slot, row, chunk)

    def scale_or_bias(self, name: str, chunk: int) -> Array | None:
        """A part of scale or bias, None if there is none."""
        if f"kept_{name}" not in self.shared:
            return None
        return pallas_gpu_rows.loaded(
            self.shared[f"kept_{name}"].at[self.columns(chunk)]
        )

    def means(
        self, terms: Callable[[int, int], Sequence[Array]], half: Any
    ) -> list[list[Array]]:
        """Returns means over the columns of each row of a step.

        Args:
            terms: ``terms(chunk, row)`` gives the numbers to average.
            half: The half of the shared memory for sums to use; the last call used the
                other.
        """
        made: list[Any] = [None] * self.rows
        for chunk in range(self.chunks):
            for row in range(self.rows):
                new, old = terms(chunk, row), made[row]
                if skipped := self.skipped(chunk):
                    new = [pallas_gpu_rows.without_first(y, skipped) for y in new]
                if old is not None:
                    new = [a + b for a, b in zip(old, new, strict=True)]
                made[row] = new
        flat = [y for row in made for y in row]
        shared = self.shared["sums"].at[self.team, half]
        totals = pallas_gpu_rows.row_sums(flat, shared, self.config.warpgroups)
        means, each = [y * (1.0 / self.norm.d) for y in totals], len(made[0])
        return [means[i : i + each] for i in range(0, len(flat), each)]

    def statistics(
        self,
        turn: Any,
        first: Callable[[int, int], Sequence[Array]],
        second: Callable[[int, int, Any], Sequence[Array]],
        third: Callable[[int, int, Any], Sequence[Array]] | None = None,
    ) -> tuple[list[Any], list[list[Array]], list[list[Array]], list[list[Array]]]:
        """Returns a step's levels, and means over columns before and after.

        Args:
            turn: The step.
            first: ``first(chunk, row)`` gives x and further numbers; used only if
                centred.
            second: ``second(chunk, row, level)`` gives the squares of x minus its
                level, and further numbers.
            third: The same for as many further numbers; used only if centred.
        """
        if not self.norm.centred:
            half = lax.rem(turn, jnp.int32(2))
            found = self.means(lambda c, r: second(c, r, None), half)
            self.refill(turn)
            return [None] * self.rows, [], found, []
        half = jnp.int32(0) if third is None else lax.rem(turn, jnp.int32(2))
        before = self.means(first, half)
        self.refill(turn)
        levels = [row[0] for row in before]
        after = self.means(lambda c, r: second(c, r, levels[r]), 1 - half)
        if third is None:
            return levels, before, after, []
        more = self.means(lambda c, r: third(c, r, levels[r]), half)
        return levels, before, after, more

    def inverse(self, square: Array, level: Any) -> Array:
        """Returns the inverse root of a mean square around a level."""
        square = square + self.norm.eps
        if self.norm.of_squares:
            square = square + (level * level - level * level)  # inf - inf, or 0
        if "epsilon" in self.refs:
            square = square + self.refs["epsilon"][0]
        return lax.rsqrt(square)

    # -------------------------------------------------------------------- forward
    def normalize(self) -> None:
        """Writes this team's rows of the result."""

        def one(turn: Any, slot: Any, carry: Any) -> Any:
            def square(chunk: int, row: int, level: Any) -> list[Array]:
                y = self.x(slot, row, chunk, level)
                return [y * y]

            level, _, squares, _ = self.statistics(
                turn, lambda c, r: [self.x(slot, r, c)], square
            )
            roots = [
                self.inverse(row[0], mean)
                for row, mean in zip(squares, level, strict=True)
            ]
            for chunk in range(self.chunks):
                scale, bias = (
                    self.scale_or_bias("scale", chunk),
                    self.scale_or_bias("bias", chunk),
                )
                for row in range(self.rows):
                    x = self.x(slot, row, chunk)
                    if self.adds_to_x:
                        self.write(1, self.row(turn) + row, chunk, x)
                    y = (x if level[row] is None else x - level[row]) * roots[row]
                    y = y if scale is None else y * scale
                    y = y if bias is None else y + bias
                    self.write(0, self.row(turn) + row, chunk, y)
            return carry

        self.over_steps(one, jnp.int32(0))

    def write(self, index: int, row: Any, chunk: int, value: Array) -> None:
        """Writes a part of a row of a result."""
        place = self.out[index].at[row, self.columns(chunk)]
        value = value.astype(self.out[index].dtype)
        pallas_gpu_rows.store(place, value, self.skipped(chunk))

    # ------------------------------------------------------------------ gradients
    def differentiate(self) -> None:
        """Writes this team's rows of x's cotangent, and the block's sums over rows.

        With n = (x - mean) r and g the cotangent times scale, x's is ``r (g - mean(g) -
        n mean(g n))``, without the first mean if not centred. The remainder of a
        rounded mean is subtracted from n, where it matters.
        """
        names = self.norm.summed
        given = "epsilon" in self.refs
        zeros = lambda: [pallas_gpu_rows.zeros(self.width) for _ in range(self.chunks)]
        empty = {name: zeros() for name in names}
        carry = empty, jnp.float32(0.0) if given else jnp.int32(0)
        sums, epsilon = self.over_steps(self.gradient, carry)
        if given:
            self.write_epsilon(epsilon)
        self.add_up([sums[name] for name in names])

    def gradient(self, turn: Any, slot: Any, carry: Any) -> Any:
        """The gradients of a step's rows; adds their sums over rows to ``carry``."""
        sums, epsilon = carry
        sums = {name: list(parts) for name, parts in sums.items()}

        def scaled(chunk: int, row: int) -> Array:
            up, scale = self.up(slot, row, chunk), self.scale_or_bias("scale", chunk)
            return up if scale is None else up * scale

        def products(chunk: int, row: int, level: Any) -> list[Array]:
            y = self.x(slot, row, chunk, level)
            return [y * y, y * scaled(chunk, row)]

        def left(chunk: int, row: int, level: Any) -> list[Array]:
            y = self.x(slot, row, chunk, level)
            return [y, y]  # as many sums as the other arrays

        level, before, after, more = self.statistics(
            turn, lambda c, r: [self.x(slot, r, c), scaled(c, r)], products,
            left if self.norm.corrects else None,
        )  # fmt: skip
        roots = [
            self.inverse(row[0], mean) for row, mean in zip(after, level, strict=True)
        ]
        along = [row[1] * r for row, r in zip(after, roots, strict=True)]
        less = [row[1] for row in before]
        for i, row in enumerate(more):
            less[i] = less[i] - row[0] * roots[i] * along[i]
        for chunk in range(self.chunks):
            scale = self.scale_or_bias("scale", chunk)
            for row in range(self.rows):
                n = self.x(slot, row, chunk, level[row]) * roots[row]
                up = self.up(slot, row, chunk)
                g = up if scale is None else up * scale
                g = g - less[row] if less else g
                down = (g - n * along[row]) * roots[row]
                if not self.norm.addend:
                    self.write(0, self.row(turn) + row, chunk, down)
                for name, term in (("scale", up * n), ("bias", up)):
                    if name in sums:
                        sums[name][chunk] = sums[name][chunk] + term
                if self.norm.addend:  # after the sums: before them, registers spill
                    down = down + self.streamed("addend", slot, row, chunk)
                    self.write(0, self.row(turn) + row, chunk, down)
        if "epsilon" in self.refs:
            for y, r in zip(along, roots, strict=True):
                epsilon = epsilon + y * r * r * (-0.5 * self.norm.d)
        return sums, epsilon

    def write_epsilon(self, total: Array) -> None:
        """Writes a team's part of epsilon's cotangent, in every column."""

        @pallas_gpu.when(self.part == 0)
        def _() -> None:
            every = pallas_gpu_rows.zeros(LANES) + total
            pallas_gpu_rows.store(self.out[-1].at[self.number], every)

    def add_up(self, sums: Sequence[Sequence[Array]]) -> None:
        """Adds the sums of all teams of the block, and writes the totals one by one.

        Args:
            sums: This team's sums, for each name and each chunk of columns.
        """
        last = self.config.teams - 1
        added = self.shared["rows"][1]

        def add(team: int) -> None:
            for i, parts in enumerate(sums):
                for chunk, value in enumerate(parts):
                    columns = self.columns(chunk)
                    if team > 0:
                        value = value + pallas_gpu_rows.loaded(added[i].at[columns])
                    done = self.out[1 + i].at[self.program, columns]
                    place = done if team == last else added[i].at[columns]
                    pallas_gpu_rows.store(place, value, self.skipped(chunk))

        for team in range(self.config.teams if sums else 0):
            if last:
                pallas_gpu_rows.wait_for_block()
            pallas_gpu.when(self.team == team)(lambda team=team: add(team))


def _copy(source: Any, target: Any, ready: Any) -> None:
    """Copies whole rows to shared memory."""
    plgpu.copy_gmem_to_smem(
        source, target, ready, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS
    )
