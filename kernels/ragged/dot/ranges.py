"""Computes each group's range of rows from group sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from jax import Array


def bounds(group_sizes: Array, m: int) -> tuple[Array, Array]:
    """Returns each group's first row and the row after its last: int32 [g] each.

    Rows past m do not count, nor do negative sizes.
    """
    sizes = jnp.clip(group_sizes.astype(jnp.int32), 0, m)
    ends = upto(sizes[None])[0]
    return jnp.minimum(ends - sizes, m), jnp.minimum(ends, m)


def as_ragged_dot_has(group_sizes: Array, m: int) -> tuple[Array, Array]:
    """Returns the same ranges as `jax.lax.ragged_dot` has them for any sizes.

    It adds sizes up in their own dtype, and a negative size moves the next group back.
    Ranges may overlap then: a row of two groups has the sum of both products.
    """
    ends = lax.cumsum(group_sizes)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    least, most = jnp.zeros((), ends.dtype), jnp.asarray(m, ends.dtype)
    inside = [lax.clamp(least, x, most).astype(jnp.int32) for x in (starts, ends)]
    return inside[0], inside[1]


def upto(x: Array) -> Array:
    """Returns cumulative sums of rows: one kernel, where `jnp.cumsum` takes several."""
    i = jnp.arange(x.shape[1])
    before = i[None, :] <= i[:, None]
    return jnp.sum(jnp.where(before, x[:, None, :], 0), 2, dtype=jnp.int32)
