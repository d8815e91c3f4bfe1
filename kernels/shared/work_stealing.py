"""A work queue of tiles on a GPU: a block of threads takes the next when it is done.

A counter in global memory says how many tiles are taken. The warpgroup that copies
claims the next tile as soon as the one before it is copied, while that one is computed,
and broadcasts its number. Each block begins with the tile of its own number. So blocks
with light tiles, or near memory, take more of them. All blocks stay close together in
the queue, which keeps shared data in the cache. A tile's result does not depend on who
computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.shared import pallas_gpu

if TYPE_CHECKING:
    from jax import Array

AVAILABLE = jax.__version_info__ >= (0, 11)
"""Whether kernels may modify their inputs; otherwise tiles are assigned beforehand."""

TAKEN = "taken"
"""The name of the numbers of taken tiles in a block's shared memory."""

PLACES = 2
"""The number of slots for claimed tiles: one is read while the next is written."""


def counter() -> Any:
    """Returns a counter for one call of a kernel."""
    return jax.new_ref(jnp.zeros((1, 1), jnp.int32))


SHARED_MEMORY = 1 << 10
"""Bytes that `scratch` takes without barriers: allocations begin at a KiB."""


def scratch(listeners: int, numbers: int = 0) -> dict[str, Any]:
    """Returns a block's allocations for claiming tiles.

    Args:
        listeners: Warpgroups beside the one that claims.
        numbers: The numbers to broadcast for a tile, beside its index.
    """
    return {
        TAKEN: plgpu.SMEM((PLACES, 1 + numbers), jnp.int32),
        "listed": pallas_gpu.barriers(PLACES),
        "heard": pallas_gpu.barriers(PLACES, listeners),
    }


@dataclass(frozen=True)
class Claims:
    """The work queue as one block sees it.

    Attributes:
        shared: `scratch`.
        counter: The counter of `pallas_gpu.claim`.
        programs: The number of blocks.
        total: How many tiles.
        read: Returns the numbers of a tile by its index.
        every: Whether a block claims its first tile, too. Blocks that have not started
            then hold up no tile. `programs` is 0.
    """

    shared: dict[str, Any]
    counter: Any
    programs: Any
    total: Any
    read: Callable[[Any], tuple[Any, ...]] = lambda index: ()
    every: bool = False

    def over(
        self, body: Callable[[Any, Any, Any, Any], Any], steps: Any, copies: bool
    ) -> None:
        """Runs ``steps = body(i, steps, index, numbers)`` for the tiles of a block.

        Args:
            body: Copies or computes a tile, the block's i-th.
            steps: The carry from one tile to the next.
            copies: Whether this is the warpgroup that claims.
        """
        if not copies:
            for place in range(PLACES):
                plgpu.barrier_arrive(self.shared["heard"].at[place])

        def one(carry: Any) -> Any:
            i, steps, index, numbers = carry
            steps = body(i, steps, index, numbers)
            return i + 1, steps, *claimed(lax.rem(i, jnp.int32(PLACES)))

        claimed = self.claim if copies else self.read_claim
        first = lax.axis_index(pallas_gpu.PROGRAM)
        taken = claimed(PLACES - 1) if self.every else (first, self.read(first))
        start = jnp.int32(0), steps, *taken
        lax.while_loop(lambda carry: carry[2] < self.total, one, start)

    def claim(self, place: Any) -> tuple[Any, tuple[Any, ...]]:
        """Claims a tile, and broadcasts it to the other warpgroups."""
        x = self.shared
        plgpu.barrier_wait(x["heard"].at[place])
        pallas_gpu.claim(self.counter, x[TAKEN].at[place])
        index: Array = x[TAKEN][place, 0] + self.programs
        numbers = self.read(index)
        for i, number in enumerate(numbers):
            x[TAKEN][place, 1 + i] = number
        plgpu.barrier_arrive(x["listed"].at[place])
        return index, numbers

    def read_claim(self, place: Any) -> tuple[Any, tuple[Any, ...]]:
        """Returns the tile that was claimed."""
        x = self.shared
        plgpu.barrier_wait(x["listed"].at[place])
        index, *numbers = (x[TAKEN][place, i] for i in range(x[TAKEN].shape[1]))
        plgpu.barrier_arrive(x["heard"].at[place])
        return index + self.programs, tuple(numbers)
