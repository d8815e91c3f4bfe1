"""Widens matrices of 8 bits in global memory to 16 bits in shared memory.

The matrices are copied as they are. Each multiplying warpgroup widens its own part, one
step at a time, while tensor cores still work on the step before. It reads the copy into
registers and writes to one of two buffers that only it reads. So no warpgroup waits for
another one. Numbers are scaled while they are widened, and rounded as the program does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.ragged.dot.hopper.branches import WIDE, Side, part
from rewriter.kernels.ragged.dot.hopper.config import WARPGROUPS, Tiles
from rewriter.kernels.shared import pallas_gpu

SCALED = (("*", 0),)
"""The steps of numbers with a scale, the only array of `Branch.within`."""

PLACES = 2
"""The number of buffers for widened parts, used in turns."""


MOST = 256
"""The most columns of a warpgroup."""


def rows(scale: Any) -> Any:
    """Returns scales [g, n] for `Branch.within`, with columns that are a multiple.

    So each warpgroup's columns begin at a multiple of their number.
    """
    scale = scale if scale.dtype.itemsize <= 4 else scale.astype(jnp.float32)
    return jnp.pad(scale, ((0, 0), (0, -scale.shape[1] % MOST)))


def side(
    config: Tiles,
    branches: int,
    transposed: bool,
    stored: Any,
    dtype: Any,
    steps: Sequence[tuple[str, Any]] = (),
) -> Side:
    """Returns the `Side` of matrices that are stored in 8 bits.

    Args:
        config: The tiles; warpgroups do not share columns.
        branches: The number of branches that share a tile's columns.
        transposed: Whether the last axis of the matrices is summed.
        stored: Their dtype.
        dtype: That of the rows, bfloat16 or float16.
        steps: What is joined to the numbers, see `pallas_gpu.widened`. Arrays are named
            by their place in `Branch.within`.
    """
    shape = part(config, branches, transposed, dtype)
    scratch = {
        "narrow": pallas_gpu.tiles((config.stages, config.parts, *shape), stored),
        "wide": pallas_gpu.tiles((WARPGROUPS, PLACES, *shape), dtype),
    }

    def taken(memory: Any, slot: Any, own: Any, i: Any, within: Any) -> Any:
        place = lax.rem(i, jnp.int32(PLACES))
        wide = memory["wide"].at[lax.axis_index(pallas_gpu.WARPGROUP), place]
        narrow = memory["narrow"].at[slot, own]
        # A warp has waited for its own part of the product that read this buffer; here
        # it waits for the other warps'.
        plgpu.commit_smem()
        if branches == 1:
            axis = 0 if transposed else 1
            pallas_gpu.widened(narrow, wide, steps, within[0], axis)
        for piece in range(shape[0]) if branches > 1 else ():
            branch, k = divmod(piece, shape[0] // branches)
            across = pl.ds(k * WIDE, WIDE)
            joined = [values.at[across] for values in within[branch]]
            pallas_gpu.widened(narrow.at[piece], wide.at[piece], steps, joined)
        plgpu.commit_smem()
        return wide

    return Side(scratch, lambda memory: memory["narrow"], taken)
