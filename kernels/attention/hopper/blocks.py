"""Finds the blocks of keys that a tile of query rows reads, whole or in part.

Everything here is arithmetic on integers: Python integers in tests, scalars in a
kernel. `visibility` has what other kernels share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rewriter.kernels.attention.visibility import Range, Visibility, clip, pick


@dataclass(frozen=True)
class Mask:
    """The keys that a query may see, as far as known while tracing.

    Attributes:
        t: Number of queries.
        s: Number of keys.
        left: A query at position p sees keys from ``p - left`` on; None for all.
        right: It sees keys up to ``p + right``; None for all.
        shift: Query row i is at position ``i + shift``, plus a run-time offset.
        lengths: Whether only keys before a run-time length are seen.
        offsets: Whether there is a run-time offset.
        mean: Whether a row that sees no key gives the mean of all values.
        more: Whether other operands hide keys too.
        prefixes: Whether all queries see the keys before a run-time number.
        weighs: Whether rows may weigh hidden keys, if biases say so at run time.
    """

    t: int
    s: int
    left: int | None = None
    right: int | None = None
    shift: int = 0
    lengths: bool = False
    offsets: bool = False
    mean: bool = False
    more: bool = False
    prefixes: bool = False
    weighs: bool = False

    @property
    def visibility(self) -> Visibility:
        """What is seen, without numbers that are known at run time."""
        return Visibility(self.t, self.s, self.left, self.right, self.shift)

    def most(self, rows: int, block: int) -> int:
        """Returns a number that no row and no column exceeds, of whole tiles.

        Args:
            rows: Rows of a tile.
            block: Columns of a block.
        """
        return max(-(-self.t // rows) * rows, -(-self.s // block) * block) - 1

    @property
    def hides(self) -> bool:
        """Whether there may be keys that some query does not see."""
        return self.left is not None or self.right is not None or self.lengths

    @property
    def may_be_empty(self) -> bool:
        """Whether there may be rows that see no key."""
        if self.more:
            return True
        if self.lengths or self.offsets:
            return self.hides
        return self.visibility.may_be_empty

    @property
    def averages(self) -> bool:
        """Whether rows must be averaged over all keys, seen or not.

        If other operands than positions hide keys, such rows are known only at the end.
        """
        return self.mean and self.may_be_empty and not self.more


def blocks_of(
    mask: Mask,
    first_row: Any,
    rows: int,
    keys: int,
    offset: Any = 0,
    length: Any = None,
    prefix: Any = None,
    early: Any = None,
    every: Any = None,
) -> Range:
    """Returns the blocks of `keys` keys that a tile of `rows` rows reads.

    Args:
        mask: What is known while tracing.
        first_row: The tile's first row, below ``mask.t``.
        rows: Rows of a tile.
        keys: Keys of a block.
        offset: The number to add to the rows' positions, including the static shift.
        length: Keys before it are seen; None for all.
        prefix: Keys before it are seen by all rows; None for none.
        early: Rows before it see all keys from the first on; None for none.
        every: Whether all blocks are read; None if that is not asked.

    Example:
        >>> blocks_of(Mask(256, 256, right=0), 128, 128, 64)
        Range(start=0, whole=0, part=2, end=4, limit=256)
        >>> blocks_of(Mask(256, 256, right=0), 0, 128, 64, prefix=64)
        Range(start=0, whole=0, part=1, end=2, limit=256)
    """
    seen = replace(
        mask.visibility, shift=offset, length=length, prefix=prefix, early=early
    )
    return seen.blocks(first_row, rows, keys, mask.averages, every)


def blocks_ahead(stages: int) -> int:
    """Returns the number of blocks that are copied before their tile's resident arrays.

    They fill memory that the tile before has read already, while its last blocks are
    computed. Resident arrays replace those that this tile reads to the end. With these
    the forward took 0.90 to 1.00 of its time
    (``tests/bench/results/attention_ahead.json``). With one more of four it took
    longer: a warpgroup that is done then waits for the slowest one.

    Example:
        >>> [blocks_ahead(stages) for stages in (2, 3, 4)]
        [1, 1, 2]
    """
    return max(1, stages - 2)


def inside(r: Range, tile: Range) -> Range:
    """Limits the blocks of some rows to those of their tile; at least one is left.

    Example:
        >>> tile = Range(start=2, whole=4, part=6, end=8, limit=512)
        >>> inside(Range(start=1, whole=3, part=5, end=6, limit=512), tile)
        Range(start=2, whole=3, part=5, end=6, limit=512)
    """
    start = clip(r.start, tile.start, tile.end - 1)
    end = clip(r.end, start + 1, tile.end)
    whole = clip(r.whole, start, end)
    return Range(start, whole, clip(r.part, whole, end), end, tile.limit)


def only_first(r: Range, hidden: Any) -> Range:
    """Leaves a tile whose rows are all hidden one block, which is seen in part.

    Gradients of keys past a length are zeros, so their tiles need no other queries.

    Args:
        r: The blocks of a tile.
        hidden: Whether its rows are hidden from all columns.

    Example:
        >>> only_first(Range(start=2, whole=3, part=6, end=8, limit=512), True)
        Range(start=2, whole=2, part=2, end=3, limit=512)
    """
    first = (r.start, r.start, r.start + 1)
    whole, part, end = (
        pick(hidden, x, y) for x, y in zip(first, (r.whole, r.part, r.end), strict=True)
    )
    return Range(r.start, whole, part, end, r.limit)
