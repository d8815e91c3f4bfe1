"""Ways to add up rows by their ids: rows [m, d], ids [m] and a size v give sums [v, d].

Ids outside of 0 ... v - 1 belong to no sum, and their rows are dropped. Sums have the
rows' dtype, and are added up in float32 where that is wider. No way multiplies a row
by zero, but for `by_product` and `by_tiles`: an infinity or a NaN stays in its own sum.

On a GPU, XLA adds 16-bit rows with a loop of compare-and-swap for each number, which
takes as many rounds as rows collide. It adds numbers of 32 bits with one instruction.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


def as_written(rows: jax.Array, ids: jax.Array, v: int) -> jax.Array:
    """Adds in the rows' own dtype, as JAX's gradient of a lookup does."""
    return _added(jnp.zeros((v, rows.shape[-1]), rows.dtype), rows, ids)


def in_float32(rows: jax.Array, ids: jax.Array, v: int) -> jax.Array:
    """Adds to a table of float32, and rounds that."""
    sums = jnp.zeros((v, rows.shape[-1]), _wide(rows))
    return _added(sums, rows.astype(sums.dtype), ids).astype(rows.dtype)


def by_owner(rows: jax.Array, ids: jax.Array, v: int) -> jax.Array:
    """Adds to as many rows of float32 as are given, where a table has more.

    The last row of each id owns it: the others are added to the owner's sum.
    """
    m, d = rows.shape
    owner, slot = _owners(ids, v)
    sums = _added(jnp.zeros((m, d), _wide(rows)), rows.astype(_wide(rows)), slot)
    sums = sums.astype(rows.dtype)
    taken = sums.at[owner].get(mode="clip")
    return jnp.where((owner >= 0)[:, None], taken, jnp.zeros_like(taken))


def into(table: jax.Array, rows: jax.Array, ids: jax.Array) -> jax.Array:
    """Adds rows to those of a table [v, d], and rounds once."""
    v, d = table.shape
    m, wide = len(rows), _wide(rows)
    _, slot = _owners(ids, v)
    sums = _added(jnp.zeros((m, d), wide), rows.astype(wide), slot)
    mine = slot == lax.iota(jnp.int32, m)
    sums = sums + table.at[ids].get(mode="clip").astype(wide)
    place = jnp.where(mine, ids, v)
    return table.at[place].set(
        sums.astype(table.dtype), mode="drop", unique_indices=True
    )


def _owners(ids: jax.Array, v: int) -> tuple[jax.Array, jax.Array]:
    """The last row of each id, -1 for none; and of each row, that of its id."""
    m = len(ids)
    number = lax.iota(jnp.int32, m)
    owner = jnp.full(v, -1, jnp.int32).at[ids].max(number, mode="drop")
    within = (ids >= 0) & (ids < v)
    return owner, jnp.where(within, owner.at[ids].get(mode="clip"), m)


def in_parts(
    rows: jax.Array, ids: jax.Array, v: int, parts: int | None = None
) -> jax.Array:
    """Adds each of several parts of the rows to a table of its own, then the tables."""
    m, d = rows.shape
    parts = parts or parts_of(m, v)
    if parts == 1:
        return in_float32(rows, ids, v)
    part = lax.rem(lax.iota(jnp.int32, m), jnp.int32(parts))
    inside = (ids >= 0) & (ids < v)
    slot = jnp.where(inside, ids + part * v, parts * v)
    sums = jnp.zeros((parts * v, d), _wide(rows))
    sums = _added(sums, rows.astype(sums.dtype), slot)
    return sums.reshape(parts, v, d).sum(0).astype(rows.dtype)


def parts_of(m: int, v: int) -> int:
    """Returns the parts of m rows: so many that about 256 of them collide.

    On an H100 it took 0.038 ms with 32 parts to add 16384 rows of 768 to a table of
    two, and 0.101 ms with one (``tests/bench/results/embedding_h100.json``).
    """
    return max(1, min(32, m // (256 * v)))


def by_mask(rows: jax.Array, ids: jax.Array, v: int) -> jax.Array:
    """Adds up all rows for each id, others masked: for very few ids."""
    hit = ids[:, None] == lax.iota(ids.dtype, v)
    wide = rows.astype(_wide(rows))[:, None]
    return jnp.where(hit[:, :, None], wide, 0).sum(0).astype(rows.dtype)


def by_masks(rows: jax.Array, ids: jax.Array, v: int) -> jax.Array:
    """The same, with a reduction of its own for each id."""
    wide = rows.astype(_wide(rows))
    sums = [jnp.where((ids == k)[:, None], wide, 0).sum(0) for k in range(v)]
    return jnp.stack(sums).astype(rows.dtype)


def by_product(
    rows: jax.Array, ids: jax.Array, v: int, chunk: int = 1 << 14
) -> jax.Array:
    """Multiplies by one-hot rows, a chunk of them at a time. Rows must be finite."""
    m, d = rows.shape
    chunk = min(chunk, m)
    rows, ids = _padded(rows, ids, v, chunk)
    classes = lax.iota(ids.dtype, v)

    def add(sums: jax.Array, part: tuple[jax.Array, jax.Array]):
        hot = (classes[:, None] == part[1]).astype(rows.dtype)
        return sums + _product(hot, part[0]), None

    first = jnp.zeros((v, d), _wide(rows))
    parts = rows.reshape(-1, chunk, d), ids.reshape(-1, chunk)
    if len(rows) == chunk:
        sums, _ = add(first, (rows, ids))
    else:
        sums, _ = lax.scan(add, first, parts)
    return sums.astype(rows.dtype)


def if_finite(rows: jax.Array, ids: jax.Array, v: int, way=by_product) -> jax.Array:
    """Takes a way that needs finite rows where they are, and else float32 sums."""
    finite = jnp.isfinite(rows).all()
    return lax.cond(finite, partial(way, v=v), partial(in_float32, v=v), rows, ids)


def sorted_as_written(rows: jax.Array, ids: jax.Array, v: int) -> jax.Array:
    """Sorts the rows first."""
    ids, order = _sorted(ids)
    sums = jnp.zeros((v, rows.shape[-1]), rows.dtype)
    return _added(sums, rows[order], ids, sorted_=True)


def sorted_in_float32(rows: jax.Array, ids: jax.Array, v: int) -> jax.Array:
    """Sorts the rows first, and adds to a table of float32."""
    ids, order = _sorted(ids)
    sums = jnp.zeros((v, rows.shape[-1]), _wide(rows))
    sums = _added(sums, rows[order].astype(sums.dtype), ids, sorted_=True)
    return sums.astype(rows.dtype)


def by_rank(rows: jax.Array, ids: jax.Array, v: int) -> jax.Array:
    """Sorts the rows, adds them to float32 sums of ids present, and places those."""
    m, d = rows.shape
    ids, order = _sorted(ids)
    starts = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
    rank = jnp.cumsum(starts.astype(jnp.int32)) - 1
    sums = jnp.zeros((m, d), _wide(rows))
    sums = _added(sums, rows[order].astype(sums.dtype), rank, sorted_=True)
    place = jnp.full(m, v, ids.dtype).at[rank].set(ids, indices_are_sorted=True)
    return _placed(sums.astype(rows.dtype), place, v)


def by_scan(rows: jax.Array, ids: jax.Array, v: int) -> jax.Array:
    """Sorts the rows, and adds up each run by a scan: in the same order always."""
    ids, order = _sorted(ids)
    starts = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
    wide = rows[order].astype(_wide(rows))

    def join(one, other):
        (a, new), (b, newer) = one, other
        return jnp.where(newer, b, a + b), new | newer

    sums, _ = lax.associative_scan(join, (wide, starts[:, None]))
    ends = jnp.concatenate([starts[1:], jnp.ones(1, bool)])
    return _placed(sums.astype(rows.dtype), jnp.where(ends, ids, v), v)


def by_tiles(rows: jax.Array, ids: jax.Array, v: int, tile: int = 128) -> jax.Array:
    """Sorts the rows, and adds up the runs of each tile by a product.

    Only runs that are in several tiles are then added to each other. Rows must be
    finite.
    """
    d = rows.shape[-1]
    ids, order = _sorted(ids)
    rows, ids = _padded(rows[order], ids, v, tile)
    tiles = ids.reshape(-1, tile)
    starts = jnp.concatenate(
        [jnp.ones_like(tiles[:, :1], bool), tiles[:, 1:] != tiles[:, :-1]], 1
    )
    run = jnp.cumsum(starts.astype(jnp.int32), 1) - 1
    hot = (run[:, None] == lax.iota(jnp.int32, tile)[:, None]).astype(rows.dtype)
    sums = _product(hot, rows.reshape(-1, tile, d))  # [tiles, run, d]
    of_run = jnp.where(starts, tiles, v)
    place = jnp.full_like(tiles, v)
    place = jax.vmap(lambda p, r, i: p.at[r].min(i))(place, run, of_run)
    table = jnp.zeros((v, d), sums.dtype)
    return _added(table, sums.reshape(-1, d), place.reshape(-1)).astype(rows.dtype)


def over_batch(rows: jax.Array, v: int) -> jax.Array:
    """Adds up rows [b, t, d] over the batch: those of ids 0 ... t - 1, t <= v."""
    sums = rows.astype(_wide(rows)).sum(0).astype(rows.dtype)
    return jnp.pad(sums, ((0, v - rows.shape[1]), (0, 0)))


def _added(
    table: jax.Array, rows: jax.Array, ids: jax.Array, sorted_: bool = False
) -> jax.Array:
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=(1,),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
    )
    return lax.scatter_add(
        table, ids[:, None], rows, dims, mode="drop", indices_are_sorted=sorted_
    )


def _placed(rows: jax.Array, ids: jax.Array, v: int) -> jax.Array:
    """A table of zeros with rows of different ids; an id of v is none."""
    table = jnp.zeros((v, rows.shape[-1]), rows.dtype)
    return table.at[ids].set(rows, mode="drop", unique_indices=True)


def _sorted(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    number = lax.iota(jnp.int32, len(ids))
    return lax.sort((ids, number), num_keys=1)


def _product(hot: jax.Array, rows: jax.Array) -> jax.Array:
    """One-hot rows [..., v, m] times rows [..., m, d]."""
    batch = tuple(range(hot.ndim - 2))
    n = hot.ndim
    dims = (((n - 1,), (n - 2,)), (batch, batch))
    exact = None if rows.dtype.itemsize == 2 else lax.Precision.HIGHEST
    return lax.dot_general(
        hot, rows, dims, precision=exact, preferred_element_type=_wide(rows)
    )


def _padded(
    rows: jax.Array, ids: jax.Array, v: int, to: int
) -> tuple[jax.Array, jax.Array]:
    more = -len(rows) % to
    rows = jnp.pad(rows, ((0, more), (0, 0)))
    return rows, jnp.pad(ids, (0, more), constant_values=v)


def _wide(rows: jax.Array) -> jnp.dtype:
    return jnp.promote_types(rows.dtype, jnp.float32)
