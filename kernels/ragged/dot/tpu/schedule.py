"""Lists steps from group sizes: which tile of rows meets which group, in which order.

Tiles lie on a fixed grid. A tile that several groups share is visited once for each, in
consecutive visits, so that it stays in VMEM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from rewriter.kernels.ragged.dot.ranges import bounds, upto

if TYPE_CHECKING:
    from jax import Array

GROUP, TILE, LOW, HIGH, FIRST, LAST, READ = range(7)
"""The fields of a step, an int32 each.

- GROUP: the group whose matrix is used.
- TILE: the tile of rows.
- LOW, HIGH: its rows in the group, from LOW to before HIGH; none if HIGH is 0.
- FIRST: whether the block of the result is new.
- LAST: whether it is complete after this step.
- READ: the tile that lhs is read from.
"""

FIELDS = 7


def most_steps(m: int, groups: int, rows: int) -> int:
    """Returns the most steps of m rows in some groups.

    Example:
        >>> most_steps(1000, 4, 256)
        7
    """
    return -(-m // rows) + groups - 1


def of_rows(group_sizes: Array, m: int, rows: int) -> tuple[Array, Array]:
    """Returns the steps that visit every tile of rows at least once, in order.

    Tiles without rows of any group come last. Their steps name the matrix and the rows
    of the last step before them, which are in VMEM already.

    Args:
        group_sizes: int [g].
        m: How many rows there are.
        rows: Rows of a tile.

    Returns:
        int32 [FIELDS * most_steps], field by field, and the number of steps.
    """
    starts, ends = bounds(group_sizes, m)
    used = -(-ends[-1] // rows)
    first = starts // rows
    own = jnp.where(ends > starts, (ends - 1) // rows - first + 1, 0)
    rest = -(-m // rows) - used
    table, count = _steps(
        jnp.append(first, used), jnp.append(own, rest), jnp.append(starts, 0),
        jnp.append(ends, 0), most_steps(m, len(starts), rows), rows,
    )  # fmt: skip
    groups = len(starts)
    last = jnp.max(jnp.where(own > 0, jnp.arange(groups), 0))
    table[GROUP] = jnp.where(table[GROUP] == groups, last, table[GROUP])
    table[READ] = jnp.minimum(table[TILE], jnp.maximum(used - 1, 0))
    table[FIRST], table[LAST] = _changes(table[TILE], count)
    return _flat(table), count


def of_groups(group_sizes: Array, m: int, rows: int) -> tuple[Array, Array]:
    """Returns the steps that visit every group at least once, in order.

    Args:
        group_sizes: int [g].
        m: How many rows there are.
        rows: Rows of a tile.

    Returns:
        int32 [FIELDS * most_steps], field by field, and the number of steps.
    """
    starts, ends = bounds(group_sizes, m)
    first = jnp.minimum(starts // rows, (m - 1) // rows)
    own = jnp.where(ends > starts, (ends - 1) // rows - first + 1, 1)
    some = ends > starts
    starts, ends = jnp.where(some, starts, 0), jnp.where(some, ends, 0)
    most = most_steps(m, len(starts), rows)
    table, count = _steps(first, own, starts, ends, most, rows)
    table[READ] = table[TILE]
    table[FIRST], table[LAST] = _changes(table[GROUP], count)
    return _flat(table), count


def _steps(
    first: Array, own: Array, starts: Array, ends: Array, most: int, rows: int
) -> tuple[dict[int, Array], Array]:
    """Lays out `own` steps for each group, from tile `first` on."""
    after = upto(own[None])[0]
    step = jnp.arange(most, dtype=jnp.int32)
    at = step[:, None]
    mine = (at >= after - own) & (at < after)

    def of_group(x: Array) -> Array:
        return jnp.sum(jnp.where(mine, x, 0), 1, dtype=jnp.int32)

    tile = of_group(first - after + own + at)
    low, high = (jnp.clip(of_group(x) - tile * rows, 0, rows) for x in (starts, ends))
    group = of_group(jnp.arange(len(first), dtype=jnp.int32))
    return {GROUP: group, TILE: tile, LOW: low, HIGH: high}, after[-1]


def _changes(x: Array, count: Array) -> tuple[Array, Array]:
    """Whether each step's number differs from the one before, and the one after."""
    other = x[1:] != x[:-1]
    step = jnp.arange(len(x))
    first = jnp.concatenate([jnp.ones_like(other[:1]), other]) if len(x) > 1 else True
    last = jnp.concatenate([other, jnp.ones_like(other[:1])]) if len(x) > 1 else True
    return jnp.broadcast_to(first, x.shape), last | (step == count - 1)


def _flat(table: dict[int, Array]) -> Array:
    return jnp.concatenate([table[f].astype(jnp.int32) for f in range(FIELDS)])
