"""Assigns warpgroups to tiles, and says which of them frees shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.shared import pallas_gpu

if TYPE_CHECKING:
    from rewriter.kernels.ragged.dot.hopper.config import Tiles


def by_owner(
    config: Tiles, warpgroup: Any, compute: Callable[[Any, Any], None]
) -> Callable[[Any, Any], None]:
    """Returns ``compute(tile, step)`` for the tiles of which this warpgroup has a part.

    That is every tile, unless each warpgroup owns every other one.
    """

    def one(tile: Any, step: Any) -> None:
        if config.apart:
            pallas_gpu.when(tile.owner == warpgroup)(lambda: compute(tile, step))
        else:
            compute(tile, step)

    return one


def free_all(config: Tiles, warpgroup: Any, free: Any) -> None:
    """Marks all shared memory as free; each warpgroup of a tile does so once.

    Args:
        config: The tiles.
        warpgroup: The index of this one.
        free: A barrier for each stage.
    """

    @pallas_gpu.when(warpgroup < config.sharing)
    def _() -> None:
        for slot in range(config.stages):
            plgpu.barrier_arrive(free.at[slot])
