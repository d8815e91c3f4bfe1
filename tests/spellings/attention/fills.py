"""Attention: what masks fill in, and rows without a key."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.spellings.attention.masks import FLOATS, INF, PADDING
from tests.spellings.attention.pieces import (
    CAUSAL,
    QKV,
    SCALE,
    S,
    T,
    attend,
    causal,
    dots,
    masked,
    spelling,
    weigh,
)
from tests.spellings.attention.softmax import guard
from tests.spellings.spelling import booleans


def filled(name, dims, masked_rows, mask_scores, dtype=np.bool_, **more):
    """Attention with a mask argument of letters `dims`."""
    to_mask = more.pop("to_mask", None)

    def bind(q, k, v, m):
        m = (m > 0) if to_mask is None else to_mask(m)
        return dict(q=q, k=k, v=v, mask=m.reshape([1] * (4 - m.ndim) + [*m.shape]))

    @spelling(
        f"fill/{name}",
        inputs=dict(**QKV, mask=booleans(dims, dtype=dtype)),
        out="btne",
        operands=more.pop("operands", "q k v mask"),
        scale=SCALE,
        masked_rows=masked_rows,
        bind=more.pop("bind", bind),
        **more,
    )
    def fn(q, k, v, mask):
        return attend(mask_scores(dots(q, k) * SCALE, mask), v)


filled("infinity", "b1ts", "nan", lambda s, m: jnp.where(m, s, INF))
filled("lowest", "b1ts", "mean", lambda s, m: jnp.where(m, s, jnp.finfo(s.dtype).min))
filled(
    "lowest_of_bfloat16",
    "b1ts",
    "mean",
    lambda s, m: jnp.where(m, s, float(jnp.finfo(jnp.bfloat16).min)),
)
filled(
    "point_seven_of_max",
    "b1ts",
    "mean",
    lambda s, m: jnp.where(m, s, -0.7 * float(np.finfo(np.float32).max)),
)
filled(
    "half_of_max",
    "b1ts",
    "mean",
    lambda s, m: jnp.where(m, s, -0.5 * float(np.finfo(np.float32).max)),
)
filled("minus_1e30", "b1ts", "mean", lambda s, m: jnp.where(m, s, -1e30))
filled("minus_1e10", "b1ts", "mean", lambda s, m: jnp.where(m, s, -1e10))
filled("minus_1e9", "b1ts", "mean", lambda s, m: jnp.where(m, s, -1e9))
filled("minus_1e4", "b1ts", "mean", lambda s, m: jnp.where(m, s, -1e4))
filled(
    "other_arm", "b1ts", "mean", lambda s, m: jnp.where(jnp.logical_not(m), -1e30, s)
)
filled(
    "select_n",
    "bnts",
    "mean",
    lambda s, m: lax.select(m, s, jnp.full(s.shape, -1e30, s.dtype)),
)
filled(
    "additive_1e9",
    "b1ts",
    "mean",
    lambda s, m: s + jnp.where(m, 0.0, -1e9),
    also=PADDING,
)
filled(
    "additive_1e30",
    "b1ts",
    "mean",
    lambda s, m: s + jnp.where(m, 0.0, -1e30),
    also=PADDING,
)
filled(
    "additive_infinity",
    "b1ts",
    "nan",
    lambda s, m: s + jnp.where(m, 0.0, INF),
    also=PADDING,
)
filled(
    "additive_log",
    "b1ts",
    "nan",
    lambda s, m: s + jnp.log(m.astype(s.dtype)),
    also=PADDING,
)
filled(
    "additive_one_minus",
    "b1ts",
    "mean",
    lambda s, m: s + (1.0 - m) * -1e9,
    np.float32,
    also=FLOATS,
)
filled(
    "additive_moderate",
    "b1ts",
    None,
    lambda s, m: s + (1.0 - m) * -1e4,
    np.float32,
    operands="q k v bias",
    also=[dict(operands="q k v mask", scale=SCALE)],
    bind=lambda q, k, v, m: dict(q=q, k=k, v=v, bias=(1.0 - m) * -1e4),
)
filled("bool_2d", "ts", "mean", lambda s, m: jnp.where(m, s, -1e30))
filled(
    "bool_3d",
    "bts",
    "mean",
    lambda s, m: jnp.where(m[:, None], s, -1e30),
    to_mask=lambda m: m[:, None],
)
filled("bool_heads", "bnts", "mean", lambda s, m: jnp.where(m, s, -1e30))
filled("bool_heads_only", "nts", "mean", lambda s, m: jnp.where(m, s, -1e30))
filled(
    "float_nonzero",
    "b1ts",
    "mean",
    lambda s, m: jnp.where(m != 0, s, -1e30),
    np.float32,
)
filled(
    "float_to_bool",
    "b1ts",
    "mean",
    lambda s, m: jnp.where(m.astype(bool), s, -1e30),
    np.float32,
)
filled(
    "int_equal_zero", "b1ts", "mean", lambda s, m: jnp.where(m == 0, -1e30, s), np.int32
)
filled(
    "int_greater_zero",
    "b1ts",
    "mean",
    lambda s, m: jnp.where(m > 0, s, -1e30),
    np.int32,
)
filled(
    "with_causal",
    "b1ts",
    "mean",
    lambda s, m: jnp.where(causal(T, S) & m, s, -1e30),
    window=CAUSAL,
)
filled(
    "with_causal_two_fills",
    "b1ts",
    "mean",
    lambda s, m: jnp.where(m, masked(s, causal(T, S), -1e30), -1e30),
    window=CAUSAL,
)


@guard("where", "zero")
def _(q, k, v, mask):
    return weigh(jax.nn.softmax(dots(q, k) * SCALE, where=mask), v)


@guard("where_with_fill", "zero")
def _(q, k, v, mask):
    s = jnp.where(mask, dots(q, k) * SCALE, -1e30)
    return weigh(jax.nn.softmax(s, axis=-1, where=mask), v)


@guard("multiplied_after_exp", "nan")
def _(q, k, v, mask):
    e = jnp.exp(dots(q, k) * SCALE) * mask
    return weigh(e / e.sum(-1, keepdims=True), v)


@guard("selected_after_exp", "nan", assume=("finite",))
def _(q, k, v, mask):
    s = dots(q, k) * SCALE
    e = jnp.where(mask, jnp.exp(s - s.max(-1, keepdims=True)), 0.0)
    return weigh(e / jnp.sum(e, -1, keepdims=True), v)


@guard("renormalised_after_mask", "nan", assume=("finite",))
def _(q, k, v, mask):
    p = jax.nn.softmax(dots(q, k) * SCALE, axis=-1) * mask
    return weigh(p / p.sum(-1, keepdims=True), v)
