"""One use of attention to a latent cache: its sizes, its mask, where keys lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rewriter.kernels.attention.hopper.blocks import Mask, blocks_of
from rewriter.kernels.attention.hopper_decode.problem import Pages
from rewriter.kernels.attention.hopper_decode.work_split import WorkQueue
from rewriter.kernels.attention.hopper_latent.config import KEYS, Programs, groups_of
from rewriter.kernels.attention.visibility import Range


@dataclass(frozen=True)
class Problem:
    """The problem as known while tracing.

    Attributes:
        b: Sequences.
        n: Query heads; all read the same keys.
        c: Width of the latent, and so of values.
        r: Width of the rotary keys; 0 if there are none.
        mask: The keys that a query may see.
        scale: Multiplies scores; positive.
        pages: Where keys lie.
        whole: Whether the latent and the rotary keys lie in one array, side by side.
        config: How the work is split.
        zero: Whether rows without keys are 0, and not NaN.
        dtype: The result's dtype.
    """

    b: int
    n: int
    c: int
    r: int
    mask: Mask
    scale: float
    pages: Pages
    whole: bool
    config: Programs
    zero: bool
    dtype: Any

    @property
    def half(self) -> int:
        """Columns of the result that a warpgroup computes."""
        return self.c // 2

    @property
    def queries(self) -> int:
        """Query rows of a sequence."""
        return self.mask.t * self.n

    @property
    def groups(self) -> int:
        """Blocks of threads that read the same keys, for other rows each."""
        return groups_of(self.mask.t, self.n)

    @property
    def readers(self) -> int:
        """Readers of the cache: no more than there are blocks of keys."""
        most = self.b * -(-self.mask.s // KEYS)
        return min(self.config.readers(self.b, self.groups), most)

    def queue(self, ends: Any) -> WorkQueue:
        """Returns the queue of blocks, given where sequences end in it."""
        return WorkQueue(self.readers, self.b, 1, ends)

    def blocks(self, offset: Any, length: Any) -> Range:
        """Returns the blocks that a sequence's queries read.

        Args:
            offset: The run-time addend of positions; None for none.
            length: Keys before it are seen, None for all.
        """
        mask = self.mask
        at = mask.shift if offset is None else mask.shift + offset
        return blocks_of(mask, 0, mask.t, KEYS, at, length)
