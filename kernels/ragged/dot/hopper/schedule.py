"""Lists tiles from group sizes: which rows, of which group, in which order.

Tiles begin where their group does, so that only a group's last tile has rows to
spare. Rows of no group form a group of their own, whose tiles are not multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from rewriter.kernels.ragged.dot.ranges import upto
from rewriter.kernels.shared import pallas_gpu, work_stealing

if TYPE_CHECKING:
    from jax import Array

FIELDS = 4
"""Fields of a row of `of_rows`."""


def most_tiles(m: int, groups: int, rows: int) -> int:
    """Returns the most tiles of m rows in `groups` groups and the rest.

    Example:
        >>> most_tiles(256, 4, 64)
        8
    """
    return min(m, -(-m // rows) + groups)


def of_rows(group_sizes: Array, m: int, rows: int) -> Array:
    """Returns the tiles of `rows` rows each, a power of two: int32 [1 + most, 4].

    The first row holds their count. Each other row is a tile: its group, first row,
    number of rows, and 1 if it is multiplied, 0 if its rows are in no group. If the
    sizes are too large in sum, the last tiles may have no rows.
    """
    groups, most = len(group_sizes), most_tiles(m, len(group_sizes), rows)
    sizes = jnp.clip(group_sizes.astype(jnp.int32), 0, m)
    own = (sizes + rows - 1) >> (rows.bit_length() - 1)  # fused, as // is not
    either = jnp.arange(2)[:, None] == 0
    ends, after = upto(jnp.where(either, sizes, own))
    tile = jnp.arange(most, dtype=jnp.int32)[:, None]
    # Sums over groups, in one kernel: those of a tile's group, and those before it.
    mine = (tile >= (after - own)) & (tile < after)
    group = jnp.sum(tile >= after, 1, dtype=jnp.int32)
    first = jnp.sum(jnp.where(mine, ends - sizes + rows * (tile - after + own), 0), 1)
    end = jnp.sum(jnp.where(mine, ends, 0), 1)
    rest = group == groups
    total = jnp.minimum(ends[-1], m)
    first = jnp.where(rest, total + rows * (tile[:, 0] - after[-1]), first)
    end = jnp.where(rest, m, jnp.minimum(end, m))
    made = (
        jnp.minimum(group, groups - 1), first, jnp.clip(end - first, 0, rows), ~rest
    )  # fmt: skip
    table = jnp.stack([x.astype(jnp.int32) for x in made], 1)
    count = jnp.minimum(after[-1] + -(-(m - total) // rows), most)
    return jnp.concatenate([jnp.pad(count[None, None], ((0, 0), (0, 3))), table])


@dataclass(frozen=True)
class Listed:
    """Tiles that `of_rows` lists, as a kernel reads them."""

    table: Any

    @property
    def count(self) -> Any:
        """The number of tiles."""
        return self.table[0, 0]

    def tile(self, index: Any) -> tuple[Any, ...]:
        """Returns a tile's numbers."""
        return tuple(self.table[index + 1, x] for x in range(FIELDS))


