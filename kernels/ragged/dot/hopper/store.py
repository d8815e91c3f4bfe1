"""Stores blocks from registers to rows in global memory, without rows past the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.ragged.dot.hopper.config import WARPGROUPS
from rewriter.kernels.shared import pallas_gpu

ROWS = 64
"""Rows that are stored at once."""


def scratch(dtype: Any) -> Any:
    """Returns shared memory for storing: two parts for each warpgroup, in turns."""
    shape = (WARPGROUPS, 2, ROWS, pallas_gpu.columns(dtype))
    return pallas_gpu.tiles_and_rows(shape, shape, dtype)


def store(
    block: Callable[[int, int, int], Any],
    shape: tuple[int, int],
    shared: Any,
    warpgroup: Any,
    out: Any,
    row: Any,
    column: Any,
    rows: Any,
) -> None:
    """Stores the first rows of a warpgroup's part of a result.

    Args:
        block: Returns a block of the part from a row and a column on, with some
            columns: [`ROWS`, columns], in registers.
        shape: Rows and columns of it.
        shared: The two views of `scratch`.
        warpgroup: The index of this warpgroup.
        out: A reference [m, n] to global memory; columns past n are not stored.
        row: The row of `out` for the first row.
        column: The column of `out` for the first column.
        rows: The number of rows to store; none if negative.
    """
    by_tile, by_row = shared
    wide = by_tile.shape[-1]
    places = [
        (i, j) for i in range(0, shape[0], ROWS) for j in range(0, shape[1], wide)
    ]  # fmt: skip
    for count, (i, j) in enumerate(places):
        part = count % 2
        # The part's last copy is the one before the last, but for the first.
        plgpu.wait_smem_to_gmem(min(count, 1), wait_read_only=True)
        by_tile.at[warpgroup, part][...] = block(i, j, wide).astype(out.dtype)
        plgpu.commit_smem()
        here = jnp.where(column + j < out.shape[1], rows - i, 0)
        _copy(
            by_row.at[warpgroup, part],
            out.at[:, pl.ds(pl.multiple_of(column + j, wide), wide)],
            row + i, here,
        )  # fmt: skip
        plgpu.commit_smem_to_gmem_group()


def _copy(source: Any, target: Any, row: Any, rows: Any) -> None:
    """Copies the first rows: all, or one power of two after the other."""

    @pallas_gpu.when(rows >= ROWS)
    def _() -> None:
        plgpu.copy_smem_to_gmem(source, target.at[pl.ds(row, ROWS)], commit_group=False)

    @pallas_gpu.when((rows > 0) & (rows < ROWS))
    def _() -> None:
        piece = ROWS // 2
        while piece:
            first = rows & ~(2 * piece - 1)

            @pallas_gpu.when((rows & piece) != 0)
            def _(piece: int = piece, first: Any = first) -> None:
                plgpu.copy_smem_to_gmem(
                    source.at[pl.ds(first, piece)],
                    target.at[pl.ds(row + first, piece)],
                    commit_group=False,
                )

            piece //= 2
