"""Queries that see no key on any device: their results and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from rewriter.kernels.attention.empty_rows import NAN, ZERO

if TYPE_CHECKING:
    from jax import Array


def may_be_empty(names: Iterable[str], params: Mapping[str, Any]) -> bool:
    """Returns whether some query may see no key, not even the one at its own position.

    Args:
        names: The operands present.
        params: The op's parameters; with a window there are as many keys as queries.
    """
    left, right = params["window"]
    at = -params["shift"]
    hidden = (left is not None and at < -left) or (right is not None and at > right)
    return hidden or bool({"kv_lengths", "kv_segments"} & {*names})


def filled(
    out: Array, lse: Array, v: Array, params: Mapping[str, Any], axes: tuple[str, ...]
) -> Array:
    """Returns the result [b, t, n, e] with the op's values in rows without keys.

    Args:
        out: [b, t, n, e], 0 in those rows.
        lse: [b, n, t], -inf in those rows.
        v: [b, s, k, e], this device's part; the means of all devices are averaged.
        params: The op's parameters.
        axes: The mesh axes over which keys are split.
    """
    if params["empty_rows"] in ZERO:
        return out
    empty = (lse == -jnp.inf).swapaxes(1, 2)[..., None]
    if params["empty_rows"] in NAN:
        return jnp.where(empty, jnp.nan, out)
    mean = lax.pmean(v.astype(out.dtype).mean(1, keepdims=True), axes)
    return jnp.where(empty, jnp.repeat(mean, out.shape[2] // v.shape[2], 2), out)


def given_back(
    dv: Array,
    lse: Array,
    cotangent: Array,
    params: Mapping[str, Any],
    axes: tuple[str, ...],
    count: int,
) -> Array:
    """Returns the cotangent of v [b, s, k, e] with the share of rows without keys.

    Args:
        dv: The cotangent from the other rows.
        lse: [b, n, t], -inf in rows without keys.
        cotangent: [b, t, n, e].
        params: The op's parameters.
        axes: The mesh axes over which keys are split.
        count: The number of devices.
    """
    if params["empty_rows"] in ZERO:
        return dv
    b, s, heads, e = dv.shape
    empty = (lse == -jnp.inf).swapaxes(1, 2)[..., None]
    up = jnp.where(empty, cotangent.astype(lse.dtype), 0)
    if params["empty_rows"] in NAN:
        up = jnp.where(empty, jnp.nan, up)
    share = up.sum(1).reshape(b, 1, heads, -1, e).sum(3) / (count * s)
    return (dv.astype(lse.dtype) + lax.psum(share, axes)).astype(dv.dtype)
