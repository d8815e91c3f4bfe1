"""Sums over positions on a Hopper GPU, for each channel and block of rows.

Each lane adds up its columns of all rows of its team, straight from global memory. Then
the lanes write their sums to shared memory, and the warpgroups add up those of the same
channel. XLA puts the blocks' sums together, and applies what follows from them: it
writes elementwise results at the full bandwidth, and joins what stands behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.group_norm.hopper_config import LANES, UNROLLED, Work
from rewriter.kernels.shared import pallas_gpu, pallas_gpu_rows

if TYPE_CHECKING:
    from jax import Array


LARGEST = float(jnp.finfo(jnp.float32).max)
"""What is taken off an infinite sum in place of infinity, so that it is not NaN."""


def means(x: Array, work: Work) -> tuple[Array, Array]:
    """Returns means, and mean squares around them, of each block's positions.

    Args:
        x: [samples, positions, channels].
        work: How the work is shared.

    Returns:
        float32 [samples, blocks, work.out] each, all of as many positions.
    """
    first, second = _call("group_norm", _Block.statistics, [x], None, 2, work)
    return first, second


def sums(up: Array, x: Array, mean: Array, work: Work, centred: bool) -> list[Array]:
    """Returns sums of up, of up · (x - mean), and of x - mean if `centred`.

    Args:
        up: [samples, positions, channels].
        x: As up.
        mean: float32 [samples, channels].
        work: How the work is shared.
        centred: Whether to return the last sum.

    Returns:
        float32 [samples, blocks, work.out] each.
    """
    tiled = jnp.tile(mean, (1, work.width // work.channels))
    count = 3 if centred else 2
    return _call("group_norm_backward", _Block.products, [up, x], tiled, count, work)


def _call(
    name: str,
    body: Callable[[_Block], None],
    arrays: Sequence[Array],
    mean: Array | None,
    count: int,
    work: Work,
) -> list[Array]:
    """Runs `body` in each warpgroup, with `count` results."""
    rows = (work.samples, work.rows, work.width)
    given = [x.reshape(rows) for x in arrays]
    given += [] if mean is None else [mean]
    out = (work.samples, work.blocks, work.out)
    shared = plgpu.SMEM((count, work.teams, work.width), jnp.float32)

    def run(*references: Any, shared: Any) -> None:
        read, written = references[: len(given)], references[len(given) :]
        place = lax.axis_index(pallas_gpu.WARPGROUP), lax.axis_index(pallas_gpu.PROGRAM)
        body(_Block(work, read, written, shared, *place))

    made = pallas_gpu.kernel(
        run,
        name,
        [jax.ShapeDtypeStruct(out, jnp.float32)] * count,
        {"shared": shared},
        work.samples * work.blocks,
        work.teams * work.warpgroups,
    )(*given)
    return list(made)


@dataclass(frozen=True)
class _Block:
    """The work of one warpgroup of a block.

    Attributes:
        work: How the work is shared.
        read: Arrays [samples, rows, width] in global memory, and perhaps the means
            [samples, width].
        written: The results.
        shared: float32 [results, teams, width] of shared memory.
        warpgroup: The index of this warpgroup in the block.
        program: The index of this block.
    """

    work: Work
    read: Sequence[Any]
    written: Sequence[Any]
    shared: Any
    warpgroup: Any
    program: Any

    @property
    def sample(self) -> Any:
        """The index of the sample."""
        return lax.div(self.program, jnp.int32(self.work.blocks))

    @property
    def block(self) -> Any:
        """The index of this block among those of its sample."""
        return lax.rem(self.program, jnp.int32(self.work.blocks))

    @property
    def team(self) -> Any:
        """The index of this team in the block."""
        return lax.div(self.warpgroup, jnp.int32(self.work.warpgroups))

    def columns(self, chunk: int) -> Any:
        """The columns of this warpgroup in a chunk."""
        part = lax.rem(self.warpgroup, jnp.int32(self.work.warpgroups))
        first = (part * self.work.chunks + chunk) * self.work.chunk
        return pl.ds(pl.multiple_of(first, self.work.chunk), self.work.chunk)

    def row(self, step: Any) -> Any:
        """A row of this team."""
        place = self.block * self.work.teams + self.team
        return step * (self.work.blocks * self.work.teams) + place

    def loaded(self, array: int, step: Any) -> list[Array]:
        """A row of an array, by chunks."""
        at = self.read[array].at
        return [
            pallas_gpu_rows.loaded(at[self.sample, self.row(step), self.columns(c)])
            for c in range(self.work.chunks)
        ]

    def zeros(self) -> list[Array]:
        """As many sums as columns."""
        return [pallas_gpu_rows.zeros(self.work.chunk) for _ in range(self.work.chunks)]

    def over_rows(
        self, one: Callable[..., Any], arrays: int, first: int, carry: Any
    ) -> Any:
        """Runs ``carry = one(carry, a row of each array)`` for rows from `first` on."""

        def some(count: int) -> Callable[[Any, Any], Any]:
            def take(turn: Any, carry: Any) -> Any:
                steps = [first + turn * count + k for k in range(count)]
                rows = [[self.loaded(i, step) for i in range(arrays)] for step in steps]
                for row in rows:
                    carry = one(carry, *row)
                return carry

            return take

        left = self.work.steps - first
        turns = left // UNROLLED
        carry = lax.fori_loop(0, turns, some(UNROLLED), carry)
        done = turns * UNROLLED
        return lax.fori_loop(done, left, some(1), carry)

    # ------------------------------------------------------------------ both passes
    def statistics(self) -> None:
        """Writes the mean of each channel, and the mean square around it."""
        start = self.loaded(0, jnp.int32(0))
        share = 1.0 / self.work.steps

        def add(carry: Any, row: list[Array]) -> Any:
            off, squares = carry
            left = [x - s for x, s in zip(row, start, strict=True)]
            parts = [y * share for y in left]  # no sum overflows whose mean does not
            off = [a + b for a, b in zip(off, parts, strict=True)]
            both = zip(squares, left, parts, strict=True)
            return off, [s + y * p for s, y, p in both]

        off, squares = self.over_rows(add, 1, 1, (self.zeros(), self.zeros()))
        for c, (first, o, q) in enumerate(zip(start, off, squares, strict=True)):
            self.keep(0, c, first + o)
            self.keep(1, c, q - jnp.minimum(o * o, LARGEST))
        pallas_gpu_rows.wait_for_block()

        def join(entries: Callable[[int], list[Array]]) -> list[Array]:
            means, around = entries(0), entries(1)
            each = 1.0 / len(means)
            mean = _sum(means) * each
            apart = [x - mean for x in means]
            terms = [q + y * y for q, y in zip(around, apart, strict=True)]
            return [mean, _sum(terms) * each]

        self.over_channels(join)

    def products(self) -> None:
        """Writes sums of up, of up · (x - mean) and perhaps of x - mean."""
        at = self.read[2].at
        mean = [
            pallas_gpu_rows.loaded(at[self.sample, self.columns(c)])
            for c in range(self.work.chunks)
        ]
        count = len(self.written)

        def add(carry: Any, up: list[Array], x: list[Array]) -> Any:
            left = [y - m for y, m in zip(x, mean, strict=True)]
            terms = [up, [u * y for u, y in zip(up, left, strict=True)], left][:count]
            return tuple(
                [a + b for a, b in zip(total, term, strict=True)]
                for total, term in zip(carry, terms, strict=True)
            )

        totals = self.over_rows(add, 2, 0, tuple(self.zeros() for _ in range(count)))
        for i, total in enumerate(totals):
            for c, value in enumerate(total):
                self.keep(i, c, value)
        pallas_gpu_rows.wait_for_block()
        self.over_channels(lambda of: [_sum(of(i)) for i in range(count)])

    # ----------------------------------------------------------- over a channel
    def keep(self, result: int, chunk: int, value: Array) -> None:
        """Writes a team's part of a result to shared memory."""
        place = self.shared.at[result, self.team, self.columns(chunk)]
        pallas_gpu_rows.store(place, value)

    def over_channels(self, join: Callable[..., list[Array]]) -> None:
        """Writes ``join(entries)`` for all channels, 128 in a warpgroup at once.

        ``entries(i)`` gives what `keep` wrote of a result: for each team, and each
        column of the same channel. The last channels may be written twice.
        """
        work = self.work
        together = work.teams * work.warpgroups
        turns = -(-work.out // (LANES * together))

        def one(turn: Any, carry: Any) -> Any:
            index = turn * together + self.warpgroup
            first = jnp.minimum(index * LANES, work.out - LANES)

            def entries(result: int) -> list[Array]:
                places = [
                    (team, first + k * work.out)
                    for team in range(work.teams)
                    for k in range(work.width // work.out)
                ]
                return [
                    pallas_gpu_rows.loaded(
                        self.shared.at[result, team, pl.ds(column, LANES)]
                    )
                    for team, column in places
                ]

            for out, value in zip(self.written, join(entries), strict=True):
                place = out.at[self.sample, self.block, pl.ds(first, LANES)]
                pallas_gpu_rows.store(place, value)
            return carry

        lax.fori_loop(0, turns, one, jnp.int32(0))


def _sum(values: Sequence[Array]) -> Array:
    """The sum of arrays, neighbours first."""
    parts = list(values)
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=False)
        parts = [a + b for a, b in pairs] + parts[2 * (len(parts) // 2) :]
    return parts[0]
