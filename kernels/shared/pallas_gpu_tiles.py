"""Tiles of 64 rows in registers and in shared memory, in Pallas Mosaic GPU.

Registers have them as tensor cores do: four lanes share a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from rewriter.kernels.shared import pallas_gpu
from rewriter.kernels.shared.pallas_gpu import ACCUMULATOR, ROWS

if TYPE_CHECKING:
    from jax import Array

HEIGHT = 64
"""Rows of a tile: 16 of each warp."""


def panels(shape: tuple[int, ...], dtype: Any, each: int) -> Any:
    """Returns shared memory in two views: for registers, and for copies of any rows.

    Args:
        shape: [..., rows, columns]; the views have a further axis before rows.
        dtype: A float.
        each: Columns of a panel: as many as 32, 64 or 128 bytes hold.
    """
    *before, rows, wide = shape
    width = each * pallas_gpu.bits(dtype) // 8
    shape = (*before, wide // each, rows, each)
    return plgpu.RefUnion(
        plgpu.SMEM(shape, dtype, transforms=pallas_gpu.transforms(dtype, 8, width)),
        plgpu.SMEM(shape, dtype, transforms=(plgpu.SwizzleTransform(width),)),
    )


def zeros(shape: tuple[int, ...]) -> Array:
    """Returns float32 [64, n] or [64] of zeros in registers."""
    layout = ACCUMULATOR if len(shape) == 2 else ROWS
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def row_positions() -> Array:
    """Returns int32 [64]: the index of each row."""
    return plgpu.broadcasted_iota(jnp.int32, (HEIGHT,), 0, layout=ROWS)


def row_pairs(x: Array) -> Array:
    """Returns sums of the two rows of each lane, of float32 [64, n]: [64, n / 2].

    That has as many registers as the sums. What stands where is for
    `columns_of_pairs` alone. n is a multiple of 16.
    """
    shape = x.shape[0], x.shape[1] // 2

    @plgpu.inline_mgpu(
        arg_types=(ACCUMULATOR,),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=ACCUMULATOR),
    )
    def emit(context: Any, x: Any) -> Any:
        del context
        groups = x.registers  # [1, columns / 8, …, 2 rows, …]
        (axis,) = (i for i, size in enumerate(groups.shape) if i > 1 and size == 2)
        upper, lower = (np.take(groups, [i], axis) for i in range(2))
        both = np.empty_like(upper)
        for at, value in np.ndenumerate(upper):
            both[at] = arith.addf(value, lower[at])
        made = np.concatenate([both[:, 0::2], both[:, 1::2]], axis=axis)
        return mgpu.FragmentedArray(_registers=made, _layout=x.layout, _is_signed=None)

    return emit(x)


def columns_of_pairs(parts: Array) -> Array:
    """Returns the sums over all rows of what `row_pairs` summed.

    Args:
        parts: float32 [arrays, tiles, 64, n / 2], in global memory.

    Returns:
        [arrays, n].

    Example:
        >>> columns_of_pairs(jnp.ones((1, 3, 64, 8))).tolist()[0][:2]
        [96.0, 96.0]
    """
    count, tiles, _, half = parts.shape
    # warps, two rows of a lane, eight lanes of a column, groups of 16 columns
    apart = parts.reshape(count, tiles, 4, 2, 8, half // 8, 8)
    return apart.sum((1, 2, 4)).swapaxes(1, 2).reshape(count, 2 * half)
