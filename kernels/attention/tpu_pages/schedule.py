"""Lists the steps of the paged TPU kernel: which pages each sequence reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from rewriter.kernels.attention.visibility import Visibility

if TYPE_CHECKING:
    from jax import Array


@dataclass(frozen=True)
class Seen:
    """The keys that the queries of each sequence see, int32 [b] each.

    Attributes:
        limit: The first key that no query sees, like all after it.
        start: The position of the first query.
        first: The first key to read.
        last: The last one, inclusive; not before the first.
    """

    limit: Array
    start: Array
    first: Array
    last: Array


def seen(
    b: int,
    t: int,
    s: int,
    lengths: Array | None,
    offset: Array | None,
    window: tuple[int | None, int | None],
    shift: int,
    every: bool,
) -> Seen:
    """Returns the keys that the queries of each sequence see.

    Args:
        b: Sequences.
        t: Queries of each.
        s: Keys of the table's pages.
        lengths: int [b|1]; keys below are seen.
        offset: int [b|1], added to positions of queries.
        window: How far a query sees to the left and right, as attention has it.
        shift: A static part of the offset.
        every: Whether all pages are read for a sequence with a query that sees no key,
            since its result is the mean of all values.
    """
    left, right = window
    view = Visibility(t, s, left, right)
    length = s if lengths is None else jnp.minimum(lengths, s)
    limit = jnp.broadcast_to(jnp.asarray(length, jnp.int32), (b,))
    start = jnp.asarray(0 if offset is None else offset, jnp.int32) + shift
    start = jnp.broadcast_to(start, (b,))
    at = start[:, None] + jnp.arange(t, dtype=jnp.int32)
    low = jnp.zeros_like(at) if left is None else jnp.maximum(view.first(at), 0)
    high = jnp.broadcast_to(limit[:, None], at.shape)
    if right is not None:
        high = jnp.minimum(high, view.last(at) + 1)
    empty = high <= low
    first = jnp.where(empty, s, low).min(1)
    last = jnp.where(empty, 0, high).max(1) - 1
    none = empty.any(1) if every else empty.all(1)
    first = jnp.where(none, 0, first)
    return Seen(limit, start, first, jnp.where(none, s - 1 if every else 0, last))


@dataclass(frozen=True)
class Steps:
    """The steps of the kernel: a chunk of pages of one sequence each.

    Attributes:
        words: int32 [b chunks], for each step its sequence times the number of chunks,
            plus its chunk.
        pages: int32 [b chunks pages], the pages of each step.
        begin: int32 [b], the first chunk of each sequence.
        end: int32 [b], its last one.
        count: The number of steps.
    """

    words: Array
    pages: Array
    begin: Array
    end: Array
    count: Array


def steps(table: Array, first: Array, last: Array, pages: int) -> Steps:
    """Returns the steps over pages from a first to a last one, sequence by sequence.

    A step's places without a page name the page that they already hold, so that nothing
    is fetched for them.

    Args:
        table: int32 [b, p].
        first: int32 [b], each sequence's first place in the table that is read.
        last: int32 [b], its last one, inclusive.
        pages: Pages of a chunk.

    Example:
        >>> made = steps(jnp.array([[7, 3, 5], [2, 4, 6]]), jnp.array([0, 1]),
        ...              jnp.array([2, 1]), 2)
        >>> made.words[: int(made.count)].tolist()
        [0, 1, 2]
        >>> made.pages.reshape(4, 2)[: int(made.count)].tolist()
        [[7, 3], [5, 3], [5, 4]]
    """
    b, p = table.shape
    chunks = -(-p // pages)
    begin, end = first // pages, last // pages
    each = end - begin + 1
    ends = jnp.cumsum(each)
    step = jnp.arange(b * chunks, dtype=jnp.int32)
    row = jnp.minimum((ends <= step[:, None]).sum(1), b - 1).astype(jnp.int32)
    chunk = step - (ends - each)[row] + begin[row]
    place = chunk[:, None] * pages + jnp.arange(pages, dtype=jnp.int32)
    low, high = first[row][:, None], last[row][:, None]
    named = table[row[:, None], jnp.clip(place, low, high)]
    filled = (place >= low) & (place <= high)
    source = lax.cummax(jnp.where(filled, step[:, None], -1), axis=0)
    there = jnp.take_along_axis(named, jnp.maximum(source, 0), axis=0)
    named = jnp.where(source < 0, named, there).reshape(-1)
    found = (row * chunks + chunk, named, begin, end)
    return Steps(*(x.astype(jnp.int32) for x in found), ends[-1])


def many(b: int, p: int, pages: int) -> int:
    """Returns the most int32 of SMEM that the steps take."""
    chunks = -(-p // pages)
    return b * chunks * (1 + pages) + 6 * b
