"""One product per group of rows, on a TPU: the gradient of matrices.

For each block of the result, tiles of rows follow one another. The sums of a group are
stored with its last tile. In a tile that several groups share, only chunks with rows of
the group are multiplied; other rows count as zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from rewriter.kernels.ragged.dot.products import Product
from rewriter.kernels.ragged.dot.tpu import schedule
from rewriter.kernels.ragged.dot.tpu.config import NAMES, Blocks, Tiles, blocks, vmem
from rewriter.kernels.ragged.dot.tpu.step import Step
from rewriter.kernels.shared import pallas_tpu

if TYPE_CHECKING:
    from jax import Array


def product_of_groups(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    product: Product,
    dtype: Any,
    precision: str | None,
    tiles: Tiles,
) -> Array:
    """Returns each group's rows of lhs, transposed, times those of rhs: [g, k, n].

    Args:
        lhs: [m, k].
        rhs: [m, n].
        group_sizes: int [g].
        product: Its sizes.
        dtype: The result's dtype.
        precision: As for `pallas_tpu.dot`.
        tiles: The config.
    """
    b = blocks(product, tiles)
    table, count = schedule.of_groups(group_sizes, product.m, b.m)
    steps = len(table) // schedule.FIELDS

    def rows(columns: int, axis: int) -> pl.BlockSpec:
        """The rows of a step, and the columns of the grid's place on an axis."""
        read = lambda t, s: Step(t, steps, s)(schedule.READ)
        return pl.BlockSpec((b.m, columns), lambda *at: (read(at[3], at[2]), at[axis]))

    def group(i: Any, j: Any, s: Any, t: Any) -> Any:
        return Step(t, steps, s)(schedule.GROUP), i, j

    def body(table: Any, lhs: Any, rhs: Any, out: Any, sums: Any) -> None:
        step = Step(table, steps, pl.program_id(2))
        first, last = step(schedule.FIRST) > 0, step(schedule.LAST) > 0

        @pl.when(first)
        def _() -> None:
            sums[...] = jnp.zeros_like(sums)

        _add(b, precision, step, lhs, rhs, sums)

        @pl.when(last)
        def _() -> None:
            out[...] = sums[...].astype(out.dtype)

    grid = (-(-product.k // b.k), -(-product.n // b.n), count)
    shape = product.groups, product.k, product.n
    (out,) = pallas_tpu.call(
        body,
        NAMES[product.mode],
        pallas_tpu.Grid(grid, 2),
        [rows(b.k, 0), rows(b.n, 1)],
        [pl.BlockSpec((None, b.k, b.n), group)],
        [pallas_tpu.shaped(shape, dtype, lhs)],
        [pallas_tpu.VMEM((b.k, b.n), jnp.float32)],
        prefetched=1,
        vmem=vmem(product, tiles),
    )(table, lhs, rhs)
    return out


def _add(
    b: Blocks, precision: str | None, step: Step, lhs: Any, rhs: Any, sums: Any
) -> None:
    """Adds the product of a tile's rows of one group."""
    low, high = step(schedule.LOW), step(schedule.HIGH)
    whole = (low == 0) & (high == b.m)

    @pl.when(whole)
    def _() -> None:
        sums[...] += pallas_tpu.dot(lhs[...], rhs[...], (0, 0), precision)

    @pl.when(~whole & (high > 0))
    def _() -> None:
        size = b.chunk

        def chunk(i: Any, _: Any) -> None:
            first = 0 if size == b.m else pl.multiple_of(i * size, size)
            rows = pl.ds(first, size)
            left = pallas_tpu.masked(lhs[rows, :], 0, low - first, high - first)
            right = pallas_tpu.masked(rhs[rows, :], 0, low - first, high - first)
            sums[...] += pallas_tpu.dot(left, right, (0, 0), precision)

        start, end = lax.div(low, size), lax.div(high + (size - 1), size)
        lax.fori_loop(start, end, chunk, None)
