"""The weights' gradient in the memory of the first rows' cotangents, on Hopper GPUs.

The gradient [k, v] is rows [n, k] times cotangents [n, v] of logits. Those of the first
k rows lie where it is put. A tile of it takes some of its columns of all rows, these
first. A block of threads counts when it has read them. It stores its tile when all
tiles of the same columns are counted, which is while the last rows are multiplied. So
nothing is copied, and no gradient is added up in memory.

Blocks claim tiles in order, column by column, and the next one when they may store the
one before. So the tiles that a block waits for are those of other blocks that run, as
soon as so many run at once as a column has tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.linear_cross_entropy.chunks import CHUNK
from rewriter.kernels.linear_cross_entropy.in_place import narrow
from rewriter.kernels.ragged.dot.hopper import by_groups, store
from rewriter.kernels.ragged.dot.hopper.by_groups import WIDE, Tile
from rewriter.kernels.ragged.dot.hopper.config import STEP, WARPGROUPS, Tiles
from rewriter.kernels.shared import counters, pallas_gpu, work_stealing

if TYPE_CHECKING:
    from jax import Array

    from rewriter.kernels.linear_cross_entropy.head import Head
    from rewriter.kernels.linear_cross_entropy.in_place import Known

NAME = "gradient_of_weights_in_place"
"""The name of the kernel in profiles."""

TILES = Tiles()
"""Of 128 rows of a result and 256 columns."""


def columns_at_once(k: int, most: int) -> int:
    """Returns the most columns of a gradient that fill whole turns of all blocks.

    Args:
        k: The rows of the gradient.
        most: The most columns, unless one turn has more.

    Example:
        >>> columns_at_once(4096, 40000)
        33792
    """
    rows = -(-k // TILES.block_m)
    turn = TILES.programs // math.gcd(TILES.programs, rows) * TILES.block_n
    return max(most // turn, 1) * turn


def of_weights(
    head: Head, x: Array, held: Sequence[Array], others: Array, known: Known | None,
    size: int,
) -> Array:  # fmt: skip
    """Returns what `in_place.of_weights` does, in chunks if the last rows need them."""
    del size
    (first, *rest), v = held, head.classes
    if known is None:
        return put(x, first, rest, 0, v)
    most = CHUNK // first.dtype.itemsize // others.shape[0]
    width = columns_at_once(first.shape[0], most)
    for start in range(0, v, width):
        count = min(width, v - start)
        made = product(others, head.w, start, count)
        d = narrow(head.chunk(start, count), made, known)
        first = put(x, first, [*rest, d], start, count)
        first, others, known = lax.optimization_barrier((first, others, known))
    return first


def put(
    x: Array, first: Array, parts: Sequence[Array], column: int, width: int,
    programs: int = TILES.programs,
) -> Array:  # fmt: skip
    """Returns cotangents of rows, some columns of which are replaced by a gradient.

    Args:
        x: Rows [n, k], bfloat16 or float16, k a multiple of 128.
        first: [k, v], the cotangents of the first rows, v a multiple of 64.
        parts: Those of the other rows, in their order: [rows, v] of all columns, or
            [rows, width] of those that are replaced. Rows are multiples of 64.
        column: The first column, a multiple of 64.
        width: How many columns are replaced: whole tiles, or all up to the last one.
        programs: Blocks of threads. At least as many run at once as a column has tiles.
    """
    k, v = first.shape
    rows, across = k // TILES.block_m, -(-width // TILES.block_n)
    count = min(programs, rows * across)
    assert rows <= count, "a block of threads would wait for itself"
    assert not width % TILES.block_n or column + width == v, "a tile has other columns"
    target = jax.new_ref(first)
    read = jax.new_ref(jnp.zeros((across, 1), jnp.int32))

    def body(x: Any, out: Any, claims: Any, read: Any, *parts: Any, **own: Any) -> None:
        shifts = [0 if p.shape[1] == v else -column for p in parts]
        sources = [Source(out, k, 0), *map(_source, parts, shifts)]
        _InPlace(TILES, x, out, claims, out, own, column, width, sources, read).run()

    pallas_gpu.kernel(body, NAME, [], _scratch(first.dtype), count, WARPGROUPS + 1)(
        x, target, work_stealing.counter(), read, *parts
    )
    return target[...]


def product(
    x: Array, w: Array, column: int, width: int, programs: int = TILES.programs
) -> Array:
    """Returns rows times some columns of weights, [n, width], which are not copied.

    Args:
        x: Rows [n, k], bfloat16 or float16, n and k multiples of 64.
        w: [k, v], v a multiple of 64.
        column: The first column, a multiple of 64.
        width: How many columns.
        programs: Blocks of threads.
    """
    out = jax.ShapeDtypeStruct((x.shape[0], width), x.dtype)

    def body(x: Any, w: Any, claims: Any, out: Any, **own: Any) -> None:
        _Product(TILES, x, w, claims, out, own, 0, width, [_source(w, column)]).run()

    tiles = -(-x.shape[0] // TILES.block_m) * -(-width // TILES.block_n)
    (made,) = pallas_gpu.kernel(
        body, "product_of_some_columns", [out], _scratch(x.dtype),
        min(programs, tiles), WARPGROUPS + 1,
    )(x.T, w, work_stealing.counter())  # fmt: skip
    return made


def _scratch(dtype: Any) -> dict[str, Any]:
    """Shared memory of a block of threads, by name."""
    made = {
        "ready": pallas_gpu.barriers(TILES.stages, TILES.copies),
        "free": pallas_gpu.barriers(TILES.stages, TILES.sharing),
        "stored": store.scratch(dtype),
        **work_stealing.scratch(WARPGROUPS),
    }
    for name, chunks in TILES.chunks.items():
        shape = (TILES.stages, *chunks, STEP, WIDE)
        made[name] = pallas_gpu.tiles_and_rows(shape, shape, dtype)
    return made


@dataclass(frozen=True)
class Source:
    """An array of summed rows.

    Attributes:
        array: [rows, columns].
        rows: How many.
        shift: What is added to a tile's column to find it there.
    """

    array: Any
    rows: int
    shift: int


def _source(array: Any, shift: int) -> Source:
    """All rows of an array."""
    return Source(array, array.shape[0], shift)


@dataclass(frozen=True)
class _Product(by_groups.Block):
    """The work of one block of threads. The table counts the tiles that are taken.

    Attributes:
        first: The first column of the result.
        width: How many columns are computed.
        sources: Arrays of the summed rows, one after the other.
    """

    first: int = 0
    width: int = 0
    sources: Sequence[Source] = ()

    @property
    def rows(self) -> int:
        """Tiles of the same columns."""
        return -(-self.out.shape[0] // self.config.block_m)

    def over_tiles(
        self, body: Callable[[Tile, Any], None], copies: bool = False
    ) -> None:
        """Runs ``body(tile, step)`` for this block's tiles, column by column."""
        total = self.rows * -(-self.width // self.config.block_n)
        steps = sum(s.rows for s in self.sources) // STEP

        def run(i: Any, step: Any, index: Any, numbers: Any) -> Any:
            del i, numbers
            across = lax.div(index, jnp.int32(self.rows))
            row = lax.rem(index, jnp.int32(self.rows)) * self.config.block_m
            column = self.first + across * self.config.block_n
            body(Tile(0, across, row, column, 0, steps, 0), step)
            return step + steps

        claims = work_stealing.Claims(self.shared, self.table, 0, total, every=True)
        claims.over(run, jnp.int32(0), copies)

    def copy(self) -> None:
        """Fills shared memory as it becomes free."""

        def one(tile: Tile, step: Any) -> None:
            before = 0
            for source in self.sources:
                self.copy_source(tile, step, source, before)
                before += source.rows // STEP
            self.wait_for_others(tile)

        self.over_tiles(one, copies=True)

    def copy_source(self, tile: Tile, step: Any, source: Source, before: int) -> None:
        """Copies the rows of an array, and those that they are multiplied by."""

        def one(i: Any, _: Any) -> None:
            slot = self.slot(step + before + i)
            plgpu.barrier_wait(self.shared["free"].at[slot])
            for name, array, row, column in (
                ("left", self.lhs, (before + i) * STEP, tile.row),
                ("right", source.array, i * STEP, tile.column + source.shift),
            ):
                _, by_row = self.shared[name]
                down = pl.ds(pl.multiple_of(row, STEP), STEP)
                for j, place in enumerate(self.config.places(name)):
                    across = pl.ds(pl.multiple_of(column + j * WIDE, WIDE), WIDE)
                    plgpu.copy_gmem_to_smem(
                        array.at[down, across],
                        by_row.at[slot, *place],
                        self.shared["ready"].at[slot],
                    )

        lax.fori_loop(0, source.rows // STEP, one, None)

    def wait_for_others(self, tile: Tile) -> None:
        """Waits until the tile may be stored."""

    def wait(self, tile: Tile, i: Any, slot: Any) -> None:
        """Waits for the copies of a step."""
        del tile, i
        plgpu.barrier_wait(self.shared["ready"].at[slot])

    def place(self, tile: Tile) -> Any:
        """Where a tile is stored."""
        self.wait_for_others(tile)
        return self.out


@dataclass(frozen=True)
class _InPlace(_Product):
    """The same where the first array is the result.

    Attributes:
        read: How many warpgroups have read a column's tiles of it.
    """

    read: Any = None

    def wait(self, tile: Tile, i: Any, slot: Any) -> None:
        """Waits for the copies of a step; counts when the first rows are read."""
        super().wait(tile, i, slot)
        last = i == self.sources[0].rows // STEP - 1
        pallas_gpu.when(last)(lambda: counters.count(self.read.at[tile.group]))

    def wait_for_others(self, tile: Tile) -> None:
        """Waits until what lies where the tile is stored is read."""
        counters.wait_for(self.read.at[tile.group], self.rows * WARPGROUPS)
