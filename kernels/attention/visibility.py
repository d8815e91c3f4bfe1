"""Which keys a query sees: those in its window, length, prefix and segment.

Query i is at position p = i + shift + offset. It sees key j if all these hold, as far
as they are given:

    p - left <= j <= p + right, or j < prefix
    j < length
    segment(i) == segment(j)
    first(i) <= position(j) <= last(i)

Everything here is arithmetic on integers: Python integers, arrays of NumPy or JAX, or
scalars of a kernel. A kernel hands in those that it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

FAR = 1 << 30
"""Farther than any key; keeps position arithmetic inside int32."""


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


@dataclass(frozen=True)
class Visibility:
    """The keys that queries see.

    Attributes:
        t: Number of queries.
        s: Number of keys.
        left: A query at position p sees keys from ``p - left`` on; None for all.
        right: It sees keys up to ``p + right``; None for all.
        shift: Query i is at position ``i + shift``.
        offset: What is added to that, if anything.
        length: Keys before it are seen; None for all.
        prefix: Keys before it are seen whatever the window; None for none.
        early: Queries before it see all keys up to the window's end; None for none.
            This is a prefix, where queries and keys have changed places.
        segments: Numbers of the queries and the keys; equal ones see each other.
        places: Positions of keys that are data, and the first and the last that a
            query sees; None for no bound.
        mask: Booleans; True keeps. Only `keep` looks at it, at segments and at places.
    """

    t: int
    s: int
    left: int | None = None
    right: int | None = None
    shift: Any = 0
    offset: Any = None
    length: Any = None
    prefix: Any = None
    early: Any = None
    segments: tuple[Any, Any] | None = None
    places: tuple[Any, Any, Any] | None = None
    mask: Any = None

    @property
    def is_windowed(self) -> bool:
        """Whether positions are compared."""
        return self.left is not None or self.right is not None

    @property
    def is_crossed(self) -> bool:
        """Whether the window ends before it begins, for every query."""
        if self.left is None or self.right is None:
            return False
        return self.left + self.right < 0

    @property
    def may_be_empty(self) -> bool:
        """Whether the window of some query holds no key; with numbers alone."""
        first, last = self.shift, self.t - 1 + self.shift
        before = self.right is not None and first + self.right < 0
        after = self.left is not None and last - self.left >= self.s
        return before or after or self.is_crossed

    # ---------------------------------------------------------- pairs one by one
    def relative(self, queries: Any, keys: Any) -> Any:
        """Returns the position of keys less that of queries."""
        relative = keys - queries
        if self.shift != 0:
            relative = relative - self.shift
        return relative if self.offset is None else relative - self.offset

    def keep(self, queries: Any, keys: Any) -> Any:
        """Returns whether queries see keys; None if all do.

        Args:
            queries: Numbers of queries.
            keys: Numbers of keys. With them all that is given must broadcast.

        Example:
            >>> causal = Visibility(3, 3, right=0)
            >>> causal.keep(np.arange(3)[:, None], np.arange(3)).astype(int).tolist()
            [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
        """
        found = [] if self.mask is None else [self.mask]
        if self.segments is not None:
            found.append(self.segments[0] == self.segments[1])
        if self.places is not None:
            found += within(*self.places)
        if self.length is not None:
            found.append(keys < self.length)
        inside = self._inside(queries, keys) if self.is_windowed else None
        return _all(found if inside is None else [*found, inside])

    def _inside(self, queries: Any, keys: Any) -> Any:
        """Whether keys are in a query's window, or always seen."""
        relative, edges = self.relative(queries, keys), []
        if self.left is not None:
            edge = relative >= -self.left
            edges.append(edge if self.early is None else edge | (queries < self.early))
        if self.right is not None:
            edges.append(relative <= self.right)
        inside = _all(edges)
        return inside if self.prefix is None else inside | (keys < self.prefix)

    def first(self, position: Any) -> Any:
        """Returns the first key of the window around a position, which may be < 0."""
        return position - min(self.left, FAR)

    def last(self, position: Any) -> Any:
        """Returns the last key of the window around a position."""
        return position + min(self.right, FAR)

    # ---------------------------------------------------------------- many pairs
    def blocks(
        self,
        first_row: Any,
        rows: int,
        keys: int,
        averages: bool = False,
        every: Any = None,
    ) -> Range:
        """Returns the blocks of `keys` keys that a tile of `rows` rows reads.

        Args:
            first_row: The tile's first row, below `t`.
            rows: Rows of a tile.
            keys: Keys of a block.
            averages: Whether a tile with a row that sees no key reads all blocks, for
                the mean of all values.
            every: Whether all blocks are read, if there is something to ask.

        Example:
            >>> Visibility(256, 256, right=0).blocks(128, 128, 64)
            Range(start=0, whole=0, part=2, end=4, limit=256)
            >>> Visibility(256, 256, right=0, prefix=64).blocks(0, 128, 64)
            Range(start=0, whole=0, part=1, end=2, limit=256)
        """
        count = -(-self.s // keys)
        limit = self.s if self.length is None else clip(self.length, 0, self.s)
        shift = self.shift if self.offset is None else self.shift + self.offset
        first = first_row + shift
        last = least(first_row + rows, self.t) - 1 + shift
        low, whole_low, high, whole_high = 0, 0, limit, limit
        if self.left is not None:
            low = clip(self.first(first), 0, self.s)
            whole_low = clip(self.first(last), 0, self.s)
            if self.early is not None:
                low = pick(first_row < self.early, 0, low)
                whole_low = pick(first_row + rows <= self.early, 0, whole_low)
        if self.right is not None:
            high = least(clip(self.last(last) + 1, 0, self.s), limit)
            whole_high = least(clip(self.last(first) + 1, 0, self.s), limit)
            if self.prefix is not None:
                seen = clip(self.prefix, 0, limit)
                high, whole_high = most(high, seen), most(whole_high, seen)
        start = least(_div(low, keys), count - 1)
        end = most(_div(high + (keys - 1), keys), start + 1)
        whole = clip(_div(whole_low + (keys - 1), keys), start, end)
        part = clip(_div(whole_high, keys), whole, end)
        if averages or every is not None:
            some = self._is_any_empty(first, last, limit) if averages else every
            start, whole = pick(some, 0, start), pick(some, 0, whole)
            part, end = pick(some, 0, part), pick(some, count, end)
        return Range(start, whole, part, end, limit)

    def _is_any_empty(self, first: Any, last: Any, limit: Any) -> Any:
        """Whether some row from position `first` to `last` sees no key."""
        some = limit <= 0
        if self.right is not None:
            some = some | (self.last(first) < 0)
        if self.left is not None:
            some = some | (self.first(last) >= limit)
        return some | self.is_crossed

    def count(self) -> tuple[int, int]:
        """Returns the number of visible pairs of query and key, and of visible keys.

        With numbers alone; a length and early queries are not looked at.

        Example:
            >>> [Visibility(4, 4, left, 0).count() for left in (None, 1)]
            [(10, 4), (7, 4)]
            >>> [Visibility(1, 9, 2, 0, 8, prefix=n).count() for n in (0, 2)]
            [(3, 3), (5, 5)]
        """
        prefix = self.prefix or 0
        at = np.arange(self.t) + self.shift
        first, last = np.zeros_like(at), np.full_like(at, self.s - 1)
        if self.left is not None:
            first = np.maximum(self.first(at), 0)
        if self.right is not None:
            last = np.minimum(self.last(at), self.s - 1)
        some = last >= first
        pairs = int(_joined(first[some], last[some], prefix).sum())
        pairs += prefix * int(np.sum(~some))
        if not some.any():
            return pairs, prefix if self.t else 0
        return pairs, int(_joined(first[some].min(), last[some].max(), prefix))

    def count_at_most(self) -> tuple[int, int]:
        """Returns `count` at any offset: an upper bound."""
        if self.left is None or self.right is None:
            return self.t * self.s, self.s
        width = min(self.s, max(0, self.left + self.right + 1))
        return self.t * width, min(self.s, width + self.t - 1)

    def limits(self) -> tuple[int | None, int | None] | None:
        """Returns the window without limits that hide no pair; None if all are hidden.

        Example:
            >>> Visibility(4, 4, 9, 0).limits(), Visibility(4, 4, 2, 0, 8).limits()
            ((None, 0), None)
        """
        first, last = -self.shift - (self.t - 1), -self.shift + (self.s - 1)
        start = first if self.left is None else max(first, -self.left)
        end = last if self.right is None else min(last, self.right)
        if start > end:
            return None
        return (
            None if start == first else self.left,
            None if end == last else self.right,
        )


def within(positions: Any, first: Any, last: Any) -> list[Any]:
    """Returns whether positions are from a first to a last one, bound by bound.

    Integers are only compared, so that any of them are right.
    """
    found = [] if first is None else [positions >= first]
    return found if last is None else [*found, positions <= last]


def _joined(first: Any, last: Any, prefix: int) -> Any:
    """The number of keys from the first to the last, or in a prefix."""
    both = np.maximum(np.minimum(last, prefix - 1) - first + 1, 0)
    return last - first + 1 + prefix - both


# ------------------------------------------- integers, known or not while tracing
def _all(conditions: list[Any]) -> Any:
    """Whether all conditions hold; None if there are none."""
    found = None
    for condition in conditions:
        found = condition if found is None else found & condition
    return found


def least(x: Any, y: Any) -> Any:
    """Returns the smaller of two integers."""
    return min(x, y) if _is_static(x, y) else jnp.minimum(x, y)


def most(x: Any, y: Any) -> Any:
    """Returns the larger of two integers."""
    return max(x, y) if _is_static(x, y) else jnp.maximum(x, y)


def clip(x: Any, low: Any, high: Any) -> Any:
    """Clamps x to the range from low to high."""
    return most(least(x, high), low)


def pick(condition: Any, x: Any, y: Any) -> Any:
    """Returns x if a condition holds, and y if not."""
    if isinstance(condition, bool):
        return x if condition else y
    return jnp.where(condition, x, y)


def _div(x: Any, y: int) -> Any:
    """Returns x // y for a non-negative x."""
    return x // y if _is_static(x) else lax.div(x, jnp.int32(y))


def _is_static(*values: Any) -> bool:
    return all(isinstance(v, int) for v in values)
