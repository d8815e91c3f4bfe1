"""Rows times their group's matrix, on Hopper's tensor cores.

A block of threads takes tiles of the result, one after the other. Its last warpgroup
only copies: 128 bytes of each of the tile's rows, and the matrix's rows that they
meet. It copies as shared memory becomes free, also for the next tile. The two others
multiply. A warpgroup without rows of the group skips its parts.

Rows may be multiplied by several matrices of their group in one pass. Their products
may be combined before they are stored, as for a gated linear unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.ragged.dot.hopper import schedule
from rewriter.kernels.ragged.dot.hopper.branches import (
    Along,
    Branch,
    Inside,
    Side,
    blocks,
    pieces,
    side,
)
from rewriter.kernels.ragged.dot.hopper.config import REGISTERS, WARPGROUPS, Tiles
from rewriter.kernels.ragged.dot.hopper.owners import by_owner, free_all
from rewriter.kernels.ragged.dot.hopper.store import scratch as stored
from rewriter.kernels.ragged.dot.hopper.store import store
from rewriter.kernels.shared import pallas_gpu, warpgroups, work_stealing

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
    n = rhs.shape[1 if transposed else 2]
    given = "ragged_dot", lhs, [Branch(rhs)], n, group_sizes
    (out,) = combined(*given, [lambda product: product], dtype, config, transposed)
    return out


def combined(
    name: str,
    lhs: Array,
    branches: Sequence[Branch],
    n: int,
    group_sizes: Array | None,
    results: Sequence[Callable[..., Any]],
    dtype: Any,
    config: Tiles,
    transposed: bool = False,
    matrices: Callable[..., Side] = side,
    groups: int = 1,
    along: Sequence[Along] = (),
    promoted: int = 0,
    inside: Inside | None = None,
) -> Sequence[Array]:
    """Returns functions of each row's products with its group's matrices.

    Each result is [m, n]. Products of rows of no group are zeros.

    Args:
        name: The name of the kernel in profiles.
        lhs: [m, k], bfloat16 or float16; 8-bit floats or int8, if the only branch's
            matrices are such and transposed.
        branches: The matrices; if there are several, their tiles share the columns of
            a tile.
        n: Columns of each branch.
        group_sizes: int [g]; None if all groups have as many rows.
        results: For each result, a function of blocks of all branches, in the dtype of
            sums, and of blocks of `along`.
        dtype: The results' dtype.
        config: The tiles.
        transposed: Whether the last axis of the only branch's matrices is summed.
        matrices: How they come into shared memory in the layout of tensor cores.
        groups: The number of groups, where all have as many rows.
        along: What results join to rows and columns.
        promoted: The number of steps after which sums of 8-bit floats are added to
            float32 registers; 0 for never. Tensor cores keep 14 bits of such sums.
        inside: What is done to the sums of so many steps before that.
    """
    m, count = lhs.shape[0], len(branches)
    tiles = schedule.EqualGroups(m // groups, config.block_m, groups)
    table, most, claimed = None, tiles.count, False
    if group_sizes is not None:
        table, most, claimed = _listed(group_sizes, m, config)
    stored_as = branches[0].matrices.dtype
    right_side = matrices(config, count, transposed, stored_as, lhs.dtype)
    scratch = _scratch(config, count, lhs.dtype, right_side, dtype, claimed)
    beside = [a.values for a in along]
    scales = [j.values for j in inside.joined] if inside else []
    every = [b.arrays for b in branches], beside, scales, table
    given, tree = jax.tree.flatten(every)

    def body(lhs: Any, *references: Any, **shared: Any) -> None:
        outs = references[len(given) :]
        arrays, beside, scales, table = jax.tree.unflatten(
            tree, references[: len(given)]
        )
        right = [b.of(x) for b, x in zip(branches, arrays, strict=True)]
        joined = [replace(a, values=x) for a, x in zip(along, beside, strict=True)]
        listed = tiles if table is None else schedule.Listed(table)
        _Block(
            config, transposed, lhs, right, right_side, listed, results, joined,
            promoted, inside and inside.of(scales), outs, shared,
        ).run()  # fmt: skip

    wide = config.block_n // count
    return pallas_gpu.kernel(
        body, name, [jax.ShapeDtypeStruct((m, n), dtype)] * len(results), scratch,
        min(config.programs, most * -(-n // wide)), WARPGROUPS + 1,
    )(lhs, *given)  # fmt: skip


def _listed(group_sizes: Array, m: int, config: Tiles) -> tuple[Any, int, bool]:
    """A table of the tiles of m rows, how many they may be, and if they are claimed."""
    claimed = config.claimed and work_stealing.AVAILABLE
    table = schedule.of_rows(group_sizes, m, config.block_m)
    table = jax.new_ref(table) if claimed else table  # claims are counted in it
    return table, schedule.most_tiles(m, len(group_sizes), config.block_m), claimed


def _scratch(
    config: Tiles, count: int, given: Any, right: Side, dtype: Any, claimed: bool
) -> dict[str, Any]:
    """Shared memory by name.

    Args:
        config: The tiles.
        count: The number of branches.
        given: The dtype of the rows.
        right: How matrices come into shared memory.
        dtype: The results' dtype.
        claimed: Whether tiles are claimed.
    """
    step, pieces_ready = pallas_gpu.columns(given), 1 + len(pieces(config, count))
    claims = work_stealing.scratch(WARPGROUPS, 1 + schedule.FIELDS) if claimed else {}
    return {
        "left": pallas_gpu.tiles_and_rows(
            (config.stages, config.block_m // config.rows, config.rows, step),
            (config.stages, config.block_m, step),
            given,
        ),
        "right": right.scratch,
        "stored": stored(dtype),
        "ready": pallas_gpu.barriers(config.owners * config.stages, pieces_ready),
        "free": pallas_gpu.barriers(config.stages, config.sharing),
        **claims,
    }


def sums_of(dtype: Any) -> Any:
    """Returns the dtype in which tensor cores sum products of numbers of a dtype."""
    return jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32


@dataclass(frozen=True)
class _Tile:
    """A tile: its rows, their group, its first column, and its number of steps.

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
    """The work of one block of threads."""

    config: Tiles
    transposed: bool
    lhs: Any
    branches: Sequence[Branch]
    right: Side
    tiles: schedule.Listed | schedule.EqualGroups
    results: Sequence[Callable[..., Any]]
    along: Sequence[Along]
    promoted: int
    inside: Inside | None
    outs: Sequence[Any]
    shared: dict[str, Any]

    def run(self) -> None:
        """Runs this warpgroup's part."""
        warpgroup = lax.axis_index(pallas_gpu.WARPGROUP)
        compute = lambda: self.compute(warpgroup)
        warpgroups.divide(warpgroup < WARPGROUPS, compute, self.copy, REGISTERS)

    @property
    def step(self) -> int:
        """The extent of a step along the summed axis: 128 bytes."""
        return pallas_gpu.columns(self.lhs.dtype)

    @property
    def steps(self) -> int:
        """The number of steps of a tile with rows."""
        return self.lhs.shape[1] // self.step

    def over_tiles(self, body: Any, copies: bool = False) -> None:
        """Runs ``body(tile, step)`` for this block's tiles.

        Args:
            body: `step` counts the parts of all tiles before.
            copies: Whether this is the warpgroup that claims tiles for all.
        """
        wide = self.config.block_n // len(self.branches)
        columns = -(-self.outs[0].shape[1] // wide)
        rows = self.tiles.count
        total = rows * columns

        def read(index: Any) -> tuple[Any, ...]:
            index = jnp.minimum(index, total - 1)
            row, column = schedule.place(index, rows, columns, self.config.width)
            return (*self.tiles.tile(row), column)

        def run(i: Any, step: Any, numbers: tuple[Any, ...]) -> Any:
            group, row, count, any_, column = numbers
            steps = any_ * self.steps
            owner = lax.rem(i, jnp.int32(self.config.owners))
            body(_Tile(owner, group, row, count, column * wide, steps), step)
            return step + steps

        table = getattr(self.tiles, "table", None)
        schedule.over_tiles(total, read, run, self.shared, table, copies)

    def slot(self, step: Any) -> Any:
        return lax.rem(step, jnp.int32(self.config.stages))

    def ready(self, tile: _Tile, slot: Any) -> Any:
        return self.shared["ready"].at[tile.owner * self.config.stages + slot]

    # ------------------------------------------------------------------ copying
    def copy(self) -> None:
        """Fills shared memory as it becomes free."""
        config, x, size = self.config, self.shared, self.step
        _, left = x["left"]

        def one(tile: _Tile, step: Any) -> None:
            def part(i: Any, _: Any) -> None:
                slot = self.slot(step + i)
                plgpu.barrier_wait(x["free"].at[slot])
                along = pl.ds(pl.multiple_of(i * size, size), size)
                plgpu.copy_gmem_to_smem(
                    self.lhs.at[pl.ds(tile.row, config.block_m), along],
                    left.at[slot], self.ready(tile, slot),
                )  # fmt: skip
                for piece in pieces(config, len(self.branches)):
                    branch = self.branches[piece.branch]
                    group, summed = tile.group, along
                    if branch.split:
                        first = (tile.group * self.steps + i) * size
                        summed = pl.ds(pl.multiple_of(first, size), size)
                        group = 0
                    column = branch.first + piece.column
                    first = pl.multiple_of(tile.column + column, 64)
                    across = pl.ds(first, piece.columns)
                    place = (across, summed) if self.transposed else (summed, across)
                    plgpu.copy_gmem_to_smem(
                        branch.matrices.at[group, *place],
                        self.right.copied(x["right"]).at[slot, *piece.place],
                        self.ready(tile, slot),
                    )  # fmt: skip

            lax.fori_loop(0, tile.steps, part, None)

        self.over_tiles(one, copies=True)

    # ---------------------------------------------------------------- computing
    def compute(self, warpgroup: Any) -> None:
        """Computes this warpgroup's part of every tile, or all of every other tile."""
        config = self.config
        free_all(config, warpgroup, self.shared["free"])
        part = 0 if config.apart else warpgroup
        above, before = (0, part) if config.by_columns else (part, 0)

        def mine(tile: _Tile, step: Any) -> None:
            columns = config.columns // len(self.branches)
            row, column = above * config.rows, before * columns
            rows = tile.rows - row

            def some(height: int) -> None:
                product = self.promoted_sums if self.promoted else self.product
                sums = product(tile, step, above, before, height)
                first = tile.column + column
                for out, result in zip(self.outs, self.results, strict=True):

                    def block(i: int, j: int, wide: int, result: Any = result) -> Any:
                        of_branches = blocks(
                            sums, self.branches, i, j, wide, first, tile.group
                        )
                        at = tile.row + row + i, first + j, (64, wide)
                        return result(*of_branches, *(a.block(*at) for a in self.along))

                    store(
                        block, (height, columns), self.shared["stored"], warpgroup, out,
                        tile.row + row, first, rows,
                    )  # fmt: skip

            # Tensor cores take 64 rows at once; groups of 64 without rows are skipped.
            for height in range(64, config.rows + 1, 64):
                last = (rows <= height) | (height == config.rows)
                pallas_gpu.when((rows > height - 64) & last)(lambda h=height: some(h))
            pallas_gpu.when(rows <= 0)(lambda: self.pass_by(tile, step))

        self.over_tiles(by_owner(config, warpgroup, mine))
        plgpu.wait_smem_to_gmem(0)

    def pass_by(self, tile: _Tile, step: Any) -> None:
        """Skips the parts of a tile."""

        def part(i: Any, _: Any) -> None:
            slot = self.slot(step + i)
            plgpu.barrier_wait(self.ready(tile, slot))
            plgpu.barrier_arrive(self.shared["free"].at[slot])

        lax.fori_loop(0, tile.steps, part, None)

    def within(self, tile: _Tile, before: Any, i: Any) -> tuple[Any, ...]:
        """Returns what is joined to a warpgroup's columns of a step, by branch."""
        wide = self.config.columns // len(self.branches)

        def rows(branch: Branch) -> tuple[Any, ...]:
            return tuple(row(branch, values) for values in branch.within)

        def row(branch: Branch, values: Any) -> Any:
            groups, n = values.shape
            first = jnp.minimum(tile.column + before * wide, n - wide)
            across = pl.ds(pl.multiple_of(first, wide), wide)
            if groups == 1:
                return values.at[0, across]
            if branch.of_groups:
                return values.at[tile.group, across]
            steps = self.steps * (self.tiles.groups if branch.split else 1)
            at = tile.group * self.steps + i
            return values.at[lax.div(at, jnp.int32(steps // groups)), across]

        return tuple(map(rows, self.branches))

    def product(
        self, tile: _Tile, step: Any, above: Any, before: Any, height: int
    ) -> Any:
        """Returns the first rows of a warpgroup's part, in registers."""
        config, x = self.config, self.shared
        left, _ = x["left"]

        def free(i: Any) -> None:
            plgpu.barrier_arrive(x["free"].at[self.slot(step + i)])

        def added(add: Callable[..., Any], sums: Any) -> Any:
            """Adds the products of all parts; sums are passed from each to the next."""

            def part(i: Any, sums: Any) -> Any:
                slot = self.slot(step + i)
                plgpu.barrier_wait(self.ready(tile, slot))
                within = self.within(tile, before, i)
                right = self.right.taken(x["right"], slot, before, i, within)
                right = right.transpose((1, 0)) if self.transposed else right
                sums = add(sums, left.at[slot, above, pl.ds(0, height)], right)
                plgpu.wgmma_wait(int(config.behind))
                if config.behind:
                    pallas_gpu.when(i > 0)(lambda: free(i - 1))
                else:
                    free(i)
                return sums

            return lax.fori_loop(0, tile.steps, part, sums)

        def of_one(sums: Any) -> Any:
            added(lambda _, rows, right: plgpu.wgmma(sums, rows, right), None)
            return sums[...]

        shape = (height, config.columns)
        if len(self.branches) == 1:
            made = pl.run_scoped(
                lambda sums: lax.optimization_barrier(of_one(sums)),
                plgpu.ACC(shape, sums_of(self.lhs.dtype)),
            )
        else:
            made = added(pallas_gpu.add_product, pallas_gpu.zeros(shape))
            plgpu.wgmma_wait(0)
            made = lax.optimization_barrier(made)
        if config.behind:
            pallas_gpu.when(tile.steps > 0)(lambda: free(tile.steps - 1))
        return made

    def promoted_sums(
        self, tile: _Tile, step: Any, above: Any, before: Any, height: int
    ) -> Any:
        """Returns the same, with sums of some steps added up in float32 registers."""
        count, shape = self.promoted, (height, self.config.columns)
        left, _ = self.shared["left"]
        place = tile.row + above * self.config.rows, tile.column + before * shape[1]

        def free(at: Any) -> None:
            plgpu.barrier_arrive(self.shared["free"].at[self.slot(at)])

        def some(first: Any, sums: Any) -> Any:
            for i in range(count):
                slot = self.slot(first + i)
                plgpu.barrier_wait(self.ready(tile, slot))
                right = self.right.taken(self.shared["right"], slot, before, i, ())
                right = right.transpose((1, 0)) if self.transposed else right
                plgpu.wgmma(sums, left.at[slot, above, pl.ds(0, height)], right)
                if i:
                    plgpu.wgmma_wait(1)
                    free(first + i - 1)
            return sums[...]

        def part(i: Any, total: Any) -> Any:
            first = step + i * count
            inside = self.inside
            joined = (
                [j.block(i, *place, shape) for j in inside.joined] if inside else []
            )
            made = pl.run_scoped(
                lambda sums: some(first, sums),
                plgpu.ACC(shape, sums_of(self.lhs.dtype)),
            )
            free(first + count - 1)
            return total + (inside.result(made, *joined) if inside else made)

        parts = lax.div(tile.steps, jnp.int32(count))
        return lax.fori_loop(0, parts, part, pallas_gpu.zeros(shape))
