"""Segments of rows and of columns in, the blocks that each tile of rows meets out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.attention.hopper.blocks import Range, clip, least, most

if TYPE_CHECKING:
    from jax import Array


def reach(rows: Array, columns: Array, tile: int, block: int) -> Array:
    """Returns which blocks each tile meets: start, whole, part and end of a `Range`.

    A block is left out if the tile's least and greatest segment lie beyond its own,
    and is whole if all four are the same. Segments in any order are taken; if they are
    in none, blocks are read and compared in which nothing is seen.

    Args:
        rows: int [b|1, t].
        columns: int [b|1, s].
        tile: Rows of a tile.
        block: Columns of a block.

    Returns:
        int32 [b|1, tiles, 4].
    """
    low, high = (x[:, :, None] for x in _ends(rows, tile))
    first, last = (x[:, None] for x in _ends(columns, block))
    meets = (first <= high) & (last >= low)
    same = (low == high) & (first == last) & (low == first)
    count = meets.shape[-1]
    start = jnp.argmax(meets, axis=-1)
    end = jnp.where(meets.any(-1), count - jnp.argmax(meets[..., ::-1], axis=-1), start)
    whole = jnp.where(same.any(-1), jnp.argmax(same, axis=-1), end)
    other = ~same & (jnp.arange(count) >= whole[..., None])
    part = jnp.where(other.any(-1), jnp.argmax(other, axis=-1), count)
    part = jnp.maximum(jnp.minimum(part, end), whole)
    return jnp.stack([start, whole, part, end], axis=-1).astype(jnp.int32)


def _ends(x: Array, size: int) -> tuple[Array, Array]:
    """Returns the least and greatest of each group of `size`: [b|1, groups] each."""
    more = -x.shape[1] % size
    groups = jnp.pad(x, ((0, 0), (0, more)), mode="edge")
    groups = groups.reshape(x.shape[0], -1, size)
    return groups.min(-1), groups.max(-1)


def within(r: Range, start: Any, whole: Any, part: Any, end: Any) -> Range:
    """Returns the blocks of a range that segments leave; at least one is read.

    Example:
        >>> within(Range(0, 0, 5, 6, 384), 2, 3, 4, 5)
        Range(start=2, whole=3, part=4, end=5, limit=384)
    """
    start = most(r.start, start)
    end = most(least(r.end, end), start + 1)
    whole = clip(most(r.whole, whole), start, end)
    part = clip(least(r.part, part), whole, end)
    return Range(start, whole, part, end, r.limit)
