"""Small programs with known sites, for the tests of the engine."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

FORCED = {"attention": "memory_bounded", "rms_norm": "memory_bounded"}
"""For ``implementation=``: programs this small would be left to XLA."""


def attention(q, k, v):
    """Causal attention over [b, t, n, h]."""
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    keep = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(keep, scores, -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def rms_norm(x, scale):
    """RMSNorm over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def block(params, x):
    """Norm, one projection to q, k and v, attention, residual: two sites."""
    y = rms_norm(x, params["scale"])
    q, k, v = jnp.split(y @ params["qkv"], 3, -1)
    heads = [a.reshape(*a.shape[:2], 2, -1) for a in (q, k, v)]
    return x + attention(*heads).reshape(x.shape)


def inputs(tokens=16, width=8, dtype=jnp.float32):
    """Returns parameters and x [2, tokens, width] for `block`."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "scale": 1 + 0.1 * jax.random.normal(keys[0], (width,), dtype),
        "qkv": jax.random.normal(keys[1], (width, 3 * width), dtype) / width**0.5,
    }
    return params, jax.random.normal(keys[2], (2, tokens, width), dtype)
