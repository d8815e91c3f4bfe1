"""One product per group, summed over its rows, on Hopper's tensor cores.

A tile of the result is summed over a group's rows, `STEP` at a time from the group's
first row on. The remaining rows of the last step are copied in pieces whose sizes are
powers of two. The gaps between them are filled with zero rows, read from beyond the end
of the arrays. So nothing is masked, and rows of other groups are never read. Work is
shared as in `by_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.ragged.dot.hopper import schedule
from rewriter.kernels.ragged.dot.hopper.config import REGISTERS, STEP, WARPGROUPS, Tiles
from rewriter.kernels.ragged.dot.hopper.owners import by_owner, free_all
from rewriter.kernels.ragged.dot.hopper.store import ROWS, store
from rewriter.kernels.ragged.dot.hopper.store import scratch as stored
from rewriter.kernels.ragged.dot.ranges import bounds
from rewriter.kernels.shared import pallas_gpu, warpgroups, work_stealing

if TYPE_CHECKING:
    from jax import Array

WIDE = 64
"""Columns that are copied at once: a row of 128 bytes."""

MANY_ROWS = 1 << 16
"""The fewest rows for which tiles are claimed: a group's tiles are alike, so that turns
work as well. On an H200 that was 1 to 3 % faster up to 32768 rows, 3 % slower for
131072."""

NUMBERS = 5
"""The number of fields of a tile: group, row, column, first row, number of rows."""

PIECES = (32, 16, 8, 4, 2, 1)
"""Rows of the pieces of a last step, except the last single row."""


def product_of_groups(
    lhs: Array, rhs: Array, group_sizes: Array, dtype: Any, config: Tiles
) -> Array:
    """Returns ``lhs.T @ rhs`` of each group's rows, zeros for empty groups.

    Args:
        lhs: [m, k], bfloat16 or float16.
        rhs: [m, n].
        group_sizes: int [g].
        dtype: The result's dtype.
        config: The tiles.

    Returns:
        [g, k, n].
    """
    if len(lhs) == 1:
        # Mosaic drops axes of size 1 from copies of size 1, and their start with them:
        # rows past the end would be the first row instead of zeros.
        lhs, rhs = (jnp.pad(x, ((0, 1), (0, 0))) for x in (lhs, rhs))
    (m, k), n, groups = lhs.shape, rhs.shape[1], len(group_sizes)
    starts, ends = bounds(group_sizes, m)
    table: Any = jnp.stack([starts, ends - starts], 1)
    claimed = config.claimed and work_stealing.AVAILABLE and m >= MANY_ROWS
    if claimed:
        table = jax.new_ref(jnp.pad(table, ((0, 0), (0, 1))))  # the last is counted
    out = jax.ShapeDtypeStruct((groups, k, n), dtype)
    sets = config.owners * config.stages
    scratch = {
        "ready": pallas_gpu.barriers(sets, config.copies),
        "last": pallas_gpu.barriers(sets, (len(PIECES) + 1) * config.copies),
        "free": pallas_gpu.barriers(config.stages, config.sharing),
        "stored": stored(dtype),
        **(work_stealing.scratch(WARPGROUPS, NUMBERS) if claimed else {}),
    }
    for name, chunks in config.chunks.items():
        shape = (config.stages, *chunks, STEP, WIDE)
        scratch[name] = pallas_gpu.tiles_and_rows(shape, shape, lhs.dtype)

    def body(lhs: Any, rhs: Any, table: Any, out: Any, **shared: Any) -> None:
        Block(config, lhs, rhs, table, out, shared).run()

    tiles = groups * -(-k // config.block_m) * -(-n // config.block_n)
    (made,) = pallas_gpu.kernel(
        body, "ragged_dot_of_groups", [out], scratch,
        min(config.programs, tiles), WARPGROUPS + 1,
    )(lhs, rhs, table)  # fmt: skip
    return made


@dataclass(frozen=True)
class Tile:
    """A tile: its group, place, first row to sum, steps, and rows of the last one.

    `rest` is 0 if the last step is a whole one, `owner` as in `by_rows`.
    """

    owner: Any
    group: Any
    row: Any
    column: Any
    first: Any
    steps: Any
    rest: Any


@dataclass(frozen=True)
class Block:
    """The work of one block of threads."""

    config: Tiles
    lhs: Any
    rhs: Any
    table: Any
    out: Any
    shared: dict[str, Any]

    def run(self) -> None:
        """Runs this warpgroup's part."""
        warpgroup = lax.axis_index(pallas_gpu.WARPGROUP)
        compute = lambda: self.compute(warpgroup)
        warpgroups.divide(warpgroup < WARPGROUPS, compute, self.copy, REGISTERS)

    def over_tiles(self, body: Any, copies: bool = False) -> None:
        """Runs ``body(tile, step)`` for this block's tiles, as in `by_rows`."""
        groups, k, n = self.out.shape
        rows, columns = -(-k // self.config.block_m), -(-n // self.config.block_n)
        each = rows * columns
        total = groups * each

        def read(index: Any) -> tuple[Any, ...]:
            index = jnp.minimum(index, total - 1)
            group = lax.div(index, jnp.int32(each))
            row, column = schedule.place(
                index - group * each, rows, columns, self.config.width
            )
            return group, row, column, self.table[group, 0], self.table[group, 1]

        def run(i: Any, step: Any, numbers: tuple[Any, ...]) -> Any:
            group, row, column, first, count = numbers
            steps = lax.div(count + (STEP - 1), jnp.int32(STEP))
            owner = lax.rem(i, jnp.int32(self.config.owners))
            tile = Tile(
                owner, group, row * self.config.block_m, column * self.config.block_n,
                first, steps, count & (STEP - 1),
            )  # fmt: skip
            body(tile, step)
            return step + steps

        schedule.over_tiles(total, read, run, self.shared, self.table, copies)

    def slot(self, step: Any) -> Any:
        """Where in shared memory a step lies."""
        return lax.rem(step, jnp.int32(self.config.stages))

    def barrier(self, name: str, tile: Tile, slot: Any) -> Any:
        """The barrier of a slot, of those of the tile's owner."""
        return self.shared[name].at[tile.owner * self.config.stages + slot]

    # ------------------------------------------------------------------ copying
    def copy(self) -> None:
        """Fills shared memory as it becomes free."""

        def one(tile: Tile, step: Any) -> None:
            whole = tile.steps - jnp.where(tile.rest > 0, 1, 0)

            def part(i: Any, _: Any) -> None:
                slot = self.slot(step + i)
                plgpu.barrier_wait(self.shared["free"].at[slot])
                self.copy_rows(tile, slot, "ready", tile.first + i * STEP, 0, STEP)

            lax.fori_loop(0, whole, part, None)

            @pallas_gpu.when(tile.rest > 0)
            def _() -> None:
                slot = self.slot(step + whole)
                plgpu.barrier_wait(self.shared["free"].at[slot])
                self.copy_rest(tile, slot, tile.first + whole * STEP)

        self.over_tiles(one, copies=True)

    def copy_rest(self, tile: Tile, slot: Any, first: Any) -> None:
        """Copies ``tile.rest`` rows, and rows of zeros after them."""
        # Not a Python number: jax refuses those that are visibly out of bounds.
        beyond = jnp.maximum(self.lhs.shape[0], tile.rest)
        for piece in PIECES:
            valid, here, there = schedule.part_of_tile(tile.rest, piece, STEP)
            source = jnp.where(valid, first + here, beyond)
            target = jnp.where(valid, here, there)
            self.copy_rows(tile, slot, "last", source, target, piece)
        self.copy_rows(tile, slot, "last", beyond, tile.rest, 1)

    def copy_rows(
        self, tile: Tile, slot: Any, barrier: str, source: Any, target: Any, count: int
    ) -> None:
        """Copies some rows from one place to another, of both operands."""
        ready = self.barrier(barrier, tile, slot)
        from_, to = pl.ds(source, count), pl.ds(target, count)
        for name, array, column in (
            ("left", self.lhs, tile.row), ("right", self.rhs, tile.column)
        ):  # fmt: skip
            _, by_row = self.shared[name]
            for i, place in enumerate(self.config.places(name)):
                across = pl.ds(pl.multiple_of(column + i * WIDE, WIDE), WIDE)
                plgpu.copy_gmem_to_smem(
                    array.at[from_, across], by_row.at[slot, *place, to], ready
                )

    # ---------------------------------------------------------------- computing
    def compute(self, warpgroup: Any) -> None:
        """Computes this warpgroup's part of every tile, or all of every other tile."""
        config = self.config
        free_all(config, warpgroup, self.shared["free"])
        part = 0 if config.apart else warpgroup
        above, before = (0, part) if config.by_columns else (part, 0)

        def mine(tile: Tile, step: Any) -> None:
            sums = self.product(tile, step, above, before)
            row = tile.row + above * config.rows
            column = tile.column + before * config.columns
            out = self.place(tile)
            store(
                lambda i, j, wide: sums[i : i + ROWS, j : j + wide], sums.shape,
                self.shared["stored"], warpgroup, out, row, column, out.shape[0] - row,
            )  # fmt: skip

        self.over_tiles(by_owner(config, warpgroup, mine))
        plgpu.wait_smem_to_gmem(0)

    def place(self, tile: Tile) -> Any:
        """Where the result of a tile's group is stored."""
        return self.out.at[tile.group]

    def wait(self, tile: Tile, i: Any, slot: Any) -> None:
        """Waits for the copies of a tile's i-th step."""
        rest = (i == tile.steps - 1) & (tile.rest > 0)
        for name, condition in (("last", rest), ("ready", jnp.logical_not(rest))):
            ready = self.barrier(name, tile, slot)
            pallas_gpu.when(condition)(lambda x=ready: plgpu.barrier_wait(x))

    def product(self, tile: Tile, step: Any, above: Any, before: Any) -> Any:
        """Returns a warpgroup's part of a tile: float32, in registers."""
        config, x = self.config, self.shared
        (left, _), (right, _) = x["left"], x["right"]

        def free(i: Any) -> None:
            plgpu.barrier_arrive(x["free"].at[self.slot(step + i)])

        def part(i: Any, sums: Any) -> Any:
            slot = self.slot(step + i)
            self.wait(tile, i, slot)
            sums = pallas_gpu.add_product_of_rows(
                sums, left.at[slot, above], right.at[slot, before]
            )
            plgpu.wgmma_wait(int(config.behind))
            if config.behind:
                pallas_gpu.when(i > 0)(lambda: free(i - 1))
            else:
                free(i)
            return sums

        start = pallas_gpu.zeros((config.rows, config.columns))
        sums = lax.fori_loop(0, tile.steps, part, start)
        plgpu.wgmma_wait(0)
        if config.behind:
            pallas_gpu.when(tile.steps > 0)(lambda: free(tile.steps - 1))
        return lax.optimization_barrier(sums)
