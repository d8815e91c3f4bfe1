"""Lists the blocks of scores that a kernel computes, in order, without empty ones.

Scores [t, s] are cut into blocks. A block that no query sees is not listed, so that a
kernel neither fetches its keys nor takes a step for it. The list is an int32 table that
the kernel's index maps read. If all masks are known while tracing, the table is a
constant. Otherwise it is computed on the device, before the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from rewriter.kernels.attention.visibility import Visibility

HIDING = frozenset(
    {"mask", "q_segments", "kv_segments", "kv_lengths", "offset", "prefix"}
)
"""Operands whose values hide keys."""

LATER, MORE, PART, IDLE = 1, 2, 4, 8
"""Bits of a step: not the first of its line, not the last, a block seen in part (or at
an edge), and a step without work."""

BITS = 4
MINOR = 13
MOST_BLOCKS = 1 << MINOR
"""The most blocks along an axis: a step is packed into 31 bits."""


@dataclass(frozen=True)
class Cut:
    """Scores of t queries and s keys, in blocks.

    Attributes:
        t: Number of queries.
        s: Number of keys.
        rows: Queries of a block.
        keys: Keys of a block.
        left: A query at position p sees keys from ``p - left`` on; None for all.
        right: It sees keys up to ``p + right``; None for all.
        shift: Query i is at position ``i + shift``, plus an offset at run time.
        edges: Whether blocks that cross the last query count as seen in part, like
            those that cross the last key.
        repeat: Consecutive queries of the same head, where the heads of a group follow
            each other: query i is then at ``i % repeat + shift``. 0 for one head.
        step: Consecutive keys at the same position, one of each head.
    """

    t: int
    s: int
    rows: int
    keys: int
    left: int | None = None
    right: int | None = None
    shift: int = 0
    edges: bool = False
    repeat: int = 0
    step: int = 1

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks along queries and keys."""
        return -(-self.t // self.rows), -(-self.s // self.keys)

    @property
    def visibility(self) -> Visibility:
        """What is seen, without numbers that are known at run time."""
        rows = self.repeat or self.t
        return Visibility(rows, self.s, self.left, self.right, self.shift)


Table = Any
"""int [b|1, query blocks, key blocks]: 0 for empty, 1 for part, 2 for all."""


def states(cut: Cut, given: Mapping[str, Any]) -> Table:
    """Returns whether blocks are empty, seen in part, or by all queries.

    A block that counts as seen in part may be empty.

    Args:
        cut: The blocks.
        given: Of ``offset``, ``kv_lengths`` and ``prefix`` int [b|1], of
            ``q_segments`` int [b|1, t], ``kv_segments`` int [b|1, s] and ``mask``
            bool [b|1, n|1, t|1, s|1] those that there are. Numpy arrays give one.

    Example:
        >>> states(Cut(256, 256, 128, 64, right=0), {}).tolist()
        [[[1, 1, 0, 0], [2, 2, 1, 1]]]
    """
    xp = np if all(isinstance(x, np.ndarray) for x in given.values()) else jnp
    many, per = cut.blocks
    column = xp.arange(per, dtype=xp.int32) * cut.keys
    some = xp.ones((1, many, per), bool)
    every = xp.broadcast_to(column + cut.keys <= cut.s, some.shape) & (cut.step == 1)
    column_end = (xp.minimum(column + cut.keys, cut.s) - 1) // cut.step
    column = column // cut.step
    if cut.edges:
        fits = xp.arange(1, many + 1, dtype=xp.int32) * cut.rows <= cut.t
        every = every & fits[:, None]
    seen = cut.visibility
    if seen.is_windowed:
        first, last = _positions(cut, given.get("offset"), xp)
        inside, covered = some, xp.ones_like(some)
        if cut.right is not None:
            inside = inside & (column <= seen.last(last))
            covered = covered & (column_end <= seen.last(first))
        if cut.left is not None:
            inside = inside & (column_end >= seen.first(first))
            covered = covered & (column >= seen.first(last))
        if "prefix" in given:
            prefix = given["prefix"][:, None, None]
            inside = inside | (column < prefix)
            covered = covered | (column_end < prefix)
        some, every = some & inside, every & covered
    if "kv_lengths" in given:
        length = given["kv_lengths"][:, None, None]
        some, every = some & (column < length), every & (column_end < length)
    if "q_segments" in given:
        touch, same = _segments(cut, given, xp)
        some, every = some & touch, every & same
    if "mask" in given:
        touch, same = _mask(cut, given["mask"], xp)
        some, every = some & touch, every & same
    return xp.where(some, xp.where(every, 2, 1), 0).astype(xp.int32)


def _positions(cut: Cut, offset: Any, xp: Any) -> tuple[Any, Any]:
    """The first and last position of each block of queries, int [b|1, blocks, 1]."""
    start = xp.arange(cut.blocks[0], dtype=xp.int32) * cut.rows
    end = xp.minimum(start + cut.rows, cut.t) - 1
    if cut.repeat:
        start, end = xp.zeros_like(start), xp.full_like(end, cut.repeat - 1)
    start, end = start[None, :, None] + cut.shift, end[None, :, None] + cut.shift
    if offset is None:
        return start, end
    return start + offset[:, None, None], end + offset[:, None, None]


def _segments(cut: Cut, given: Mapping[str, Any], xp: Any) -> tuple[Any, Any]:
    """Whether some, and whether all, pairs of a block are in one segment."""
    many, per = cut.blocks
    q_least, q_most = _extremes(given["q_segments"], many, cut.rows, xp)
    k_least, k_most = _extremes(given["kv_segments"], per, cut.keys, xp)
    q_least, q_most = q_least[:, :, None], q_most[:, :, None]
    k_least, k_most = k_least[:, None], k_most[:, None]
    touch = (q_least <= k_most) & (k_least <= q_most)
    same = (q_least == q_most) & (k_least == k_most) & (q_least == k_least)
    return touch, same


def _extremes(x: Any, blocks: int, size: int, xp: Any) -> tuple[Any, Any]:
    """The least and most of [b, s] in each block, [b, blocks]."""
    x = xp.pad(x, ((0, 0), (0, blocks * size - x.shape[1])), mode="edge")
    x = x.reshape(-1, blocks, size)
    return x.min(-1), x.max(-1)


def _mask(cut: Cut, mask: Any, xp: Any) -> tuple[Any, Any]:
    """Whether some, and whether all, pairs of a block are kept in any head."""
    many, per = cut.blocks
    found = []
    for combine, fill in ((xp.any, False), (xp.all, True)):
        x = combine(mask, axis=1)
        for axis, blocks, size in ((1, many, cut.rows), (2, per, cut.keys)):
            if x.shape[axis] == 1:
                continue
            pad = [(0, 0)] * x.ndim
            pad[axis] = (0, blocks * size - x.shape[axis])
            x = xp.pad(x, pad, constant_values=fill)
            x = x.reshape(*x.shape[:axis], blocks, size, *x.shape[axis + 1 :])
            x = combine(x, axis=axis + 1)
        found.append(x)
    return found[0], found[1]


@dataclass(frozen=True)
class Steps:
    """The steps of a kernel.

    Attributes:
        words: int32 [(b or 1) * most]: each a major block, a minor one, and bits.
        most: Words of a batch entry.
        count: Steps of the grid: a number, or a traced scalar.
        each: Whether every batch entry has steps of its own.
        kinds: Whether there may be blocks seen by all queries, and blocks seen in part.
        per_line: The steps of a line, if no block is hidden, in part or wholly: words
            are then calculated instead of read.
    """

    words: Any
    most: int
    count: Any
    each: bool
    kinds: tuple[bool, bool] = (True, True)
    per_line: int = 0

    @property
    def table(self) -> dict[str, Any]:
        """The words as an operand of a kernel, by name, if there are any to read."""
        return {} if self.per_line else {"words": jnp.asarray(self.words, jnp.int32)}

    def at(self, tables: Sequence[Any], batch: Any, step: Any) -> Any:
        """Returns a step's word, from the reference of the table, if any.

        Args:
            tables: The references that a kernel or an index map gets first.
            batch: The batch entry.
            step: Its step.
        """
        if not self.per_line:
            place = batch * self.most + step if self.each else step
            return tables[0][place]
        line, other = divided(step, self.per_line)
        bits = jnp.where(other > 0, LATER, 0)
        bits = bits + jnp.where(other < self.per_line - 1, MORE, 0)
        return (line << (MINOR + BITS)) + (other << BITS) + bits


def divided(x: Any, by: int) -> tuple[Any, Any]:
    """Returns quotient and remainder of a non-negative int32."""
    return lax.div(x, jnp.int32(by)), lax.rem(x, jnp.int32(by))


def major(word: Any) -> Any:
    """Returns the block along the axis whose blocks have a line of steps each."""
    return word >> (MINOR + BITS)


def minor(word: Any) -> Any:
    """Returns the block along the other axis."""
    return (word >> BITS) & (MOST_BLOCKS - 1)


def steps(table: Table, by_keys: bool = False, whole: bool = True) -> Steps:
    """Returns the steps over blocks that are not empty, line by line.

    Each line has at least one step, so that its result is written.

    Args:
        table: The result of `states`.
        by_keys: Whether a line is a block of keys, and not of queries.
        whole: Whether blocks may be seen by all queries, if values decide it.

    Example:
        >>> found = steps(states(Cut(256, 256, 128, 128, right=0), {}))
        >>> [(int(major(w)), int(minor(w)), int(w) & 15) for w in found.words]
        [(0, 0, 4), (1, 0, 2), (1, 1, 5)]
    """
    known = isinstance(table, np.ndarray)
    xp = np if known else jnp
    if by_keys:
        table = table.swapaxes(1, 2)
    batch, lines, others = table.shape
    if known and batch == 1 and (table == 2).all():
        kinds = True, False
        return Steps(np.zeros(1, np.int32), 1, table.size, False, kinds, others)
    empty = (table == 0).all(-1, keepdims=True)
    first = xp.arange(others, dtype=xp.int32) == 0
    table = xp.where(empty & first, 1, table)
    word = xp.arange(lines, dtype=xp.int32)[:, None] << (MINOR + BITS)
    word = word | (xp.arange(others, dtype=xp.int32) << BITS)
    word = xp.where(table == 1, word | PART, word)
    word = xp.where(table == 0, np.int32(2**31 - 1), word).reshape(batch, -1)
    word = xp.sort(word, axis=-1)
    count = (table > 0).reshape(batch, -1).sum(-1).astype(xp.int32)
    word = _marked(word, count, xp)
    most = int(count.max()) if known else word.shape[1]
    bound = most if known else count.max()
    kinds = (whole, True)
    if known:
        kinds = bool((table == 2).any()), bool((table == 1).any())
    return Steps(word[:, :most].reshape(-1), most, bound, batch > 1, kinds)


def _marked(word: Any, count: Any, xp: Any) -> Any:
    """Marks the first and last steps of lines, and steps without work."""
    line = major(word)
    place = xp.arange(word.shape[1], dtype=xp.int32)
    before, after = xp.roll(line, 1, -1), xp.roll(line, -1, -1)
    later = (place > 0) & (before == line)
    more = (place + 1 < count[:, None]) & (after == line)
    word = word + xp.where(later, LATER, 0) + xp.where(more, MORE, 0)
    last = xp.take_along_axis(word, count[:, None] - 1, axis=1)
    idle = ((last >> BITS) << BITS) | (LATER | MORE | PART | IDLE)
    return xp.where(place < count[:, None], word, idle).astype(xp.int32)
