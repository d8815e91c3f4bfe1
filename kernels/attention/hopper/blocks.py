"""Finds the blocks of keys that a tile of query rows reads, whole or in part.

Everything here is arithmetic on integers: Python integers in tests, scalars in a
kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

FAR = 1 << 30
"""Farther than any key; keeps position arithmetic inside int32."""


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
        first, last = self.shift, self.t - 1 + self.shift
        before = self.right is not None and first + self.right < 0
        after = self.left is not None and last - self.left >= self.s
        return before or after or self.crossed

    @property
    def crossed(self) -> bool:
        """Whether the window ends before it begins, for every row."""
        return (
            self.left is not None
            and self.right is not None
            and self.left + self.right < 0
        )

    @property
    def averages(self) -> bool:
        """Whether rows must be averaged over all keys, seen or not.

        If other operands than positions hide keys, such rows are known only at the end.
        """
        return self.mean and self.may_be_empty and not self.more


@dataclass(frozen=True)
class Range:
    """Blocks of keys of one tile, in order: part, whole, part.

    Attributes:
        start: The first block that is read.
        whole: The first block that every row sees all of.
        part: The first block after those.
        end: One past the last block that is read; at least one block is.
        limit: Keys from here on are seen by no row.
    """

    start: Any
    whole: Any
    part: Any
    end: Any
    limit: Any

    @property
    def count(self) -> Any:
        """The number of blocks that are read."""
        return self.end - self.start


def blocks_of(
    mask: Mask,
    first_row: Any,
    rows: int,
    keys: int,
    offset: Any = 0,
    length: Any = None,
    prefix: Any = None,
    early: Any = None,
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

    Example:
        >>> blocks_of(Mask(256, 256, right=0), 128, 128, 64)
        Range(start=0, whole=0, part=2, end=4, limit=256)
        >>> blocks_of(Mask(256, 256, right=0), 0, 128, 64, prefix=64)
        Range(start=0, whole=0, part=1, end=2, limit=256)
    """
    count = -(-mask.s // keys)
    limit = mask.s if length is None else clip(length, 0, mask.s)
    first = first_row + offset
    last = least(first_row + rows, mask.t) - 1 + offset
    low, whole_low, high, whole_high = 0, 0, limit, limit
    if mask.left is not None:
        left = min(mask.left, FAR)
        low, whole_low = clip(first - left, 0, mask.s), clip(last - left, 0, mask.s)
        if early is not None:
            low = _pick(first_row < early, 0, low)
            whole_low = _pick(first_row + rows <= early, 0, whole_low)
    if mask.right is not None:
        right = min(mask.right, FAR)
        high = least(clip(last + right + 1, 0, mask.s), limit)
        whole_high = least(clip(first + right + 1, 0, mask.s), limit)
        if prefix is not None:
            seen = clip(prefix, 0, limit)
            high, whole_high = most(high, seen), most(whole_high, seen)
    start = least(_div(low, keys), count - 1)
    end = most(_div(high + (keys - 1), keys), start + 1)
    whole = clip(_div(whole_low + (keys - 1), keys), start, end)
    part = clip(_div(whole_high, keys), whole, end)
    if mask.averages:
        some = _any_empty(mask, first, last, limit)
        start, whole = _pick(some, 0, start), _pick(some, 0, whole)
        part, end = _pick(some, 0, part), _pick(some, count, end)
    return Range(start, whole, part, end, limit)


def blocks_ahead(stages: int) -> int:
    """Returns the number of blocks that are copied before their tile's resident arrays.

    They fill memory that the tile before has read already, while its last blocks are
    computed. Resident arrays replace those that this tile reads to the end. The forward
    took 0.90 to 1.00 of the time with these
    (``tests/bench/results/attention_ahead.json``), and more with one more of four: a
    warpgroup that is done then waits for the slowest one.

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


def _any_empty(mask: Mask, first: Any, last: Any, limit: Any) -> Any:
    """Whether some row from position `first` to `last` sees no key."""
    some = limit <= 0
    if mask.right is not None:
        some = some | (first + min(mask.right, FAR) < 0)
    if mask.left is not None:
        some = some | (last - min(mask.left, FAR) >= limit)
    return some | mask.crossed


def _static(*values: Any) -> bool:
    return all(isinstance(v, int) for v in values)


def least(x: Any, y: Any) -> Any:
    """Returns the smaller of two integers."""
    return min(x, y) if _static(x, y) else jnp.minimum(x, y)


def most(x: Any, y: Any) -> Any:
    """Returns the larger of two integers."""
    return max(x, y) if _static(x, y) else jnp.maximum(x, y)


def clip(x: Any, low: Any, high: Any) -> Any:
    """Clamps x to the range from low to high."""
    return most(least(x, high), low)


def _pick(condition: Any, x: Any, y: Any) -> Any:
    if isinstance(condition, bool):
        return x if condition else y
    return jnp.where(condition, x, y)


def _div(x: Any, y: int) -> Any:
    """Returns x // y for a non-negative x."""
    return x // y if _static(x) else lax.div(x, jnp.int32(y))