@dataclass(frozen=True)
class EqualGroups:
    """Tiles of rows in groups of one size, which need no list.

    Attributes:
        m: Rows of a group.
        rows: Those of a tile.
        groups: The number of groups.

    Example:
        >>> [x.item() for x in EqualGroups(100, 64).tile(1)]
        [0, 64, 36, 1]
        >>> [x.item() for x in EqualGroups(100, 64, 2).tile(3)]
        [1, 164, 36, 1]
    """

    m: int
    rows: int
    groups: int = 1

    @property
    def count(self) -> int:
        """The number of tiles."""
        return self.groups * self.of_group

    @property
    def of_group(self) -> int:
        """The number of tiles of a group."""
        return -(-self.m // self.rows)

    def tile(self, index: Any) -> tuple[Any, ...]:
        """Returns a tile's numbers."""
        group, inside = 0, index
        if self.groups > 1:
            each = jnp.int32(self.of_group)
            group, inside = lax.div(index, each), lax.rem(index, each)
        first = inside * self.rows
        height = jnp.minimum(self.rows, self.m - first)
        made = group, group * self.m + first, height, 1
        return tuple(jnp.int32(x) for x in made)


def place(index: Any, rows: Any, columns: int, width: int) -> tuple[Any, Any]:
    """Returns (row, column) of a tile: bands of rows, columns to and fro.

    So tiles that run at once read few rows and few columns, which stay in the cache.

    Args:
        index: From 0 to ``rows * columns - 1``, an integer or a kernel's scalar.
        rows: The number of tiles in a column.
        columns: And in a row.
        width: Rows of a band.

    Example:
        >>> [place(i, 3, 2, 2) for i in range(6)]
        [(0, 0), (1, 0), (0, 1), (1, 1), (2, 1), (2, 0)]
    """
    whole = width * columns
    if isinstance(index, int):
        band, rest = divmod(index, whole)
        high = min(width, rows - band * width)
        column, row = divmod(rest, high)
        column = columns - 1 - column if band % 2 else column
        return band * width + row, column
    band = lax.div(index, jnp.int32(whole))
    rest = index - band * whole
    high = jnp.minimum(width, rows - band * width)
    column = lax.div(rest, high)
    row = rest - column * high
    column = jnp.where(lax.rem(band, jnp.int32(2)) == 1, columns - 1 - column, column)
    return band * width + row, column


def part_of_tile(valid: Any, piece: int, rows: int) -> tuple[Any, Any, Any]:
    """Returns the place of one of the pieces that fill a tile of some valid rows.

    A tile has ``rows`` rows, a power of two, with ``0 < valid < rows`` of them valid.
    It consists of one piece for each power of two below ``rows``, and of one more row
    at index ``valid``. Pieces in the binary digits of ``valid`` hold valid rows; the
    others hold rows to be zero. So the number of pieces does not depend on ``valid``.

    Args:
        valid: The number of valid rows.
        piece: The piece's rows, a power of two below ``rows``.
        rows: Rows of the tile.

    Returns:
        Whether the piece is valid, its start if so, and its start if not.

    Example:
        >>> part_of_tile(5, 4, 8), part_of_tile(5, 2, 8), part_of_tile(5, 1, 8)
        ((True, 0, 4), (False, 4, 6), (True, 4, 5))
    """
    spare = rows - 1 - valid
    above = ~(2 * piece - 1)
    return (valid & piece) != 0, valid & above, rows - piece - (spare & above)


def over_tiles(
    total: int,
    read: Callable[[Any], tuple[Any, ...]],
    run: Callable[[Any, Any, tuple[Any, ...]], Any],
    shared: Mapping[str, Any],
    counter: Any,
    copies: bool,
) -> None:
    """Runs ``steps = run(i, steps, numbers)`` for the tiles that a block takes.

    Args:
        total: The number of tiles.
        read: Returns the numbers of a tile by its index, which may be past the end.
        run: Copies or computes a tile, the block's i-th. `steps` counts the steps of
            all tiles before.
        shared: Holds `work_stealing.scratch` if tiles are claimed.
        counter: Counts the tiles that are claimed.
        copies: Whether this is the warpgroup that claims tiles for all.
    """
    program = lax.axis_index(pallas_gpu.PROGRAM)
    programs = lax.axis_size(pallas_gpu.PROGRAM)
    if work_stealing.TAKEN in shared:
        queue = work_stealing.Claims(shared, counter, programs, total, read)
        of = lambda i, steps, _, numbers: run(i, steps, numbers)
        queue.over(of, jnp.int32(0), copies)
        return

    def one(i: Any, carry: Any) -> Any:
        steps, numbers = carry
        after = read((i + 1) * programs + program)  # while this one is computed
        return run(i, steps, numbers), after

    turns = lax.div(total - program + programs - 1, jnp.int32(programs))
    lax.fori_loop(0, turns, one, (jnp.int32(0), read(program)))
