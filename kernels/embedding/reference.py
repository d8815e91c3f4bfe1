"""Rows of a table that ids name, taken from it or added to it, in plain JAX."""

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
    across: int = 0,
) -> jax.Array:
    """Returns a table of zeros, or the one given, with each row added to one of its.

    Args:
        size: The number of rows of the table.
        outside: What becomes of a row whose id is outside of the table: ``"drop"``, or
            ``"clip"`` for the nearest row of the table. ``"promise"`` says that there
            is none. XLA drops such a row, and its gradient is that of the nearest.
        start: Without ids: the first one.
        period: Without ids: row i has the id ``start + i % period``.
        across: If not 0, ids are those of distances: row ``i * across + j`` has one
            that depends on ``j - i`` alone.

    Returns:
        [..., size, d], in the rows' dtype.
    """
    del across
    *lead, m, d = rows.shape
    if ids is None:
        ids = jnp.broadcast_to(counted(m, start, period), (*lead, m))
    if table is None:
        table = jnp.zeros((*lead, size, d), rows.dtype)
    return scattered(table, ids, rows, outside)


def looked_up(
    *,
    table: jax.Array,
    ids: jax.Array | None = None,
    outside: str = "nan",
    start: int = 0,
    period: int = 0,
    count: int = 0,
) -> jax.Array:
    """Returns the rows of a table that ids name.

    Args:
        outside: What an id gives that is outside of the table: ``"nan"``, ``"zero"``,
            or ``"clip"`` for the nearest row. ``"promise"`` says that there is none.
        start: Without ids: the first one.
        period: Without ids: row i has the id ``start + i % period``.
        count: Without ids: how many there are.

    Returns:
        [..., m, d], in the table's dtype.
    """
    lead = table.shape[:-2]
    if ids is None:
        ids = jnp.broadcast_to(counted(count, start, period), (*lead, count))
    n = len(lead)
    batch = tuple(range(n))
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(n + 1,),
        collapsed_slice_dims=(n,),
        start_index_map=(n,),
        operand_batching_dims=batch,
        start_indices_batching_dims=batch,
    )
    mode, fill = TAKEN[outside]
    sizes = (*([1] * (n + 1)), table.shape[-1])
    return lax.gather(table, ids[..., None], numbers, sizes, mode=mode, fill_value=fill)


TAKEN = {
    "nan": ("fill", None), "zero": ("fill", 0), "clip": ("clip", None),
    "promise": ("promise_in_bounds", None),
}  # fmt: skip
"""The mode of a gather, and what it gives for ids outside."""


def counted(m: int, start: int, period: int) -> jax.Array:
    """Returns the ids of m rows, ``start + i % period``."""
    position = lax.broadcasted_iota(jnp.int32, (m // period, period), 1)
    return (position + jnp.int32(start)).reshape(m)


def scattered(
    table: jax.Array, ids: jax.Array, rows: jax.Array, outside: str
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
    mode = ADDED.get(outside, outside)
    return lax.scatter_add(table, ids[..., None], rows, numbers, mode=mode)


ADDED = {"promise": "promise_in_bounds"}
"""The mode of a scatter, where it is called otherwise."""


def sample(
    key: jax.Array, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Returns normal rows, and ids of which some are far more frequent than others."""
    made = {}
    for name, sub in zip(operands, jax.random.split(key, len(operands)), strict=True):
        x = operands[name]
        if name == "ids":
            size = params["size"] if "size" in params else operands["table"].shape[-2]
            drawn = jax.random.uniform(sub, x.shape) ** 4 * size
            made[name] = drawn.astype(x.dtype)
        else:
            made[name] = jax.random.normal(sub, x.shape).astype(x.dtype)
    return made
