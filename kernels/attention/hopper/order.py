"""The order of tiles: heavy ones first, and those that share k and v together."""

from __future__ import annotations

import functools
import heapq
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

CACHE = 24 << 20
"""Bytes of k and v that are read at a time: half of an H100's L2 cache of 50 MB."""

BESIDES = 1
"""The cost of a tile beside its blocks of keys, in blocks."""

MOST_LISTED = 1 << 16
"""The most tiles to assign one by one while tracing, which takes some 0.1 s."""


@dataclass(frozen=True)
class Order:
    """Tiles of all (batch, head) pairs, in a line.

    Pairs are taken in sections whose k and v fit into the cache. In a section, tiles at
    the same place of all pairs follow each other, so that the heaviest come first.

    Attributes:
        pairs: Pairs of a batch entry and a query head.
        bytes_of_pair: Bytes of k and v that a pair reads; shared bytes are counted
            once.
        programs: Blocks of threads that take tiles; 0 for one block each.
        work: Blocks of keys that each tile of a pair reads.
        claims: Whether blocks of threads claim tiles, if there are more tiles than
            blocks.
    """

    pairs: int
    bytes_of_pair: int
    programs: int
    work: tuple[int, ...]
    claims: bool = False

    @property
    def claimed(self) -> bool:
        """Whether tiles are claimed one by one."""
        return self.claims and self.tiles > self.blocks

    @property
    def tiles(self) -> int:
        """The number of tiles."""
        return len(self.work) * self.pairs

    @property
    def blocks(self) -> int:
        """The number of blocks of threads to start."""
        return min(self.tiles, self.programs or self.tiles)

    @property
    def section(self) -> int:
        """Pairs of a section, in sections of nearly equal size."""
        most = max(1, min(self.pairs, CACHE // self.bytes_of_pair))
        return -(-self.pairs // -(-self.pairs // most))

    @functools.cached_property
    def table(self) -> np.ndarray | None:
        """The assignment of tiles to blocks of threads: a count, then indices of tiles.

        int32 [blocks, most + 2]. Each tile goes to the block that is free first. None
        if tiles are claimed, or if they are taken in turns, since they are alike or too
        many.
        """
        alike = len(set(self.work)) == 1
        if self.claimed or alike or not self.programs or self.tiles > MOST_LISTED:
            return None
        free = [(0, i) for i in range(self.blocks)]
        taken: list[list[int]] = [[] for _ in free]
        for index in range(self.tiles):
            time, block = heapq.heappop(free)
            taken[block].append(index)
            row, _ = self.place(index)
            heapq.heappush(free, (time + self.work[row] + BESIDES, block))
        made = np.zeros((self.blocks, max(map(len, taken)) + 2), np.int32)
        for row, indices in zip(made, taken, strict=True):
            row[0] = len(indices)
            row[1 : 1 + len(indices)] = indices
        return made

    def count(self, program: Any) -> Any:
        """Returns the number of tiles that a block of threads takes in turns."""
        turns, rest = divmod(self.tiles, self.blocks)
        return turns + jnp.where(program < rest, 1, 0) if rest else turns

    def place(self, index: Any) -> tuple[Any, Any]:
        """Returns (tile of rows, pair) at an index of the order.

        Example:
            >>> Order(2, 1, 0, (1, 2, 3)).place(0)
            (2, 0)
        """
        rows = len(self.work)
        whole = self.section * rows
        if isinstance(index, int):
            section = index // whole
            width = min(self.section, self.pairs - section * self.section)
            row = (index - section * whole) // width
        else:
            section = lax.div(index, jnp.int32(whole))
            width = jnp.minimum(self.section, self.pairs - section * self.section)
            row = lax.div(index - section * whole, width)
        pair = section * self.section + index - section * whole - row * width
        return (rows - 1 - row if self.work[-1] > self.work[0] else row), pair
