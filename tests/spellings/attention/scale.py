"""Attention: the ways to scale scores."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.spellings.attention.pieces import (
    QKV,
    SCALE,
    B,
    H,
    N,
    S,
    T,
    attend,
    dots,
    spelling,
    weigh,
)
from tests.spellings.spelling import floats, positive


def scaled(name, scale, make_scores, operands="q k v", also=(), count=1, **more):
    """Attention without a mask over the scores that `make_scores(q, k)` gives."""

    @spelling(
        f"scale/{name}",
        inputs=QKV,
        out="btne",
        operands=operands,
        scale=scale,
        also=also,
        count=count,
        **more,
    )
    def fn(q, k, v):
        return attend(make_scores(q, k), v)


scaled("multiply_scores", SCALE, lambda q, k: dots(q, k) * SCALE)
scaled("multiply_scores_left", SCALE, lambda q, k: SCALE * dots(q, k))
scaled("divide_scores", SCALE, lambda q, k: dots(q, k) / math.sqrt(H))
scaled("multiply_q", SCALE, lambda q, k: dots(q * SCALE, k))
scaled("divide_q", SCALE, lambda q, k: dots(q / np.sqrt(H), k))
scaled("multiply_k", SCALE, lambda q, k: dots(q, k * SCALE))
scaled("divide_k", SCALE, lambda q, k: dots(q, k / math.sqrt(H)))
scaled("fourth_root_on_both", SCALE, lambda q, k: dots(q * H**-0.25, k * H**-0.25))
scaled(
    "divide_both_by_fourth_root",
    SCALE,
    lambda q, k: dots(q / math.sqrt(math.sqrt(H)), k / math.sqrt(math.sqrt(H))),
)
scaled("none", 1.0, dots)
scaled("root_of_array", SCALE, lambda q, k: dots(q, k) / jnp.sqrt(H))
scaled(
    "root_of_array_cast", SCALE, lambda q, k: dots(q / jnp.sqrt(H).astype(q.dtype), k)
)
scaled(
    "root_of_float_array",
    SCALE,
    lambda q, k: dots(q, k) * (1.0 / jnp.sqrt(jnp.float32(H))),
)
scaled("inverse_root", SCALE, lambda q, k: dots(q, k) * lax.rsqrt(jnp.float32(H)))
scaled("power", SCALE, lambda q, k: dots(q, k) * jnp.float32(H) ** -0.5)
scaled("power_of_shape", SCALE, lambda q, k: dots(q, k) * q.shape[-1] ** -0.5)
scaled(
    "rounded_to_bfloat16",
    float(jnp.bfloat16(SCALE)),
    lambda q, k: dots(q, k) * jnp.asarray(SCALE, jnp.bfloat16).astype(q.dtype),
)
scaled("split_unevenly", SCALE, lambda q, k: dots(q * 2.0, k) * (SCALE / 2))
scaled("split_in_three", SCALE, lambda q, k: dots(q / 3.0, k * 1.5) * 2.0 * SCALE)
scaled("other_value", 0.3, lambda q, k: dots(q, k) * 0.3)
scaled("by_width_not_root", 1 / H, lambda q, k: dots(q / H, k))
scaled("negative", -0.5, lambda q, k: dots(q, k) * -0.5)
scaled("subtracted", -1.0, lambda q, k: 0.0 - dots(q, k))
scaled("zero", 0.0, lambda q, k: dots(q, k) * 0.0, count=None)
scaled(
    "undone",
    1.0,
    lambda q, k: dots(q * math.sqrt(H), k) / math.sqrt(H),
)
scaled(
    "after_reshape",
    SCALE,
    lambda q, k: (dots(q, k).reshape(B * N, T, S) * SCALE).reshape(B, N, T, S),
)
scaled(
    "after_cast",
    SCALE,
    lambda q, k: dots(q, k).astype(jnp.float32) * jnp.float32(SCALE),
)
scaled(
    "before_broadcast_array",
    SCALE,
    lambda q, k: dots(q, k) * jnp.full((1, N, 1, 1), SCALE, jnp.float32),
)


@spelling(
    "scale/exp2",
    inputs=QKV,
    out="btne",
    operands="q k v",
    scale=SCALE,
)
def _(q, k, v):
    s = dots(q, k) * (SCALE * math.log2(math.e))
    e = jnp.exp2(s - lax.stop_gradient(s.max(-1, keepdims=True)))
    return weigh(e / e.sum(-1, keepdims=True), v)


@spelling(
    "scale/exp2_scaled_inside",
    inputs=QKV,
    out="btne",
    operands="q k v",
    scale=SCALE,
)
def _(q, k, v):
    s = dots(q, k)
    m = s.max(-1, keepdims=True)
    c = SCALE * 1.4426950408889634
    e = jnp.exp2(s * c - m * c)
    return weigh(e, v) / e.sum(-1).transpose(0, 2, 1)[..., None]


FACTOR = "q k v scale_factor"


@spelling(
    "scale/traced",
    inputs=dict(**QKV, scale_factor=positive("")),
    out="btne",
    operands=FACTOR,
)
def _(q, k, v, scale):
    return attend(dots(q, k) * scale, v)


@spelling(
    "scale/traced_and_literal",
    inputs=dict(**QKV, scale_factor=positive("")),
    out="btne",
    operands=FACTOR,
    scale=SCALE,
    also=[dict(operands=FACTOR)],
)
def _(q, k, v, scale):
    return attend(dots(q * SCALE, k) * scale, v)


@spelling(
    "scale/traced_temperature",
    inputs=dict(**QKV, temperature=positive("")),
    out="btne",
    operands=FACTOR,
    scale=SCALE,
    bind=lambda q, k, v, x: dict(q=q, k=k, v=v, scale_factor=1 / x),
    also=[dict(operands=FACTOR)],
)
def _(q, k, v, temperature):
    return attend(dots(q, k) * SCALE / temperature, v)


@spelling(
    "scale/learned_logarithm",
    inputs=dict(**QKV, log_scale=floats("", spread=0.3)),
    out="btne",
    operands=FACTOR,
    bind=lambda q, k, v, x: dict(q=q, k=k, v=v, scale_factor=jnp.exp(x)),
)
def _(q, k, v, log_scale):
    return attend(dots(q, k) * jnp.exp(log_scale), v)


@spelling(
    "scale/temperature_per_head",
    inputs=dict(**QKV, tau=positive("n11")),
    out="btne",
    operands="q k v",
    bind=lambda q, k, v, x: dict(q=q * x[:, 0], k=k, v=v),
)
def _(q, k, v, tau):
    return attend(dots(q * tau[:, 0], k), v)


@spelling(
    "scale/temperature_per_head_on_scores",
    inputs=dict(**QKV, tau=positive("n11")),
    out="btne",
    operands="q k v",
    count=None,
    bind=lambda q, k, v, x: dict(q=q * x[:, 0], k=k, v=v),
)
def _(q, k, v, tau):
    return attend(dots(q, k) * tau, v)


@spelling(
    "scale/temperature_clamped_from_above",
    inputs=dict(**QKV, log_scale="n11"),
    out="btne",
    operands="q k v",
    count=None,
    bind=lambda q, k, v, x: dict(q=q * jnp.exp(jnp.minimum(x, 4.6))[:, 0], k=k, v=v),
)
def _(q, k, v, log_scale):
    return attend(dots(q, k) * jnp.exp(lax.clamp(-jnp.inf, log_scale, 4.6)), v)


@spelling(
    "scale/cosine",
    inputs=dict(**QKV, scale_factor=positive("")),
    out="btne",
    operands=FACTOR,
    bind=lambda q, k, v, x: dict(
        q=q / jnp.linalg.norm(q, axis=-1, keepdims=True),
        k=k / jnp.linalg.norm(k, axis=-1, keepdims=True),
        v=v,
        scale_factor=x,
    ),
    also=[dict(operands="q k v")],
)
def _(q, k, v, tau):
    q = q / jnp.linalg.norm(q, axis=-1, keepdims=True)
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    return attend(dots(q, k) * tau, v)


@spelling(
    "scale/per_dimension",
    inputs=dict(**QKV, width=floats("h")),
    out="btne",
    operands="q k v",
    scale=SCALE * 1.442695041,
    bind=lambda q, k, v, x: dict(q=q * jax.nn.softplus(x), k=k, v=v),
    also=[dict(operands="q k v", scale=1.0)],
)
def _(q, k, v, width):
    q = q * (1.442695041 * SCALE * jax.nn.softplus(width))
    return attend(dots(q, k), v)
