"""Few rows times a stored matrix, which is widened in registers.

A block of threads computes some columns of the result. Its last warpgroup copies parts
of the rows and of the matrix as shared memory becomes free. The others take these parts
in turns, or share their columns. Each widens numbers of the matrix in registers, from
where tensor cores multiply them, and adds up its own sums. So stored numbers are read
once from global and once from shared memory, and widened ones never leave registers.

Several blocks may share columns, each with a part of the summed axis. They are a
cluster: in the end each adds up some of the sums of all of them, in a fixed order.

Tensor cores compute the transposed result: the matrix's columns are their rows, of
which they take 64 at once, and the few rows their columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.quantized_dot.few_rows import instructions, threads, totals
from rewriter.kernels.quantized_dot.few_rows.config import (
    CHUNK,
    LINE_BYTES,
    WIDTHS,
    Tiles,
    padded,
)
from rewriter.kernels.quantized_dot.few_rows.registers import Steps
from rewriter.kernels.shared import pallas_gpu

if TYPE_CHECKING:
    from jax import Array

REFUSES = jax.__version_info__ >= (0, 12)
"""Whether JAX refuses slices past the end of an array: up to 0.11 they hold zeros."""

LINE = 32
"""The columns of a tile of words: 128 bytes."""

PART = "part"
"""The axis along which blocks share the summed axis."""


@dataclass(frozen=True)
class Use:
    """One call of the kernel.

    Attributes:
        steps: How numbers are widened.
        behind: What is joined to the sums, and their roundings. Arrays are indices of
            the rows that are given for it.
        stored: The dtype of the numbers.
        dtype: The result's dtype.
        config: The tiles.
        transposed: Whether the matrix is [n, k].
        by_rows: Whether arrays of the steps have a value for each summed row instead of
            each column.
        inside: None, or what is joined to the product of each step, in float32, before
            it is added up. The arrays are then joined here, and not to the numbers.
        alternating: Whether a thread reads whole words of a transposed matrix. The
            summed axis of the rows is then ordered by `alternating`, unless tensor
            cores of warps multiply.
        packed: ``"last"`` if the matrix's elements are integers that hold several
            numbers of its last axis. ``"first"`` if those are words of eight numbers of
            the first axis: numbers are then read as if the matrix were transposed.
        each: The numbers of an element.
        codebook: 16 floats that numbers stand for, where `alternating`; or none.
        places: The place of each of an element's numbers there, or none if they are in
            order. Those of the summed axis take the rows in order, and tensor cores of
            warps. Those of columns are all a thread's.
        turned: Whether arrays of the steps are [n, z], as a transposed matrix lies. A
            copy then has `LINE_BYTES` of each column.
    """

    steps: Steps
    behind: tuple[tuple[str, Any], ...]
    stored: str
    dtype: str
    config: Tiles
    transposed: bool = False
    by_rows: bool = False
    inside: Steps | None = None
    alternating: bool = False
    packed: str = ""
    each: int = 1
    codebook: tuple[float, ...] = ()
    places: tuple[int, ...] = ()
    turned: bool = False

    def place_of(self, number: int) -> int:
        """Returns the place of a number among a thread's neighbours."""
        if not self.places:
            return number
        first, at = divmod(number, len(self.places))
        return first * len(self.places) + self.places[at]

    @property
    def width(self) -> int:
        """Columns of a tile of the matrix."""
        if self.packed == "first":
            return LINE
        return self.config.width(self.stored, self.transposed)

    @property
    def tile(self) -> tuple[int, int]:
        """The elements of a tile, as they lie in memory."""
        depth, wide = self.config.depth, self.width
        if self.packed == "first":
            return depth // self.each, wide
        shape = (wide, depth) if self.transposed else (depth, wide)
        return shape[0], shape[1] // self.each

    def place(self, row: Any, column: Any) -> tuple[Any, Any]:
        """Returns where a tile lies in the matrix.

        Args:
            row: Its first number of the summed axis.
            column: Its first column.
        """
        down, wide = self.tile
        first, second = row, column
        if self.transposed and self.packed != "first":
            first, second = column, row
        each = jnp.int32(self.each)
        if self.packed == "first":
            first = lax.div(first, each)
        elif self.each > 1:
            second = lax.div(second, each)
        starts = pl.multiple_of(first, down), pl.multiple_of(second, wide)
        return pl.ds(starts[0], down), pl.ds(starts[1], wide)


