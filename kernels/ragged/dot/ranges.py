"""Computes each group's range of rows from group sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import Array


def bounds(group_sizes: Array, m: int) -> tuple[Array, Array]:
    """Returns each group's first row and the row after its last: int32 [g] each.

    Rows past m do not count, nor do negative sizes.
    """
    sizes = jnp.clip(group_sizes.astype(jnp.int32), 0, m)
    ends = upto(sizes[None])[0]
    return jnp.minimum(ends - sizes, m), jnp.minimum(ends, m)


def upto(x: Array) -> Array:
    """Returns cumulative sums of rows: one kernel, where `jnp.cumsum` takes several."""
    i = jnp.arange(x.shape[1])
    before = i[None, :] <= i[:, None]
    return jnp.sum(jnp.where(before, x[:, None, :], 0), 2, dtype=jnp.int32)
