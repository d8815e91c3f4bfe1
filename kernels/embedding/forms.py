"""A use of the op as sums of one set of rows, and the gradient of such sums."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax


def flattened(
    rows: jax.Array, ids: jax.Array, size: int, outside: str
) -> tuple[jax.Array, jax.Array, int]:
    """Returns rows [m, d], ids [m] in int32, and the rows of the table, as one.

    The tables of all leading axes are one table, of which each has a part. Ids that
    belong to no row are the size of that table.
    """
    *lead, m, d = rows.shape
    tables = math.prod(lead)
    ids = inside(ids, size, outside)
    total = tables * size
    if tables != 1:
        first = size * lax.iota(jnp.int32, tables).reshape(*lead, 1)
        ids = jnp.where(ids < size, ids + first, total)
    return rows.reshape(tables * m, d), ids.reshape(tables * m), total


def inside(ids: jax.Array, size: int, outside: str) -> jax.Array:
    """Returns ids in int32, of which those of no row are `size`."""
    if ids.dtype.itemsize < 4:
        ids = ids.astype(jnp.int32)
    unsigned = jnp.issubdtype(ids.dtype, jnp.unsignedinteger)
    if outside == "clip":
        ids = jnp.minimum(ids, size - 1)
        return (ids if unsigned else jnp.maximum(ids, 0)).astype(jnp.int32)
    within = ids < size
    if not unsigned:
        within &= ids >= 0
    return jnp.where(within, ids, size).astype(jnp.int32)


def backward(
    *,
    rows: jax.Array,
    ids: jax.Array | None = None,
    table: jax.Array | None = None,
    out: None = None,
    residuals: tuple[()] = (),
    cotangent: jax.Array,
    size: int,
    outside: str = "drop",
    start: int = 0,
    period: int = 0,
    across: int = 0,
) -> dict[str, jax.Array]:
    """Returns the cotangents: of each row, the one that its id names.

    An id that is outside against a promise names the nearest one, as XLA has it.
    Operands are those of the op, and parameters are as in `reference`.
    """
    del out, residuals, across
    *lead, m, d = rows.shape
    if ids is None:
        some = lax.slice_in_dim(cotangent, start, start + period, axis=-2)
        again = (*lead, m // period, period, d)
        own = jnp.broadcast_to(some[..., None, :, :], again).reshape(rows.shape)
    else:
        nearest = "clip" if outside == "promise" else outside
        _, flat, total = flattened(rows, ids, size, nearest)
        given = cotangent.reshape(total, d)
        own = given.at[flat].get(mode="fill", fill_value=0).reshape(rows.shape)
    grads = {"rows": own.astype(rows.dtype)}
    return grads if table is None else {**grads, "table": cotangent.astype(table.dtype)}