def alternating(rows: Array, count: int) -> Array:
    """Returns rows whose last axis is ordered as threads read a transposed matrix.

    Tensor cores take from thread t of four the numbers 2 t and 2 t + 1 of each 8. A
    thread has a word there. It gives the words' first and middle numbers to the first
    8, and the ones behind these to the next 8.

    Args:
        rows: [..., k], k a multiple of 4 words.
        count: The numbers of a word of 32 bits.
    """
    parts = rows.reshape(*rows.shape[:-1], -1, 4, 2, count // 2)
    return jnp.moveaxis(parts, -1, -3).reshape(rows.shape)


def rows_times_matrix(
    name: str,
    lhs: Array,
    matrix: Array,
    joined: Sequence[Array],
    behind: Sequence[Array],
    use: Use,
) -> Array:
    """Returns rows times a stored matrix.

    Args:
        name: The name of the kernel in profiles.
        lhs: [m, k], bfloat16 or float16, m at most 64.
        matrix: [k, n], as `Use.stored`; [n, k] if transposed. The same with fewer
            elements, if they are `Use.packed`.
        joined: Arrays [z, n] of `Use.steps`, a row for each z-th part of k; [n, z] if
            they are `Use.turned`.
        behind: Arrays float32 [n] of `Use.behind`.
        use: How.

    Returns:
        [m, n], of `Use.dtype`.
    """
    (m, k), config = lhs.shape, use.config
    n = matrix.size * use.each // k
    scratch = shared_memory(use, lhs, matrix.dtype, joined, len(joined))
    table: list[Array] = []
    if use.codebook:
        table = [jnp.array(2 * use.codebook, jnp.float32)]  # a copy has 128 bytes
        scratch["table"] = plgpu.SMEM(table[0].shape, jnp.float32)
        scratch["table_ready"] = pallas_gpu.barriers(1)

    def body(lhs: Any, matrix: Any, *references: Any, **shared: Any) -> None:
        *arrays, out = references
        codebook = arrays.pop() if table else None
        given = arrays[: len(joined)], arrays[len(joined) :]
        Block(use, lhs, matrix, *given, out, shared, codebook).run()

    return pallas_gpu.kernel(
        body, name, [jax.ShapeDtypeStruct((m, n), use.dtype)], scratch,
        n // config.block_n, config.computing + 1, config.splits, PART,
    )(lhs, matrix, *joined, *behind, *table)[0]  # fmt: skip


def shared_memory(
    use: Use, lhs: Array, dtype: Any, joined: Sequence[Array], arrays: int
) -> dict[str, Any]:
    """Returns the shared memory of a block of threads, by name.

    Args:
        use: How.
        lhs: The rows.
        dtype: That of the matrix.
        joined: Arrays that a block has a part of as wide as itself.
        arrays: How many copies bring these parts.
    """
    (m, k), config, wide = lhs.shape, use.config, use.width
    rows, parts = padded(m), config.chunks
    copies = config.copies(wide, arrays)
    parts_of = [_part(use, x, k) for x in joined]
    return {
        "left": pallas_gpu.tiles_and_rows(
            (config.stages * parts, rows, CHUNK),
            (config.stages * parts, rows, CHUNK),
            lhs.dtype,
        ),
        "right": pallas_gpu.tiles(
            (config.stages, config.block_n // wide, *use.tile), dtype
        ),
        "joined": [
            plgpu.SMEM((config.stages, *part), x.dtype)
            for x, part in zip(joined, parts_of, strict=True)
        ],
        "partial": plgpu.SMEM((config.turns, rows, config.block_n), jnp.float32),
        "ready": pallas_gpu.barriers(config.stages, copies),
        "free": pallas_gpu.barriers(config.stages, config.across),
    }


def _part(use: Use, values: Array, k: int) -> tuple[int, int]:
    """The shape of what a copy brings of an array of groups."""
    if use.turned:
        return use.config.block_n, LINE_BYTES // values.dtype.itemsize
    group = k // values.shape[0]
    return max(1, use.config.depth // group), use.config.block_n


@dataclass(frozen=True)
class Block:
    """The work of one block of threads."""

    use: Use
    lhs: Any
    matrix: Any
    joined: Sequence[Any]
    behind: Sequence[Any]
    out: Any
    shared: dict[str, Any]
    codebook: Any = None

    def run(self) -> None:
        """Runs this warpgroup's part."""
        warpgroup = lax.axis_index(pallas_gpu.WARPGROUP)
        threads.divide(warpgroup, self.use.config.computing, self.compute, self.copy)
        self.finish()
        if self.use.config.splits > 1:
            threads.meet()  # no block ends while another one reads its sums

    def finish(self) -> None:
        """Stores the block's part of the result."""
        across = pl.ds(self.column, self.use.config.block_n)
        totals.add_up(
            self.shared["partial"], self.out.at[:, across],
            [x.at[across] for x in self.behind], self.use.config, self.use.behind,
        )  # fmt: skip

    @property
    def column(self) -> Any:
        """The block's first column."""
        wide = self.use.config.block_n
        return pl.multiple_of(lax.axis_index(pallas_gpu.PROGRAM) * wide, wide)

    @property
    def steps(self) -> tuple[Any, Any]:
        """The first of this block's steps, and the one behind the last."""
        count, parts = (
            self.lhs.shape[1] // self.use.config.depth,
            self.use.config.splits,
        )
        if parts == 1:
            return jnp.int32(0), jnp.int32(count)
        part = lax.axis_index(PART)
        first, end = (lax.div(p * count, jnp.int32(parts)) for p in (part, part + 1))
        return first, end

    def slot(self, step: Any) -> Any:
        """Where in shared memory a step lies."""
        return lax.rem(step, jnp.int32(self.use.config.stages))

    # ------------------------------------------------------------------ copying
    def copy(self) -> None:
        """Fills shared memory as it becomes free."""
        config, x = self.use.config, self.shared
        _, left = x["left"]
        wide = self.use.width
        if self.use.codebook:
            ready = x["table_ready"].at[0]
            plgpu.copy_gmem_to_smem(self.codebook, x["table"], ready)
        first, end = self.steps

        def one(i: Any, _: Any) -> None:
            slot = self.slot(i)
            ready = x["ready"].at[slot]
            plgpu.barrier_wait(x["free"].at[slot])
            row = pl.multiple_of((first + i) * config.depth, config.depth)
            for tile in range(config.block_n // wide):
                source, column = self.source(tile)
                plgpu.copy_gmem_to_smem(
                    source.at[*self.use.place(row, column)],
                    x["right"].at[slot, tile],
                    ready,
                )
            for part in range(config.chunks):
                along = pl.ds(pl.multiple_of(row + part * CHUNK, CHUNK), CHUNK)
                place = left.at[slot * config.chunks + part]
                rows = x["left"][0].shape[1]
                if REFUSES and rows > self.lhs.shape[0]:
                    rows = self.lhs.shape[0]  # products of the others are not stored
                    place = place.at[pl.ds(0, rows)]
                plgpu.copy_gmem_to_smem(
                    self.lhs.at[pl.ds(0, rows), along], place, ready
                )
            self.copy_joined(row, slot, ready)

        lax.fori_loop(0, end - first, one, None)

    def source(self, tile: int) -> tuple[Any, Any]:
        """The matrix of a tile, and the tile's first column there."""
        return self.matrix, self.column + tile * self.use.width

    def copy_joined(self, row: Any, slot: Any, ready: Any) -> None:
        """Copies the parts of arrays that a step reads."""
        wide = min(self.use.config.block_n, WIDTHS[1])
        for values, place in zip(self.joined, self.shared["joined"], strict=True):
            for at in range(0, self.use.config.block_n, wide):
                own, across = pl.ds(at, wide), pl.ds(self.column + at, wide)
                if self.use.turned:
                    part, to = self.line_of(values, row, place, across), (slot, own)
                else:
                    count = place.shape[1]
                    part = self.groups_of(values, row, count, across)
                    to = slot, pl.ds(0, count), own
                plgpu.copy_gmem_to_smem(part, place.at[to], ready)

    def line_of(self, values: Any, row: Any, place: Any, across: Any) -> Any:
        """The part of a turned array that has a step's groups: a whole line."""
        line, at = place.shape[2], self.group_at(values, row)
        first = pl.multiple_of(at - lax.rem(at, jnp.int32(line)), line)
        return values.at[across, pl.ds(first, line)]

    def groups_of(self, values: Any, row: Any, count: int, across: Any) -> Any:
        """The part of an array that a step of some columns reads."""
        return values.at[pl.ds(self.group_at(values, row), count), across]

    def numbers_of_group(self, values: Any) -> int:
        """How many numbers of the summed axis share a value of an array."""
        return self.lhs.shape[1] // values.shape[int(self.use.turned)]

    def group_at(self, values: Any, row: Any) -> Any:
        """The group of a number of the summed axis."""
        return lax.div(row, jnp.int32(self.numbers_of_group(values)))

    def own_values(self, values: Any, place: Any, step: Any, columns: Any) -> Any:
        """A warpgroup's part of an array in shared memory.

        Args:
            values: The array.
            place: Its copies.
            step: The step, of this block's.
            columns: Those of the warpgroup.
        """
        slot, depth = self.slot(step), self.use.config.depth
        if not self.use.turned:
            return place.at[slot, pl.ds(0, place.shape[1]), columns]
        count = max(1, depth // self.numbers_of_group(values))
        at = self.group_at(values, (self.steps[0] + step) * depth)
        at = lax.rem(at, jnp.int32(place.shape[2]))
        return place.at[slot, columns, pl.ds(at, count)]

    # ---------------------------------------------------------------- computing
    def compute(self, warpgroup: Any) -> None:
        """Adds up every so manieth step of this block, for this warpgroup's columns."""
        config, x = self.use.config, self.shared
        left, _ = x["left"]
        turn = lax.div(warpgroup, jnp.int32(config.across))
        part = lax.rem(warpgroup, jnp.int32(config.across))
        wide, tiles = config.columns, config.columns // self.use.width
        columns = pl.ds(pl.multiple_of(part * wide, wide), wide)
        own = pl.ds(part * tiles, tiles)
        for slot in range(config.stages):
            mine = turn == slot % config.turns
            pallas_gpu.when(mine)(lambda s=slot: plgpu.barrier_arrive(x["free"].at[s]))
        if self.use.codebook:
            plgpu.barrier_wait(x["table_ready"].at[0])
        first, end = self.steps
        groups = [self.numbers_of_group(v) for v in self.joined]

        zeros = [pallas_gpu.zeros((64, left.shape[1]))] * (wide // 64)

        def one(i: Any, sums: Any) -> Any:
            step = turn + i * config.turns
            slot = self.slot(step)
            plgpu.barrier_wait(x["ready"].at[slot])
            parts = [left.at[slot * config.chunks + p] for p in range(config.chunks)]
            pairs = zip(self.joined, x["joined"], strict=True)
            joined = [self.own_values(v, place, step, columns) for v, place in pairs]
            joined += [x["table"]] if self.use.codebook else []
            right = x["right"].at[slot, own]
            if self.use.inside is None:
                sums = instructions.multiply(
                    sums, right, parts, joined, groups, self.use
                )
            else:
                made = instructions.multiply(zeros, right, parts, (), (), self.use)
                sums = instructions.add_joined(sums, made, right, joined, self.use)
            plgpu.barrier_arrive(x["free"].at[slot])
            return sums

        count = lax.div(end - first - turn + config.turns - 1, jnp.int32(config.turns))
        sums = lax.optimization_barrier(lax.fori_loop(0, count, one, zeros))
        rows = pl.ds(0, left.shape[1])
        place = x["partial"].at[turn, rows, columns]
        totals.store_sums(sums, place, self.use)
