"""Rows added to the rows of a table that ids name, in plain JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def reference(
    *,
    rows: jax.Array,
    ids: jax.Array | None = None,
    table: jax.Array | None = None,
    size: int,
    outside: str = "drop",
    start: int = 0,
    period: int = 0,
) -> jax.Array:
    """Returns a table of zeros, or the one given, with each row added to one of its.

    Args:
        size: The number of rows of the table.
        outside: What becomes of a row whose id is outside of the table: ``"drop"``, or
            ``"clip"`` for the nearest row of the table.
        start: Without ids: the first one.
        period: Without ids: row i has the id ``start + i % period``.

    Returns:
        [..., size, d], in the rows' dtype.
    """
    *lead, m, d = rows.shape
    if ids is None:
        ids = jnp.broadcast_to(counted(m, start, period), (*lead, m))
    if table is None:
        table = jnp.zeros((*lead, size, d), rows.dtype)
    return scattered(table, ids, rows, outside)


def counted(m: int, start: int, period: int) -> jax.Array:
    """Returns the ids of m rows, ``start + i % period``."""
    position = lax.broadcasted_iota(jnp.int32, (m // period, period), 1)
    return (position + jnp.int32(start)).reshape(m)


def scattered(
    table: jax.Array, ids: jax.Array, rows: jax.Array, outside: str, **more: Any
) -> jax.Array:
    """Returns the scatter-add of rows [..., m, d] into a table [..., v, d]."""
    n = rows.ndim - 2
    batch = tuple(range(n))
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(n + 1,),
        inserted_window_dims=(n,),
        scatter_dims_to_operand_dims=(n,),
        operand_batching_dims=batch,
        scatter_indices_batching_dims=batch,
    )
    mode = {"drop": "drop", "clip": "clip"}[outside]
    return lax.scatter_add(table, ids[..., None], rows, numbers, mode=mode, **more)


def sample(
    key: jax.Array, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Returns normal rows, and ids of which some are far more frequent than others."""
    made = {}
    for name, sub in zip(operands, jax.random.split(key, len(operands)), strict=True):
        x = operands[name]
        if name == "ids":
            drawn = jax.random.uniform(sub, x.shape) ** 4 * params["size"]
            made[name] = drawn.astype(x.dtype)
        else:
            made[name] = jax.random.normal(sub, x.shape).astype(x.dtype)
    return made
