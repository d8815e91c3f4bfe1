"""Attention: values that are used beside it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tests.spellings.attention.pieces import (
    CAUSAL,
    PLAIN,
    QKV,
    SCALE,
    SQUARE,
    attend,
    dots,
    masked,
    spelling,
    weigh,
)


def escaping(name, **more):
    return spelling(
        f"escape/{name}",
        inputs=QKV,
        **{
            **PLAIN,
            "read": lambda o: o[0],
            "window": CAUSAL,
            "sizes": SQUARE,
            **more,
        },
    )


@escaping("probabilities")
def _(q, k, v):
    p = jax.nn.softmax(masked(dots(q, k) * SCALE))
    return weigh(p, v), p


@escaping("log_sum_exp")
def _(q, k, v):
    s = masked(dots(q, k) * SCALE)
    return attend(s, v), jax.nn.logsumexp(s, axis=-1)


@escaping("keys_and_values")
def _(q, k, v):
    return attend(masked(dots(q, k) * SCALE), v), k, v


@escaping("scores_used_elsewhere")
def _(q, k, v):
    s = dots(q, k) * SCALE
    return attend(masked(s), v), jnp.mean(s * s)


@escaping("statistics")
def _(q, k, v):
    s = masked(dots(q, k) * SCALE)
    m = s.max(-1)
    e = jnp.exp(s - m[..., None])
    total = e.sum(-1)
    return weigh(e / total[..., None], v), m, total


@escaping("used_twice", read=lambda o: o)
def _(q, k, v):
    out = attend(masked(dots(q, k) * SCALE), v)
    return 0.5 * out + out * 0.5
