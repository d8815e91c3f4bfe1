"""One use of decode attention: its sizes, its mask, where keys lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from rewriter.kernels.attention.hopper.blocks import Mask, blocks_of
from rewriter.kernels.attention.hopper_decode.config import Split, rows_of
from rewriter.kernels.attention.hopper_decode.work_split import WorkQueue
from rewriter.kernels.attention.visibility import Range

LANES = 128
"""Columns of partial results are padded to a multiple of it, for `merge`."""


@dataclass(frozen=True)
class Pages:
    """The memory layout of keys and values.

    Attributes:
        size: Keys of a page; of a sequence if there is no table.
        count: Pages of a sequence.
        axes: The letters of the arrays' axes: k for heads, p for pages, z for positions
            and h for the width, which is last. Without a table p is for sequences.
        listed: Whether a table names each sequence's pages.
    """

    size: int
    count: int
    axes: str
    listed: bool


@dataclass(frozen=True)
class Problem:
    """The problem as known while tracing."""

    b: int
    n: int
    heads: int
    h: int
    e: int
    mask: Mask
    scale: float
    softcap: float | None
    pages: Pages
    config: Split
    parts: int = 1

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.n // self.heads

    @property
    def queries(self) -> int:
        """Queries of a pair."""
        return self.mask.t * self.group

    @property
    def rows(self) -> int:
        """Rows of a key head's queries, in eights."""
        return rows_of(self.mask.t, self.group)

    @property
    def columns(self) -> int:
        """Columns of partial results."""
        return -(-self.e // LANES) * LANES

    @property
    def programs(self) -> int:
        """Blocks of threads: no more than there are blocks of keys."""
        most = self.b * self.heads * -(-self.mask.s // self.config.block_kv)
        return min(self.config.programs, -(-most // self.config.readers))

    def queue(self, ends: Any) -> WorkQueue:
        """Returns the queue of blocks, given where sequences end in it."""
        readers = self.programs * self.config.readers
        return WorkQueue(readers, self.b, self.heads, ends)

    @property
    def averages(self) -> bool:
        """Whether rows that see no key, known before, are averaged over all keys.

        Like `Mask.averages`, with a mask of keys.
        """
        return self.mask.mean and self.mask.more

    def blocks(self, offset: Any, length: Any, empty: Any = None) -> Range:
        """Returns the blocks that a sequence's queries read.

        Args:
            offset: The run-time addend of positions; 0 or None for none.
            length: Keys before it are seen, None for all.
            empty: 1 if some query is averaged over all keys; None if unknown before.
        """
        mask, block = self.mask, self.config.block_kv
        at = mask.shift if offset is None else mask.shift + offset
        r = blocks_of(mask, 0, mask.t, block, at, length)
        if empty is None:
            return r
        start, whole, part = (
            jnp.where(empty > 0, 0, x) for x in (r.start, r.whole, r.part)
        )
        end = jnp.where(empty > 0, -(-mask.s // block), r.end)
        return Range(start, whole, part, end, r.limit)
