"""Norms of narrow rows on a Hopper GPU, 64 rows at a time in each warpgroup.

Rows of up to 256 columns are too short for all lanes of a warpgroup. So a warpgroup
takes a tile of 64 rows, laid out in registers as tensor cores have it: four lanes share
a row, and add up its sums among them. Widths are multiples of 16. Columns lie in panels
in shared memory, and are read again for each sum that needs the one before.

Sums over rows, of which the cotangents of scale and bias are made, stay in registers.
XLA adds those of all warpgroups.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.norms.hopper_config import (
    TILE_ROWS,
    Norm,
    Teams,
    columns_of_panel,
    result_has_memory,
)
from rewriter.kernels.shared import pallas_gpu, pallas_gpu_tiles

if TYPE_CHECKING:
    from jax import Array

LINE = 128
"""Bytes of which copies to shared memory want a multiple. Others are read from global
memory."""


def normalized(
    norm: Norm, x: Array, given: dict[str, Array], config: Teams,
    addend: Array | None = None,
) -> tuple[Array, ...]:  # fmt: skip
    """Returns the norm of rows [m, d], and sums; see `hopper_kernel.normalized`."""
    config = _of_rows(config, norm.m)
    arrays, out = {"x": x}, {"out": jax.ShapeDtypeStruct(x.shape, norm.out)}
    if addend is not None:
        arrays["addend"] = addend
        out["sum"] = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return tuple(_call(_Forward, norm, config, arrays, given, out))


def cotangents(
    norm: Norm, x: Array, cotangent: Array, given: dict[str, Array], config: Teams,
    addend: Array | None = None,
) -> dict[str, Array]:  # fmt: skip
    """Returns the cotangents of x and `given`; see `hopper_kernel.cotangents`."""
    config = _of_rows(config, norm.m)
    lanes = config.programs * config.teams
    out = {"dx": jax.ShapeDtypeStruct(x.shape, x.dtype)}
    if norm.summed:
        shape = (len(norm.summed), lanes, TILE_ROWS, norm.d // 2)
        out["sums"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    if "epsilon" in given:
        shape = (lanes, TILE_ROWS)
        out["depsilon"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    arrays = {"x": x, "cotangent": cotangent}
    arrays |= {} if addend is None else {"addend": addend}
    made = dict(
        zip(out, _call(_Backward, norm, config, arrays, given, out), strict=True)
    )
    grads = {"x": made["dx"]}
    if norm.summed:
        sums = pallas_gpu_tiles.columns_of_pairs(made["sums"])
        grads |= dict(zip(norm.summed, sums, strict=True))
    if "epsilon" in given:
        grads["epsilon"] = made["depsilon"].sum()
    return grads


def _of_rows(config: Teams, m: int) -> Teams:
    """Returns a config without blocks that would have no tile."""
    blocks = -(-m // (TILE_ROWS * config.teams))
    return replace(config, programs=min(config.programs, blocks))


def _call(
    kind: type[_Tiles], norm: Norm, config: Teams, arrays: dict[str, Array],
    given: dict[str, Array], out: dict[str, Any],
) -> Any:  # fmt: skip
    operands = dict(arrays)
    read = [n for n in ("scale", "bias") if n in given and n in kind.kept_names]
    operands |= {n: given[n] for n in read}
    kept = [n for n in read if given[n].nbytes % LINE == 0]
    if "epsilon" in given:
        operands["epsilon"] = given["epsilon"].astype(jnp.float32).reshape(1)
    places, each = config.teams * config.stages, columns_of_panel(norm)
    panels = lambda count, dtype: pallas_gpu_tiles.panels(
        (count, TILE_ROWS, norm.d), dtype, each
    )
    scratch: dict[str, Any] = {n: panels(places, x.dtype) for n, x in arrays.items()}
    if "out" in out and result_has_memory(norm):
        scratch["made"] = panels(config.teams, norm.out)
    copies = len(arrays) * norm.d // columns_of_panel(norm)
    scratch["ready"] = pallas_gpu.barriers(places, copies)
    scratch |= {f"kept_{n}": plgpu.SMEM((norm.d,), given[n].dtype) for n in kept}
    if kept:
        scratch["kept"] = pallas_gpu.barriers(1, len(kept))

    def body(*references: Any, **memory: Any) -> None:
        named = dict(zip((*operands, *out), references, strict=True))
        kind(norm, config, named, memory, tuple(arrays)).run()

    run = pallas_gpu.kernel(
        body, kind.name, list(out.values()), scratch, config.programs, config.teams
    )
    return run(*operands.values())


class _Tiles:
    """Common code of both passes: the tiles of a warpgroup.

    Attributes:
        norm: What is computed.
        config: The warpgroups.
        refs: Arrays in global memory by name.
        memory: Shared memory by name, in the view that registers are loaded from.
        rows: The same of streamed arrays, in the view that is copied.
    """

    name: str
    kept_names: tuple[str, ...]
    """The operands for each column that it reads."""

    def __init__(
        self, norm: Norm, config: Teams, refs: dict[str, Any], memory: dict[str, Any],
        streamed: tuple[str, ...],
    ):  # fmt: skip
        self.norm, self.config, self.refs = norm, config, refs
        made = ("made",) if "made" in memory else ()
        views = {name: tuple(memory[name]) for name in (*streamed, *made)}
        self.streams = streamed
        self.memory = memory | {name: view[0] for name, view in views.items()}
        self.rows = {name: view[-1] for name, view in views.items()}
        self.warpgroup = lax.axis_index(pallas_gpu.WARPGROUP)
        program = lax.axis_index(pallas_gpu.PROGRAM)
        self.lane = program * config.teams + self.warpgroup

    @property
    def lanes(self) -> int:
        """The warpgroups of all blocks."""
        return self.config.programs * self.config.teams

    @property
    def steps(self) -> Any:
        """The number of this warpgroup's tiles."""
        tiles = -(-self.norm.m // TILE_ROWS)
        return lax.div(tiles - self.lane + (self.lanes - 1), jnp.int32(self.lanes))

    @property
    def each(self) -> int:
        """Columns of a panel of x."""
        return columns_of_panel(self.norm)

    def run(self) -> None:
        """Computes this warpgroup's tiles."""
        steps = self.steps
        for turn in range(self.config.stages):
            self.fetch(turn, turn < steps)
        self.keep()
        carry = lax.fori_loop(0, steps, self.compute, self.begin())
        plgpu.wait_smem_to_gmem(0)
        self.end(carry)

    def slot(self, turn: Any) -> Any:
        """The place of a tile in shared memory."""
        stages = self.config.stages
        return self.warpgroup * stages + lax.rem(jnp.int32(turn), jnp.int32(stages))

    def place(self, name: str, turn: Any) -> Any:
        """The place of a tile of an array: there is one of results with memory."""
        return self.warpgroup if name == "made" else self.slot(turn)

    def first_row(self, turn: Any) -> Any:
        """The first row of a tile."""
        return (self.lane + turn * self.lanes) * TILE_ROWS

    def fetch(self, turn: Any, wanted: Any) -> None:
        """Copies a tile of each streamed array, if it is wanted."""

        @pallas_gpu.when(wanted)
        def _() -> None:
            slot = self.slot(turn)
            rows = pl.ds(self.first_row(jnp.int32(turn)), TILE_ROWS)
            for name in self.streams:
                memory = self.rows[name]
                _, count, _, each = memory.shape
                for i in range(count):
                    source = self.refs[name].at[rows, pl.ds(i * each, each)]
                    ready = self.memory["ready"].at[slot]
                    plgpu.copy_gmem_to_smem(source, memory.at[slot, i], ready)

    def refill(self, turn: Any) -> None:
        """Copies a later tile in place of the last one, whose result is written."""
        after = turn - 1 + self.config.stages
        wanted = (turn > 0) & (after < self.steps)
        wait = lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        pallas_gpu.when(wanted)(wait)
        self.fetch(after, wanted)

    def keep(self) -> None:
        """Copies what there is for each column to shared memory."""
        if "kept" not in self.memory:
            return
        ready = self.memory["kept"].at[0]

        @pallas_gpu.when(self.warpgroup == 0)
        def _() -> None:
            for name in self.kept_names:
                if f"kept_{name}" in self.memory:
                    place = self.memory[f"kept_{name}"]
                    plgpu.copy_gmem_to_smem(self.refs[name], place, ready)

        plgpu.barrier_wait(ready)

    # ------------------------------------------------------------------ panels
    @property
    def panels(self) -> range:
        """The panels of x."""
        return range(self.norm.d // self.each)

    def x(self, slot: Any, i: int, level: Any = None) -> Array:
        """A panel of x, or of sums, with levels subtracted: float32 [64, each]."""
        x = self.streamed("x", slot, i)
        if self.norm.addend and "cotangent" not in self.rows:
            x = x + self.streamed("addend", slot, i)
            x = x.astype(self.norm.dtype).astype(jnp.float32)
        return x if level is None else x - self.along(level)

    def streamed(self, name: str, slot: Any, i: int) -> Array:
        """A panel of a streamed array: float32 [64, each]."""
        return self.memory[name].at[slot, i][...].astype(jnp.float32)

    def kept(self, name: str, i: int) -> Array | None:
        """Returns what there is for the columns of a panel, in every row."""
        if name not in self.refs:
            return None
        source = self.memory.get(f"kept_{name}", self.refs[name])
        place = source.at[pl.ds(i * self.each, self.each)]
        found = pallas_gpu.loaded(place, pallas_gpu.COLUMNS, optimized=False)
        shape = (TILE_ROWS, self.each)
        return lax.broadcast_in_dim(found.astype(jnp.float32), shape, [1])

    def along(self, x: Array) -> Array:
        """Returns numbers of rows in every column of a panel."""
        return lax.broadcast_in_dim(x, (TILE_ROWS, self.each), [0])

    def means(self, *terms: Any) -> list[Array]:
        """Returns means over columns of what functions of a panel's index give."""
        made = []
        for term in terms:
            total = None
            for i in self.panels:
                part = term(i).sum(axis=1)
                total = part if total is None else total + part
            made.append(total * (1.0 / self.norm.d))
        return made

    def root(self, square: Array, level: Any, turn: Any) -> Array:
        """Returns the inverse root of mean squares, and 0 for rows that there are not.

        Their numbers are zeros, which must not become NaN.
        """
        square = square + self.norm.eps
        if self.norm.of_squares:
            square = square + (level * level - level * level)  # inf - inf, or 0
        if "epsilon" in self.refs:
            square = square + self.refs["epsilon"][0]
        root = lax.rsqrt(square)
        if self.norm.m % TILE_ROWS == 0:
            return root
        there = pallas_gpu_tiles.row_positions() < self.norm.m - self.first_row(turn)
        return jnp.where(there, root, 0.0)

    def write(self, output: str, name: str, turn: Any) -> None:
        """Copies a tile from the place of an array to a result."""
        plgpu.commit_smem()
        slot, memory = self.place(name, turn), self.rows[name]
        rows = pl.ds(self.first_row(turn), TILE_ROWS)
        _, count, _, each = memory.shape
        for i in range(count):
            target = self.refs[output].at[rows, pl.ds(i * each, each)]
            plgpu.copy_smem_to_gmem(memory.at[slot, i], target)

    # What differs:
    def begin(self) -> Any:
        """Returns what is summed up over tiles, before the first."""
        return jnp.int32(0)

    def compute(self, turn: Any, carry: Any) -> Any:
        """Computes a tile, and returns the sums with its share."""
        raise NotImplementedError

    def end(self, carry: Any) -> None:
        """Writes the sums."""


class _Forward(_Tiles):
    """The norm of rows."""

    name = "norm_tiles"
    kept_names = ("scale", "bias")

    def compute(self, turn: Any, carry: Any) -> Any:
        """Computes and writes a tile."""
        slot, level = self.slot(turn), None
        plgpu.barrier_wait(self.memory["ready"].at[slot])
        if self.norm.centred:
            (level,) = self.means(lambda i: self.x(slot, i))
        (square,) = self.means(lambda i: self.x(slot, i, level) ** 2)
        root = self.root(square, level, turn)
        self.refill(turn)
        result = "made" if "made" in self.memory else "x"
        if result == "made":
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.commit_smem()  # all warps know
        for i in self.panels:
            y = self.x(slot, i)
            if self.norm.addend:
                place = self.memory["addend"].at[slot, i]
                place[...] = y.astype(place.dtype)
            y = (y if level is None else y - self.along(level)) * self.along(root)
            scale, bias = self.kept("scale", i), self.kept("bias", i)
            y = y if scale is None else y * scale
            y = y if bias is None else y + bias
            place = self.memory[result].at[self.place(result, turn), i]
            place[...] = y.astype(place.dtype)
        self.write("out", result, turn)
        if self.norm.addend:
            self.write("sum", "addend", turn)
        return carry


class _Backward(_Tiles):
    """The cotangents; formulas are those of `hopper_team.Team.differentiate`."""

    name = "norm_tiles_backward"
    kept_names = ("scale",)

    def begin(self) -> Any:
        """Returns zeros for each name and panel, and for epsilon."""
        half = TILE_ROWS, self.each // 2
        zeros = [
            [pallas_gpu_tiles.zeros(half) for _ in self.panels]
            for _ in self.norm.summed
        ]
        given = "epsilon" in self.refs
        return zeros, pallas_gpu_tiles.zeros((TILE_ROWS,)) if given else jnp.int32(0)

    def compute(self, turn: Any, carry: Any) -> Any:
        """Computes and writes a tile's cotangents."""
        norm, slot = self.norm, self.slot(turn)
        sums, epsilon = carry
        plgpu.barrier_wait(self.memory["ready"].at[slot])

        def scaled(i: int) -> Array:
            up, scale = self.streamed("cotangent", slot, i), self.kept("scale", i)
            return up if scale is None else up * scale

        level = less = None
        if norm.centred:
            level, less = self.means(lambda i: self.x(slot, i), scaled)
        y = lambda i: self.x(slot, i, level)
        square, product = self.means(lambda i: y(i) ** 2, lambda i: y(i) * scaled(i))
        root = self.root(square, level, turn)
        product = product * root
        if norm.corrects:
            (left,) = self.means(y)
            less = less - left * root * product
        self.refill(turn)
        sums = [list(parts) for parts in sums]
        for i in self.panels:
            n, up = y(i) * self.along(root), self.streamed("cotangent", slot, i)
            for k, name in enumerate(norm.summed):
                term = up * n if name == "scale" else up
                sums[k][i] = sums[k][i] + pallas_gpu_tiles.row_pairs(term)
            g = scaled(i)
            g = g if less is None else g - self.along(less)
            down = (g - n * self.along(product)) * self.along(root)
            if norm.addend:
                down = down + self.streamed("addend", slot, i)
            place = self.memory["x"].at[slot, i]
            place[...] = down.astype(place.dtype)
        self.write("dx", "x", turn)
        if "epsilon" in self.refs:
            epsilon = epsilon + product * root * root * (-0.5 * norm.d)
        return sums, epsilon

    def end(self, carry: Any) -> None:
        """Writes this warpgroup's sums, also where it had no tile."""
        sums, epsilon = carry
        half = self.each // 2
        for k, parts in enumerate(sums):
            for i, value in enumerate(parts):
                columns = pl.ds(i * half, half)
                place = self.refs["sums"].at[k, self.lane, :, columns]
                pallas_gpu.store_rows(place, value)
        if "epsilon" in self.refs:
            pallas_gpu.store_rows(self.refs["depsilon"].at[self.lane], epsilon)
