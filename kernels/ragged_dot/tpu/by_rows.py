"""Rows times their group's matrix, on a TPU.

The result's columns are in blocks; for each, tiles of rows follow one another, and the
sum over lhs's columns runs in each. A tile that is all one group's is multiplied at
once. One that groups share is visited for each, and only the chunks that have rows of
the group are multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from rewriter.kernels import mosaic_tpu
from rewriter.kernels.ragged_dot.products import Product
from rewriter.kernels.ragged_dot.tpu import schedule
from rewriter.kernels.ragged_dot.tpu.config import (
    NAMES,
    Blocks,
    Tiles,
    blocks,
    vmem,
)
from rewriter.kernels.ragged_dot.tpu.step import Step

if TYPE_CHECKING:
    from jax import Array


def rows_times_matrices(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    product: Product,
    dtype: Any,
    precision: str | None,
    tiles: Tiles,
) -> Array:
    """Returns each row times its group's matrix; zeros for rows of no group.

    Args:
        lhs: [m, k].
        rhs: [g, k, n]; [g, n, k] if transposed.
        group_sizes: int [g].
        product: Its sizes.
        dtype: The result's dtype.
        precision: As for `mosaic_tpu.dot`.
        tiles: The config.

    Returns:
        [m, n].
    """
    b, transposed = blocks(product, tiles), product.mode == "transposed"
    table, count = schedule.of_rows(group_sizes, product.m, b.m)
    steps, parts = len(table) // schedule.FIELDS, -(-product.k // b.k)

    def at(step: Step, k: Any) -> Any:  # stays where nothing is multiplied
        return k if parts == 1 else jnp.where(step(schedule.HIGH) > 0, k, parts - 1)

    def left(j: Any, s: Any, k: Any, table: Any) -> Any:
        step = Step(table, steps, s)
        return step(schedule.READ), at(step, k)

    def right(j: Any, s: Any, k: Any, table: Any) -> Any:
        step = Step(table, steps, s)
        place = (j, at(step, k)) if transposed else (at(step, k), j)
        return step(schedule.GROUP), *place

    def made(j: Any, s: Any, k: Any, table: Any) -> Any:
        return Step(table, steps, s)(schedule.TILE), j

    def body(table: Any, lhs: Any, rhs: Any, out: Any, sums: Any = None) -> None:
        step = Step(table, steps, pl.program_id(1))
        part = 0 if parts == 1 else pl.program_id(2)
        _Tile(product, b, precision, step, part, parts, lhs, rhs, out, sums).run()

    (out,) = mosaic_tpu.call(
        body,
        NAMES[product.mode],
        mosaic_tpu.Grid((-(-product.n // b.n), count, parts), 1),
        [
            pl.BlockSpec((b.m, b.k), left),
            pl.BlockSpec((None, b.n, b.k) if transposed else (None, b.k, b.n), right),
        ],
        [pl.BlockSpec((b.m, b.n), made)],
        [mosaic_tpu.shaped((product.m, product.n), dtype, lhs)],
        [mosaic_tpu.VMEM((b.m, b.n), jnp.float32)] if product.k > b.step else [],
        prefetched=1,
        vmem=vmem(product, tiles),
    )(table, lhs, rhs)
    return out


@dataclass(frozen=True)
class _Tile:
    """What one step does: part of the sums of a block of the result."""

    product: Product
    blocks: Blocks
    precision: str | None
    step: Step
    part: Any
    parts: int
    lhs: Any
    rhs: Any
    out: Any
    sums: Any

    def run(self) -> None:
        step, rows = self.step, self.blocks.m
        some, first = step(schedule.HIGH) > 0, step(schedule.FIRST) > 0
        whole = (step(schedule.LOW) == 0) & (step(schedule.HIGH) == rows)
        pl.when(whole)(lambda: self.multiply(pl.ds(0, rows), whole=True))

        @pl.when(~whole & first & (self.part == 0))
        def _() -> None:
            self.out[...] = jnp.zeros_like(self.out)

        @pl.when(~whole & some)
        def _() -> None:
            size = self.blocks.chunk

            def chunk(i: Any, _: Any) -> None:
                first = 0 if size == rows else pl.multiple_of(i * size, size)
                self.multiply(pl.ds(first, size), whole=False)

            low, high = step(schedule.LOW), step(schedule.HIGH)
            start, end = lax.div(low, size), lax.div(high + (size - 1), size)
            lax.fori_loop(start, end, chunk, None)

    def multiply(self, rows: Any, whole: bool) -> None:
        """Adds to the sums of some rows; stores them when they are complete."""
        size, step = self.blocks.k, self.blocks.step
        if step == size and self.parts == 1:
            self.store(rows, self.part_of(rows, pl.ds(0, size)), whole)
            return

        @pl.when(self.part == 0)
        def _() -> None:
            self.sums[rows, :] = jnp.zeros((rows.size, self.blocks.n), jnp.float32)

        def add(i: Any, _: Any) -> None:
            columns = pl.ds(pl.multiple_of(i * step, step), step)
            self.sums[rows, :] += self.part_of(rows, columns)

        lax.fori_loop(0, size // step, add, None)
        if size % step:
            columns = pl.ds(size - size % step, size % step)
            self.sums[rows, :] += self.part_of(rows, columns)

        @pl.when(self.part == self.parts - 1)
        def _() -> None:
            self.store(rows, self.sums[rows, :], whole)

    def part_of(self, rows: Any, columns: Any) -> Array:
        """Returns the product over some of lhs's columns."""
        transposed = self.product.mode == "transposed"
        left = self.lhs[rows, columns]
        right = self.rhs[:, columns] if transposed else self.rhs[columns, :]
        if self.product.k % self.blocks.k:  # what lies beyond is undefined
            rest = self.product.k - self.part * self.blocks.k - columns.start
            left = mosaic_tpu.masked(left, 1, 0, rest)
            right = mosaic_tpu.masked(right, int(transposed), 0, rest)
        return mosaic_tpu.dot(left, right, (1, int(transposed)), self.precision)

    def store(self, rows: Any, made: Array, whole: bool) -> None:
        """Writes rows of the group, and leaves those of others."""
        if whole:
            self.out[rows, :] = made.astype(self.out.dtype)
            return
        row = lax.broadcasted_iota(jnp.int32, made.shape, 0) + rows.start
        mine = (row >= self.step(schedule.LOW)) & (row < self.step(schedule.HIGH))
        old = self.out[rows, :].astype(jnp.float32)
        self.out[rows, :] = jnp.where(mine, made, old).astype(self.out.dtype)
