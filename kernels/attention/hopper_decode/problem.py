"""One use of attention of few queries: its sizes, its mask, where keys lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rewriter.kernels.attention.hopper.blocks import Mask, Range, blocks_of
from rewriter.kernels.attention.hopper_decode.config import Split, rows_of
from rewriter.kernels.attention.hopper_decode.line import Line

LANES = 128
"""Columns of partial results are padded to as many, as `merge` reads them."""


@dataclass(frozen=True)
class Pages:
    """How keys and values lie in memory.

    Attributes:
        size: Keys of a page; of a sequence if there is no table.
        count: Pages of a sequence.
        axes: The letters of the arrays' axes: k for heads, p for pages, or sequences if
            there is no table, z for positions and h for the width, which is last.
        listed: Whether a table names each sequence's pages.
    """

    size: int
    count: int
    axes: str
    listed: bool


@dataclass(frozen=True)
class Problem:
    """All that is known while tracing."""

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

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.n // self.heads

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
        """Blocks of threads: not more than there are blocks of keys for."""
        most = self.b * self.heads * -(-self.mask.s // self.config.block_kv)
        return min(self.config.programs, -(-most // self.config.readers))

    def line(self, ends: Any) -> Line:
        """Returns the line of blocks, given where sequences end in it."""
        readers = self.programs * self.config.readers
        return Line(readers, self.b, self.heads, ends)

    def blocks(self, offset: Any, length: Any) -> Range:
        """Returns the blocks that a sequence's queries read.

        Args:
            offset: What is added to positions at run time, 0 or None for nothing.
            length: Keys before it are seen, None for all.
        """
        at = self.mask.shift if offset is None else self.mask.shift + offset
        return blocks_of(self.mask, 0, self.mask.t, self.config.block_kv, at, length)
