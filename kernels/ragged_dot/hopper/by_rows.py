"""Rows times their group's matrix, on Hopper's tensor cores.

A block of threads takes tiles of the result, one after the other. Its last warpgroup
only copies: `STEP` columns of the tile's rows and the matrix's rows that they meet, as
shared memory becomes free, also for the tile after this one. The two others multiply.
A warpgroup without rows of the group lets its parts pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels import mosaic
from rewriter.kernels.ragged_dot.hopper import schedule
from rewriter.kernels.ragged_dot.hopper.config import (
    REGISTERS,
    STEP,
    WARPGROUPS,
    Tiles,
)
from rewriter.kernels.ragged_dot.hopper.store import scratch as stored
from rewriter.kernels.ragged_dot.hopper.store import store

if TYPE_CHECKING:
    from jax import Array


def rows_times_matrices(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    transposed: bool,
    dtype: Any,
    config: Tiles,
) -> Array:
    """Returns each row times its group's matrix; zeros for rows of no group.

    Args:
        lhs: [m, k], bfloat16 or float16.
        rhs: [g, k, n]; [g, n, k] if transposed.
        group_sizes: int [g].
        transposed: Whether rhs's last axis is summed.
        dtype: The result's dtype.
        config: The tiles.

    Returns:
        [m, n].
    """
    m, n = lhs.shape[0], rhs.shape[1 if transposed else 2]
    table = schedule.of_rows(group_sizes, m, config.block_m)
    out = jax.ShapeDtypeStruct((m, n), dtype)
    parts = config.sharing if config.by_columns else 1
    rhs_tile = (config.columns, STEP) if transposed else (STEP, config.columns)
    scratch = {
        "left": mosaic.tiles_and_rows(
            (config.stages, config.block_m // config.rows, config.rows, STEP),
            (config.stages, config.block_m, STEP),
            lhs.dtype,
        ),
        "right": mosaic.tiles((config.stages, parts, *rhs_tile), rhs.dtype),
        "stored": stored(dtype),
        "ready": mosaic.barriers(config.owners * config.stages, 1 + parts),
        "free": mosaic.barriers(config.stages, config.sharing),
    }

    def body(lhs: Any, rhs: Any, table: Any, out: Any, **shared: Any) -> None:
        _Block(config, transposed, lhs, rhs, table, out, shared).run()

    most = schedule.most_tiles(m, len(group_sizes), config.block_m)
    programs = min(config.programs, most * -(-n // config.block_n))
    (made,) = mosaic.kernel(
        body, "ragged_dot", [out], scratch, programs, WARPGROUPS + 1
    )(lhs, rhs, table)
    return made


@dataclass(frozen=True)
class _Tile:
    """A tile: its rows, their group, its first column, and how many steps it takes.

    `owner` is the warpgroup that computes it, 0 if all do.
    """

    owner: Any
    group: Any
    row: Any
    rows: Any
    column: Any
    steps: Any


@dataclass(frozen=True)
class _Block:
    """What one block of threads does."""

    config: Tiles
    transposed: bool
    lhs: Any
    rhs: Any
    table: Any
    out: Any
    shared: dict[str, Any]

    def run(self) -> None:
        warpgroup = lax.axis_index(mosaic.WARPGROUP)

        @pl.when(warpgroup < WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            self.compute(warpgroup)

        @pl.when(warpgroup == WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            self.copy()

    def over_tiles(self, body: Any) -> None:
        """Runs ``body(tile, step)`` for this block's tiles.

        `step` counts the parts of all tiles before. A tile's numbers are read while
        the one before it is computed.
        """
        columns = -(-self.out.shape[1] // self.config.block_n)
        rows = self.table[0, 0]
        program, programs = (
            lax.axis_index(mosaic.PROGRAM),
            lax.axis_size(mosaic.PROGRAM),
        )
        total = rows * columns

        def read(i: Any) -> tuple[Any, ...]:
            index = jnp.minimum(i * programs + program, total - 1)
            row, column = schedule.place(index, rows, columns, self.config.width)
            numbers = (self.table[row + 1, x] for x in range(schedule.FIELDS))
            return (*numbers, column)

        def one(i: Any, carry: Any) -> Any:
            step, (group, row, count, any_, column) = carry
            after = read(i + 1)
            steps = any_ * (self.lhs.shape[1] // STEP)
            owner = lax.rem(i, jnp.int32(self.config.owners))
            column = column * self.config.block_n
            body(_Tile(owner, group, row, count, column, steps), step)
            return step + steps, after

        turns = lax.div(total - program + programs - 1, jnp.int32(programs))
        lax.fori_loop(0, turns, one, (jnp.int32(0), read(0)))

    def slot(self, step: Any) -> Any:
        return lax.rem(step, jnp.int32(self.config.stages))

    def ready(self, tile: _Tile, slot: Any) -> Any:
        return self.shared["ready"].at[tile.owner * self.config.stages + slot]

    # ------------------------------------------------------------------ copying
    def copy(self) -> None:
        """Fills shared memory as it becomes free."""
        config, x = self.config, self.shared
        _, left = x["left"]

        def one(tile: _Tile, step: Any) -> None:
            def part(i: Any, _: Any) -> None:
                slot = self.slot(step + i)
                plgpu.barrier_wait(x["free"].at[slot])
                along = pl.ds(pl.multiple_of(i * STEP, STEP), STEP)
                plgpu.copy_gmem_to_smem(
                    self.lhs.at[pl.ds(tile.row, config.block_m), along],
                    left.at[slot], self.ready(tile, slot),
                )  # fmt: skip
                for j in range(x["right"].shape[1]):
                    first = pl.multiple_of(tile.column + j * config.columns, 64)
                    across = pl.ds(first, config.columns)
                    place = (across, along) if self.transposed else (along, across)
                    plgpu.copy_gmem_to_smem(
                        self.rhs.at[tile.group, *place],
                        x["right"].at[slot, j], self.ready(tile, slot),
                    )  # fmt: skip

            lax.fori_loop(0, tile.steps, part, None)

        self.over_tiles(one)

    # ---------------------------------------------------------------- computing
    def compute(self, warpgroup: Any) -> None:
        """Computes this warpgroup's part of every tile, or all of every other tile."""
        config = self.config
        self.free_all(warpgroup)
        part = 0 if config.apart else warpgroup
        above, before = (0, part) if config.by_columns else (part, 0)

        def mine(tile: _Tile, step: Any) -> None:
            row, column = above * config.rows, before * config.columns
            rows = tile.rows - row

            def some(height: int) -> None:
                sums = self.product(tile, step, above, before, height)
                store(
                    sums, self.shared["stored"], warpgroup, self.out,
                    tile.row + row, tile.column + column, rows,
                )  # fmt: skip

            # Tensor cores take 64 rows at once; those without any are left out.
            for height in range(64, config.rows + 1, 64):
                last = (rows <= height) | (height == config.rows)
                pl.when((rows > height - 64) & last)(lambda h=height: some(h))
            pl.when(rows <= 0)(lambda: self.pass_by(tile, step))

        def one(tile: _Tile, step: Any) -> None:
            if config.apart:
                pl.when(tile.owner == warpgroup)(lambda: mine(tile, step))
            else:
                mine(tile, step)

        self.over_tiles(one)
        plgpu.wait_smem_to_gmem(0)

    def free_all(self, warpgroup: Any) -> None:
        """Says that all shared memory is free: each that shares a tile, once."""

        @pl.when(warpgroup < self.config.sharing)
        def _() -> None:
            for slot in range(self.config.stages):
                plgpu.barrier_arrive(self.shared["free"].at[slot])

    def pass_by(self, tile: _Tile, step: Any) -> None:
        """Lets the parts of a tile pass."""

        def part(i: Any, _: Any) -> None:
            slot = self.slot(step + i)
            plgpu.barrier_wait(self.ready(tile, slot))
            plgpu.barrier_arrive(self.shared["free"].at[slot])

        lax.fori_loop(0, tile.steps, part, None)

    def product(
        self, tile: _Tile, step: Any, above: Any, before: Any, height: int
    ) -> Any:
        """Returns the first rows of a warpgroup's part: float32, in registers."""
        config, x = self.config, self.shared
        left, _ = x["left"]

        def free(i: Any) -> None:
            plgpu.barrier_arrive(x["free"].at[self.slot(step + i)])

        def summed(sums: Any) -> Any:
            def part(i: Any, _: Any) -> None:
                slot = self.slot(step + i)
                plgpu.barrier_wait(self.ready(tile, slot))
                right = x["right"].at[slot, before]
                right = right.transpose((1, 0)) if self.transposed else right
                rows = left.at[slot, above, pl.ds(0, height)]
                plgpu.wgmma(sums, rows, right)
                plgpu.wgmma_wait(int(config.behind))
                if config.behind:
                    pl.when(i > 0)(lambda: free(i - 1))
                else:
                    free(i)

            lax.fori_loop(0, tile.steps, part, None)
            return lax.optimization_barrier(sums[...])

        shape = (height, config.columns)
        made = pl.run_scoped(summed, plgpu.ACC(shape, jnp.float32))
        if config.behind:
            pl.when(tile.steps > 0)(lambda: free(tile.steps - 1))
        return made
