"""What is no ragged dot, or only with care."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.spellings.look_alikes.pieces import CAREFUL, REFUSED, _add
from tests.spellings.spelling import given

IDS = given("g", lambda d: np.array([7, 5, 9, 3], np.int32))
RAGGED = dict(lhs="mk", rhs="gkn", group_sizes=IDS)
ragged = _add(REFUSED, "ragged_dot", RAGGED, {})
careful_ragged = _add(CAREFUL, "ragged_dot", RAGGED, {})


@ragged("dense_all_experts", "all experts for all rows, then a mask")
def _(lhs, rhs, n):
    y = jnp.einsum("mk,gkn->gmn", lhs, rhs)
    ends = jnp.cumsum(n)
    row = jnp.arange(24)
    keep = (row < ends[:, None]) & (row >= (ends - n)[:, None])
    return jnp.einsum("gmn,gm->mn", y, keep.astype(y.dtype))


@ragged("capacity_drop", "rows past the capacity of an expert are dropped")
def _(lhs, rhs, n):
    ends = jnp.cumsum(n)
    row = jnp.arange(24)
    start = (ends - n)[:, None]
    keep = (row < jnp.minimum(ends[:, None], start + 5)) & (row >= start)
    y = jnp.einsum("mk,gkn->gmn", lhs, rhs)
    return jnp.where(keep[..., None], y, 0).sum(0)


@ragged("batched_product", "each group has as many rows")
def _(lhs, rhs, n):
    return jnp.einsum("gmk,gkn->gmn", lhs.reshape(4, 6, 8), rhs).reshape(24, 10)


@careful_ragged(
    "two_size_vectors",
    "gate and up have other group sizes",
    dict(m=given("g", lambda d: np.array([1, 9, 9, 5], np.int32))),
)
def _(lhs, rhs, n, m):
    gate = lax.ragged_dot(lhs, rhs, n)
    return jax.nn.silu(gate) * lax.ragged_dot(lhs, rhs, m)


@careful_ragged("groups_reversed", "the experts are reversed")
def _(lhs, rhs, n):
    return lax.ragged_dot(lhs, rhs[::-1], n)


@careful_ragged(
    "sizes_too_large",
    "sizes add up to more than the rows",
    lhs="mk",
    rhs="gkn",
    n=given("g", lambda d: np.array([20, 20, 9, 5], np.int32)),
)
def _(lhs, rhs, n):
    return lax.ragged_dot(lhs, rhs, n)


@careful_ragged(
    "square",
    "K = N: which axis is contracted shows in use only",
    lhs="mk",
    rhs="gkk",
    n=IDS,
)
def _(lhs, rhs, n):
    return lax.ragged_dot(lhs, rhs, n) + lax.ragged_dot(lhs, rhs.swapaxes(1, 2), n)
