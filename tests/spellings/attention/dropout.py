"""Attention: dropout of probabilities."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import jax
import jax.numpy as jnp

from tests.spellings.attention.pieces import (
    CAUSAL,
    PLAIN,
    QKV,
    SCALE,
    SQUARE,
    B,
    N,
    T,
    dots,
    masked,
    spelling,
    weigh,
)
from tests.spellings.spelling import booleans, key, positive

DROPPED = "q k v dropout"


def dropped(name, bind, inputs=None, **more):
    return spelling(
        f"dropout/{name}",
        inputs={**QKV, **(dict(key=key()) if inputs is None else inputs)},
        bind=bind,
        out="btne",
        **{
            "operands": DROPPED,
            "scale": SCALE,
            "window": CAUSAL,
            "sizes": SQUARE,
            "count": None,
            **more,
        },
    )


def coin(bits, shape=(B, N, T, T)):
    return jax.random.bernoulli(bits, 0.9, shape)


def kept(q, k, v, bits):
    return dict(q=q, k=k, v=v, dropout=coin(bits) / 0.9)


@dropped("by_select", kept)
def _(q, k, v, bits):
    p = jax.nn.softmax(masked(dots(q, k) * SCALE))
    return weigh(jnp.where(coin(bits), p / 0.9, 0.0), v)


@dropped("by_multiply", kept)
def _(q, k, v, bits):
    p = jax.nn.softmax(masked(dots(q, k) * SCALE))
    return weigh(p * (coin(bits).astype(p.dtype) / 0.9), v)


@dropped("before_normalisation", kept)
def _(q, k, v, bits):
    s = masked(dots(q, k) * SCALE)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return weigh(jnp.where(coin(bits), e, 0) / (0.9 * e.sum(-1, keepdims=True)), v)


@dropped(
    "broadcast_over_heads",
    lambda q, k, v, x: dict(q=q, k=k, v=v, dropout=coin(x, (1, 1, T, T)) / 0.9),
)
def _(q, k, v, bits):
    p = jax.nn.softmax(masked(dots(q, k) * SCALE))
    return weigh(p * jnp.broadcast_to(coin(bits, (1, 1, T, T)), p.shape) / 0.9, v)


@dropped(
    "given_mask",
    lambda q, k, v, m: dict(q=q, k=k, v=v, dropout=m * (1 / 0.9)),
    dict(keep=booleans("bnts")),
    count=1,
)
def _(q, k, v, keep):
    p = jax.nn.softmax(masked(dots(q, k) * SCALE))
    return weigh(p * (keep * (1 / 0.9)), v)


@dropped(
    "head_mask",
    lambda q, k, v, m: dict(q=q, k=k, v=v, dropout=m[None, :, None, None]),
    dict(head_mask=positive("n")),
    also=[dict(**PLAIN, window=CAUSAL)],
)
def _(q, k, v, head_mask):
    # BERT: a factor per head after the softmax.
    p = jax.nn.softmax(masked(dots(q, k) * SCALE))
    return weigh(jnp.einsum("bnts,n->bnts", p, head_mask), v)


@dropped(
    "rate_zero", lambda q, k, v: dict(q=q, k=k, v=v), {}, operands="q k v", count=1
)
def _(q, k, v):
    p = jax.nn.softmax(masked(dots(q, k) * SCALE))
    return weigh(jnp.where(jnp.ones(p.shape, bool), p / 1.0, 0.0), v)
