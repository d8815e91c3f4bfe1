"""Classifies blocks by masks, segments and positions: skipped, whole or partly hidden.

A block is skipped for a tile if no row sees any of its columns, and is whole if all
rows see all of them. Both are computed before a kernel runs, as four integers a tile.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.attention.hopper import pallas
from rewriter.kernels.attention.visibility import Range, clip, least, most

if TYPE_CHECKING:
    from jax import Array

FEW_BLOCKS = 8
"""With fewer blocks masks are not classified: reading a tile's class would take longer
than skipping saves."""

Classes = tuple["Array", "Array"]
"""Whether each tile sees some of a block, and all of it: bool [b|1, n|1, tiles|1,
blocks|1].
"""


@dataclass(frozen=True)
class Masks:
    """What hides columns from rows, beside windows and lengths.

    Attributes:
        mask: bool [b|1, n|1, rows|1, columns|1].
        segments: The segments of rows, int [b|1, rows], and of columns.
        places: Positions of keys, int [b|1, s], and the first and the last one that
            each query sees, int [b|1, t] each; None for no bound.
        turned: Whether rows are keys, and columns queries.
    """

    mask: Array | None = None
    segments: tuple[Array, Array] | None = None
    places: tuple[Array, Array | None, Array | None] | None = None
    turned: bool = False

    @property
    def transposed(self) -> Masks:
        """The same where rows are columns."""
        return Masks(
            None if self.mask is None else self.mask.swapaxes(2, 3),
            None if self.segments is None else self.segments[::-1],
            self.places,
            not self.turned,
        )

    def classes(self, tile: int, block: int, group: int) -> list[Classes]:
        """Returns the classes of blocks by each of them.

        Args:
            tile: Rows of a tile.
            block: Columns of a block.
            group: Query heads of a tile.
        """
        found = []
        if self.segments is not None:
            found.append(of_segments(*self.segments, tile, block))
        if self.places is not None and self.turned:
            some, whole = of_places(*self.places, block, tile)
            found.append((some.swapaxes(2, 3), whole.swapaxes(2, 3)))
        elif self.places is not None:
            found.append(of_places(*self.places, tile, block))
        if self.mask is not None:
            found.append(merged(of_mask(self.mask, tile, block), group))
        return found


def of_places(
    positions: Array, first: Array | None, last: Array | None, tile: int, block: int
) -> Classes:
    """Returns the classes of blocks by positions that are data.

    Only the least and the greatest number of tile and block are compared. If positions
    are unordered, a block may count as seen although nothing in it is.

    Args:
        positions: int [b|1, s], those of keys.
        first: int [b|1, t], the first position that each query sees; None for all.
        last: int [b|1, t], the last one.
        tile: Queries of a tile.
        block: Keys of a block.
    """
    least, greatest = (x[:, None, None] for x in _ends(positions, block))
    some, whole = [], []
    if first is not None:
        low, high = (x[:, None, :, None] for x in _ends(first, tile))
        some.append(greatest >= low)
        whole.append(least >= high)
    if last is not None:
        low, high = (x[:, None, :, None] for x in _ends(last, tile))
        some.append(least <= high)
        whole.append(greatest <= low)
    return functools.reduce(operator.and_, some), functools.reduce(operator.and_, whole)


def of_segments(rows: Array, columns: Array, tile: int, block: int) -> Classes:
    """Returns the classes of blocks by segments.

    Only the least and the greatest segment of tile and block are compared. If segments
    are unordered, a block may count as seen although nothing in it is.

    Args:
        rows: int [b|1, t].
        columns: int [b|1, s].
        tile: Rows of a tile.
        block: Columns of a block.
    """
    low, high = (x[:, None, :, None] for x in _ends(rows, tile))
    first, last = (x[:, None, None] for x in _ends(columns, block))
    some = (first <= high) & (last >= low)
    return some, (low == high) & (first == last) & (low == first)


def _ends(x: Array, size: int) -> tuple[Array, Array]:
    """Returns the least and greatest of each group of `size`: [b|1, groups] each."""
    more = -x.shape[1] % size
    groups = jnp.pad(x, ((0, 0), (0, more)), mode="edge")
    groups = groups.reshape(x.shape[0], -1, size)
    return groups.min(-1), groups.max(-1)


def of_mask(mask: Array, tile: int, block: int) -> Classes:
    """Returns the classes of blocks by a mask, bool [b|1, n|1, rows|1, columns|1]."""
    some = _grouped(_grouped(mask, 3, block, jnp.any), 2, tile, jnp.any)
    return some, _grouped(_grouped(mask, 3, block, jnp.all), 2, tile, jnp.all)


def _grouped(
    x: Array, axis: int, size: int, reduce: Callable[..., Array]
) -> Array:  # fmt: skip
    """Reduces groups of `size` along an axis; an axis of size 1 stays."""
    if x.shape[axis] == 1:
        return x
    more = [(0, 0)] * x.ndim
    more[axis] = (0, -x.shape[axis] % size)
    x = jnp.pad(x, more, constant_values=reduce is jnp.all)
    x = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    return reduce(x, axis=axis + 1)


def merged(classes: Classes, group: int) -> Classes:
    """Returns the classes for `group` adjacent heads together: seen by any, by all."""
    some, whole = classes
    if some.shape[1] == 1:
        return classes
    apart = lambda x: x.reshape(x.shape[0], -1, group, *x.shape[2:])
    return apart(some).any(2), apart(whole).all(2)


def reach(classes: Sequence[Classes], b: int, tiles: int, blocks: int) -> Array:
    """Returns start, whole, part and end of a `Range` for each tile.

    Args:
        classes: The classes that must all hold.
        b: Batch entries.
        tiles: Tiles of rows.
        blocks: Blocks of columns.

    Returns:
        int32 [b, n|1, tiles, 4].
    """
    some, whole = classes[0]
    for more, all_of in classes[1:]:
        some, whole = some & more, whole & all_of
    shape = (b, some.shape[1], tiles, blocks)
    some, whole = jnp.broadcast_to(some, shape), jnp.broadcast_to(whole, shape)
    start = jnp.argmax(some, axis=-1)
    end = jnp.where(some.any(-1), blocks - jnp.argmax(some[..., ::-1], axis=-1), start)
    first = jnp.where(whole.any(-1), jnp.argmax(whole, axis=-1), end)
    other = ~whole & (jnp.arange(blocks) >= first[..., None])
    part = jnp.where(other.any(-1), jnp.argmax(other, axis=-1), blocks)
    part = jnp.maximum(jnp.minimum(part, end), first)
    return jnp.stack([start, first, part, end], axis=-1).astype(jnp.int32)


def table(
    b: int,
    rows: int,
    columns: int,
    tile: int,
    block: int,
    masks: Masks,
    group: int = 1,
) -> Array | None:
    """Returns the `reach` table of a kernel, or None if positions alone decide.

    Args:
        b: Batch entries.
        rows: Rows of scores.
        columns: Columns of scores.
        tile: Rows of a tile.
        block: Columns of a block.
        masks: What hides columns from rows.
        group: Query heads of a tile.
    """
    tiles, blocks = -(-rows // tile), -(-columns // block)
    compared = masks.segments is not None or masks.places is not None
    if not compared and (masks.mask is None or blocks < FEW_BLOCKS):
        return None
    return reach(masks.classes(tile, block, group), b, tiles, blocks)


def every(table: Array, blocks: int, wanted: Array | None) -> Array:
    """Returns a table in which all tiles read all blocks, in part, if that is wanted.

    Args:
        table: As `reach` gives it.
        blocks: Blocks of columns.
        wanted: bool [1]; None if it is not asked.
    """
    if wanted is None:
        return table
    whole = jnp.asarray([0, 0, 0, blocks], table.dtype)
    return jnp.where(wanted[0], whole, table)


def within(r: Range, start: Any, whole: Any, part: Any, end: Any) -> Range:
    """Intersects a range with a table's entry; at least one block is read.

    Example:
        >>> within(Range(0, 0, 5, 6, 384), 2, 3, 4, 5)
        Range(start=2, whole=3, part=4, end=5, limit=384)
    """
    start = most(r.start, start)
    end = most(least(r.end, end), start + 1)
    whole = clip(most(r.whole, whole), start, end)
    part = clip(least(r.part, part), whole, end)
    return Range(start, whole, part, end, r.limit)


def left(table: Any, r: Range, b: Any, head: Any, row: Any) -> Range:
    """Returns a tile's blocks after `table` has excluded some.

    Args:
        table: A reference to it.
        r: The blocks that positions leave.
        b: The batch entry.
        head: The head.
        row: The tile.
    """
    lead = (b, head if table.shape[1] > 1 else 0, row)
    return within(r, *(pallas.scalar(table, *lead, i) for i in range(4)))
