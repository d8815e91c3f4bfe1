"""Rows times their group's matrix, or matrices, on a TPU.

The result's columns are in blocks. For each block, tiles of rows follow one another,
and the sum over lhs's columns runs in each. A tile of one group is multiplied at once.
A tile that groups share is visited once for each, and only chunks with rows of the
group are multiplied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from rewriter.kernels.ragged.dot.products import Product
from rewriter.kernels.ragged.dot.tpu import schedule
from rewriter.kernels.ragged.dot.tpu.config import Blocks
from rewriter.kernels.ragged.dot.tpu.step import Step
from rewriter.kernels.shared import pallas_tpu

if TYPE_CHECKING:
    from jax import Array


Finish = Callable[..., Sequence[Any]]
"""``finish(*products)`` gives results of float32 blocks of the products."""


def rows_times_matrices(
    lhs: Array,
    rhs: Sequence[Array],
    group_sizes: Array,
    product: Product,
    dtypes: Sequence[Any],
    precision: str | None,
    blocks: Blocks,
    vmem: int,
    name: str,
    finish: Finish = lambda *products: products,
    first: Sequence[int] | None = None,
) -> Sequence[Array]:
    """Returns each row times its group's matrices: [m, n] for each dtype.

    Rows of no group give zeros.

    Args:
        lhs: [m, k].
        rhs: [g, k, n] each; [g, n, k] if transposed.
        group_sizes: int [g].
        product: The sizes of one of the products.
        dtypes: The results' dtypes.
        precision: As for `pallas_tpu.dot`.
        blocks: The sizes of blocks.
        vmem: Bytes of VMEM that the kernel takes.
        name: The name of the kernel in profiles.
        finish: A function of the products; it must return zeros for zeros.
        first: The block of each array's columns at which its matrices begin.
    """
    b, transposed = blocks, product.mode == "transposed"
    table, count = schedule.of_rows(group_sizes, product.m, b.m)
    steps, parts = len(table) // schedule.FIELDS, -(-product.k // b.k)
    place, begin = _Places(steps, parts, transposed), first or [0] * len(rhs)

    def body(table: Any, lhs: Any, *refs: Any) -> None:
        step = Step(table, steps, pl.program_id(1))
        part = 0 if parts == 1 else pl.program_id(2)
        ends = len(rhs), len(rhs) + len(dtypes)
        matrices, out, sums = refs[: ends[0]], refs[ends[0] : ends[1]], refs[ends[1] :]
        _Tile(
            product, b, precision, step, part, parts, lhs, matrices, out, sums, finish
        ).run()

    block = (None, b.n, b.k) if transposed else (None, b.k, b.n)
    sums = [pallas_tpu.VMEM((b.m, b.n), jnp.float32)] * len(rhs)
    return pallas_tpu.call(
        body,
        name,
        pallas_tpu.Grid((-(-product.n // b.n), count, parts), 1),
        [
            pl.BlockSpec((b.m, b.k), place.left),
            *(pl.BlockSpec(block, functools.partial(place.right, i)) for i in begin),
        ],
        [pl.BlockSpec((b.m, b.n), place.made) for _ in dtypes],
        [pallas_tpu.shaped((product.m, product.n), dtype, lhs) for dtype in dtypes],
        sums if product.k > b.step else [],
        prefetched=1,
        vmem=vmem,
    )(table, lhs, *rhs)


@dataclass(frozen=True)
class _Places:
    """The blocks that a step (j, s, k) of the grid reads and writes.

    j is the block of the result's columns, s the step of the table, k the part of lhs's
    columns.

    Attributes:
        steps: Steps of the table.
        parts: Parts of lhs's columns.
        transposed: Whether matrices are [n, k].
    """

    steps: int
    parts: int
    transposed: bool

    def at(self, step: Step, k: Any) -> Any:
        """Returns the part of lhs's columns; it stays if nothing is multiplied."""
        if self.parts == 1:
            return k
        return jnp.where(step(schedule.HIGH) > 0, k, self.parts - 1)

    def left(self, j: Any, s: Any, k: Any, table: Any) -> Any:
        """Returns the place in lhs."""
        del j
        step = Step(table, self.steps, s)
        return step(schedule.READ), self.at(step, k)

    def right(self, begin: int, j: Any, s: Any, k: Any, table: Any) -> Any:
        """Returns the place in matrices whose columns begin at a block."""
        step = Step(table, self.steps, s)
        column = j + begin if begin else j
        at = self.at(step, k)
        return step(schedule.GROUP), *(
            (column, at) if self.transposed else (at, column)
        )

    def made(self, j: Any, s: Any, k: Any, table: Any) -> Any:
        """Returns the place in the result."""
        del k
        return Step(table, self.steps, s)(schedule.TILE), j


@dataclass(frozen=True)
class _Tile:
    """One step: part of the sums of a block of the result."""

    product: Product
    blocks: Blocks
    precision: str | None
    step: Step
    part: Any
    parts: int
    lhs: Any
    rhs: Sequence[Any]
    out: Sequence[Any]
    sums: Sequence[Any]
    finish: Finish

    def run(self) -> None:
        step, rows = self.step, self.blocks.m
        some, first = step(schedule.HIGH) > 0, step(schedule.FIRST) > 0
        whole = (step(schedule.LOW) == 0) & (step(schedule.HIGH) == rows)
        pl.when(whole)(lambda: self.multiply(pl.ds(0, rows), whole=True))

        @pl.when(~whole & first & (self.part == 0))
        def _() -> None:
            for out in self.out:
                out[...] = jnp.zeros_like(out)

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
            self.store(rows, self.parts_of(rows, pl.ds(0, size)), whole)
            return

        @pl.when(self.part == 0)
        def _() -> None:
            for total in self.sums:
                total[rows, :] = jnp.zeros((rows.size, self.blocks.n), jnp.float32)

        def add(columns: Any) -> None:
            parts = self.parts_of(rows, columns)
            for total, part in zip(self.sums, parts, strict=True):
                total[rows, :] += part

        pallas_tpu.in_steps(size, step, add)

        @pl.when(self.part == self.parts - 1)
        def _() -> None:
            self.store(rows, [total[rows, :] for total in self.sums], whole)

    def parts_of(self, rows: Any, columns: Any) -> list[Array]:
        """Returns the products over some of lhs's columns."""
        across = int(self.product.mode == "transposed")
        left, rest = self.lhs[rows, columns], None
        if self.product.k % self.blocks.k:  # values beyond the edge are undefined
            rest = self.product.k - self.part * self.blocks.k - columns.start
            left = pallas_tpu.masked(left, 1, 0, rest)
        made = []
        for rhs in self.rhs:
            right = rhs[:, columns] if across else rhs[columns, :]
            if rest is not None:
                right = pallas_tpu.masked(right, across, 0, rest)
            made.append(pallas_tpu.dot(left, right, (1, across), self.precision))
        return made

    def store(self, rows: Any, products: Sequence[Array], whole: bool) -> None:
        """Writes rows of the group, and leaves those of others."""
        for out, made in zip(self.out, self.finish(*products), strict=True):
            if whole:
                out[rows, :] = made.astype(out.dtype)
                continue
            row = lax.broadcasted_iota(jnp.int32, made.shape, 0) + rows.start
            mine = (row >= self.step(schedule.LOW)) & (row < self.step(schedule.HIGH))
            old = out[rows, :].astype(jnp.float32)
            out[rows, :] = jnp.where(mine, made, old).astype(out.dtype)
