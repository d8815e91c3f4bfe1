"""Attention as libraries and people write it, one spelling per variant.

Arrays are [b, t, n, h] unless the letters say otherwise. Families: scale,
softmax, mask, fill, bias, layout, heads, decode, dropout, library.
"""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.spellings.spelling import (
    booleans,
    collect,
    floats,
    integers,
    positive,
)

SPELLINGS, spelling = collect("attention")

B, T, S, N, K, G, H, E = 2, 24, 40, 6, 3, 2, 8, 10
SCALE = H**-0.5
QKV = dict(q="btnh", k="bsnh", v="bsne")
HEADS_FIRST = dict(q="bnth", k="bnsh", v="bnse")
GROUPED = dict(q="btnh", k="bskh", v="bske")
SQUARE = dict(s=T)
CAUSAL = (None, 0)
ANY = (None, None)
NEGATIVE = float(np.finfo(np.float32).min)


def dots(q, k):
    return jnp.einsum("btnh,bsnh->bnts", q, k)


def weigh(p, v):
    return jnp.einsum("bnts,bsne->btne", p, v)


def attend(s, v):
    return weigh(jax.nn.softmax(s, axis=-1), v)


def causal(t=T, s=T):
    return jnp.tril(jnp.ones((t, s), bool))


def masked(s, m=None, fill=-jnp.inf):
    return jnp.where(causal() if m is None else m, s, fill)


# ------------------------------------------------------------------ scale
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


# ---------------------------------------------------------------- softmax
def softened(name, make_probs, inputs=QKV, sizes=SQUARE, window=CAUSAL, **more):
    """Causal attention whose probabilities come from `make_probs(scores)`."""

    @spelling(
        f"softmax/{name}",
        inputs=inputs,
        out="btne",
        operands="q k v",
        scale=SCALE,
        window=window,
        sizes=sizes,
        **more,
    )
    def fn(q, k, v):
        return weigh(make_probs(masked(dots(q, k) * SCALE)), v)


def divided(e):
    return e / e.sum(-1, keepdims=True)


softened("library", jax.nn.softmax)
softened("library_positive_axis", lambda s: jax.nn.softmax(s, axis=3))
softened("library_where", lambda s: jax.nn.softmax(s, where=causal()))
softened(
    "stopped_max",
    lambda s: divided(jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))),
)
softened("max", lambda s: divided(jnp.exp(s - s.max(-1, keepdims=True))))
softened("max_expanded", lambda s: divided(jnp.exp(s - jnp.max(s, -1)[..., None])))
softened("no_max", lambda s: divided(jnp.exp(s)))
softened(
    "max_clamped",
    lambda s: divided(jnp.exp(s - jnp.maximum(s.max(-1, keepdims=True), -1e30))),
)
softened(
    "sum_expanded",
    lambda s: (lambda e: e / jnp.sum(e, axis=-1)[..., None])(
        jnp.exp(s - s.max(-1, keepdims=True))
    ),
)
softened(
    "reciprocal",
    lambda s: (lambda e: e * (1 / e.sum(-1, keepdims=True)))(
        jnp.exp(s - s.max(-1, keepdims=True))
    ),
)
softened(
    "jnp_reciprocal",
    lambda s: (lambda e: e * jnp.reciprocal(e.sum(-1, keepdims=True)))(jnp.exp(s)),
)
softened(
    "power_minus_one",
    lambda s: (lambda e: e * e.sum(-1, keepdims=True) ** -1)(jnp.exp(s)),
)
softened(
    "sum_by_einsum",
    lambda s: (lambda e: e / jnp.einsum("bnts->bnt", e)[..., None])(
        jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))
    ),
)
softened(
    "sum_by_ones",
    lambda s: (lambda e: e / (e @ jnp.ones((T, 1), e.dtype)))(jnp.exp(s)),
)
softened(
    "logsumexp",
    lambda s: jnp.exp(s - jax.scipy.special.logsumexp(s, -1, keepdims=True)),
)
softened(
    "jax_nn_logsumexp",
    lambda s: jnp.exp(s - jax.nn.logsumexp(s, axis=-1)[..., None]),
)
softened("log_softmax", lambda s: jnp.exp(jax.nn.log_softmax(s)))
softened(
    "log_of_sum",
    lambda s: jnp.exp(s - jnp.log(jnp.exp(s).sum(-1, keepdims=True))),
)
softened(
    "upcast",
    lambda s: jax.nn.softmax(s.astype(jnp.float32)).astype(s.dtype),
)
softened("shifted_by_constant", lambda s: divided(jnp.exp(s - 5.0)))
softened(
    "shifted_by_mean",
    lambda s: divided(jnp.exp(s - jnp.mean(jnp.where(causal(), s, 0), -1)[..., None])),
)
softened("max_subtracted_twice", lambda s: jax.nn.softmax(s - s.max(-1, keepdims=True)))
softened(
    "vmapped_rows",
    lambda s: jax.vmap(jax.nn.softmax)(s.reshape(-1, T)).reshape(s.shape),
)
softened(
    "middle_axis",
    lambda s: jax.nn.softmax(s.transpose(0, 3, 1, 2), axis=1).transpose(0, 2, 3, 1),
)
softened(
    "sum_in_float32",
    lambda s: (
        lambda e: e / e.astype(jnp.float32).sum(-1, keepdims=True).astype(e.dtype)
    )(jnp.exp(s - s.max(-1, keepdims=True))),
)
softened("standard_exp_expm1", lambda s: divided(jnp.expm1(s) + 1.0), count=None)


def deferred(name, **more):
    return spelling(
        f"softmax/{name}",
        inputs=QKV,
        operands="q k v",
        scale=SCALE,
        window=CAUSAL,
        sizes=SQUARE,
        **{"out": "btne", **more},
    )


@deferred("divided_after_values", out="bnte")
def _(q, k, v):
    s = masked(dots(q, k) * SCALE)
    e = jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))
    return jnp.einsum("bnts,bsne->bnte", e, v) / e.sum(-1, keepdims=True)


@deferred("reciprocal_after_values")
def _(q, k, v):
    s = masked(dots(q, k) * SCALE)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    inverse = 1.0 / jnp.sum(e, -1)
    return weigh(e, v) * inverse.transpose(0, 2, 1)[..., None]


@deferred("unnormalised_with_einsum_sum")
def _(q, k, v):
    s = masked(dots(q, k) * SCALE, fill=-0.7 * np.finfo(np.float32).max)
    m = jnp.max(s, axis=-1, keepdims=True)
    e = jnp.exp(s - m)
    total = jnp.einsum("bnts->btn", e)[..., None]
    return weigh(e, v) / total


@deferred("values_with_ones_column")
def _(q, k, v):
    s = masked(dots(q, k) * SCALE)
    e = jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))
    total = jnp.einsum("bnts,bs->btn", e, jnp.ones((B, T), e.dtype))
    return weigh(e, v) / total[..., None]


@deferred("upcast_until_values")
def _(q, k, v):
    s = dots(q, k).astype(jnp.float32) * SCALE
    p = jax.nn.softmax(masked(s))
    return weigh(p, v.astype(jnp.float32)).astype(q.dtype)


@deferred("upcast_before_scores")
def _(q, k, v):
    s = dots(q.astype(jnp.float32), k.astype(jnp.float32)) * SCALE
    return weigh(jax.nn.softmax(masked(s)).astype(v.dtype), v)


@deferred("preferred_element_type")
def _(q, k, v):
    s = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
    p = jax.nn.softmax(masked(s * SCALE, fill=-1e30)).astype(q.dtype)
    o = jnp.einsum("bnts,bsne->btne", p, v, preferred_element_type=jnp.float32)
    return o.astype(q.dtype)


@deferred("log_sum_exp_added_in_exponent", out="bnte")
def _(q, k, v):
    s = masked(dots(q, k) * SCALE)
    lse = jax.nn.logsumexp(s, axis=-1)
    return jnp.einsum("bnts,bsne->bnte", jnp.exp(s + -lse[..., None]), v)


@deferred("guarded_division")
def _(q, k, v):
    s = masked(dots(q, k) * SCALE)
    e = jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))
    total = e.sum(-1, keepdims=True)
    return weigh(e / jnp.where(total == 0, 1.0, total), v)


@deferred("guarded_by_an_addition")
def _(q, k, v):
    s = masked(dots(q, k) * SCALE)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return weigh(e / (e.sum(-1, keepdims=True) + 1e-10), v)


def guard(name, masked_rows, **more):
    return spelling(
        f"softmax/{name}",
        inputs=dict(**QKV, mask=booleans("b1ts")),
        out="btne",
        operands="q k v mask",
        scale=SCALE,
        masked_rows=masked_rows,
        **more,
    )


@guard("guard_any", "zero")
def _(q, k, v, mask):
    p = jax.nn.softmax(jnp.where(mask, dots(q, k) * SCALE, -jnp.inf))
    return weigh(jnp.where(mask.any(-1, keepdims=True), p, 0.0), v)


@guard("guard_nan", "zero", assume=("finite",))
def _(q, k, v, mask):
    p = jax.nn.softmax(jnp.where(mask, dots(q, k) * SCALE, -jnp.inf))
    return weigh(jnp.where(jnp.isnan(p), 0.0, p), v)


@guard("guard_remasked", "zero")
def _(q, k, v, mask):
    p = jax.nn.softmax(jnp.where(mask, dots(q, k) * SCALE, -jnp.inf))
    return weigh(jnp.where(mask, p, 0.0), v)


@guard("guard_remasked_finite", "zero")
def _(q, k, v, mask):
    p = jax.nn.softmax(jnp.where(mask, dots(q, k) * SCALE, -1e30))
    return weigh(jnp.where(mask, p, 0.0), v)


@guard("guard_total", "zero")
def _(q, k, v, mask):
    s = jnp.where(mask, dots(q, k) * SCALE, -jnp.inf)
    top = s.max(-1, keepdims=True)
    top = lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0.0))
    e = jnp.exp(s - top)
    total = e.sum(-1, keepdims=True)
    return weigh(e / jnp.where(total == 0, 1.0, total), v)


@guard(
    "guard_output",
    "zero",
    also=[dict(operands="q k v mask", scale=SCALE, empty_rows="mean")],
)
def _(q, k, v, mask):
    p = jax.nn.softmax(jnp.where(mask, dots(q, k) * SCALE, -1e9))
    some = mask.any(-1).transpose(0, 2, 1)[..., None]
    return jnp.where(some, weigh(p, v), 0.0)


@guard("guard_scores_all_minus_infinity", "zero")
def _(q, k, v, mask):
    # Torch's decomposition of scaled_dot_product_attention.
    s = dots(q * H**-0.25, k * H**-0.25)
    s = s + jnp.where(mask, 0.0, -jnp.inf)
    p = jax.nn.softmax(s, axis=-1)
    none = jnp.logical_not(jnp.any(jnp.logical_not(s == -jnp.inf), -1, keepdims=True))
    return weigh(jnp.where(none, 0.0, p), v)


@spelling(
    "softmax/one_in_denominator",
    inputs=QKV,
    out="btne",
    operands="q k v sinks",
    scale=SCALE,
    bind=lambda q, k, v: dict(q=q, k=k, v=v, sinks=jnp.zeros(N)),
)
def _(q, k, v):
    e = jnp.exp(dots(q, k) * SCALE)
    return weigh(e / (1 + e.sum(-1, keepdims=True)), v)


@spelling(
    "softmax/one_in_denominator_with_max",
    inputs=QKV,
    out="btne",
    operands="q k v sinks",
    scale=SCALE,
    window=CAUSAL,
    sizes=SQUARE,
    bind=lambda q, k, v: dict(q=q, k=k, v=v, sinks=jnp.zeros(N)),
)
def _(q, k, v):
    s = masked(dots(q, k) * SCALE, fill=-1e9)
    m = lax.stop_gradient(jnp.maximum(s.max(-1, keepdims=True), 0))
    e = jnp.exp(s - m)
    return weigh(e / (jnp.exp(-m) + e.sum(-1, keepdims=True)), v)


def sink(name, **more):
    return spelling(
        f"softmax/{name}",
        inputs=dict(**QKV, sinks="n"),
        out="btne",
        operands="q k v sinks",
        scale=SCALE,
        window=CAUSAL,
        sizes=SQUARE,
        **more,
    )


@sink("sink_column")
def _(q, k, v, sinks):
    s = masked(dots(q, k) * SCALE, fill=-1e9)
    column = jnp.broadcast_to(sinks[None, :, None, None], (B, N, T, 1))
    p = jax.nn.softmax(jnp.concatenate([s, column], axis=-1), axis=-1)
    return weigh(p[..., :-1], v)


@sink("sink_column_first")
def _(q, k, v, sinks):
    s = masked(dots(q, k) * SCALE)
    column = jnp.tile(sinks.reshape(1, N, 1, 1), (B, 1, T, 1))
    p = jax.nn.softmax(jnp.concatenate([column, s], axis=-1), axis=-1)
    return weigh(p[..., 1:], v)


@sink("sink_column_max_twice")
def _(q, k, v, sinks):
    s = masked(dots(q, k) * SCALE, fill=NEGATIVE)
    column = jnp.broadcast_to(sinks.reshape(1, -1, 1, 1), (B, N, T, 1))
    s = jnp.concatenate([s, column], axis=-1)
    s = s - jnp.max(s, axis=-1, keepdims=True)
    return weigh(jax.nn.softmax(s, axis=-1)[..., :-1], v)


@sink("sink_in_denominator")
def _(q, k, v, sinks):
    s = masked(dots(q, k) * SCALE, fill=-1e30)
    sinks = sinks[:, None, None]
    m = jnp.maximum(s.max(-1, keepdims=True), sinks)
    e = jnp.exp(s - m)
    return weigh(e / (e.sum(-1, keepdims=True) + jnp.exp(sinks - m)), v)


@sink("sink_without_max")
def _(q, k, v, sinks):
    e = jnp.where(causal(), jnp.exp(dots(q, k) * SCALE), 0.0)
    return weigh(e / (e.sum(-1, keepdims=True) + jnp.exp(sinks)[:, None, None]), v)


@sink("sink_by_logaddexp")
def _(q, k, v, sinks):
    s = masked(dots(q, k) * SCALE)
    lse = jax.nn.logsumexp(s, axis=-1, keepdims=True)
    return weigh(jnp.exp(s - jnp.logaddexp(lse, sinks[:, None, None])), v)


def streamed(name, **more):
    return spelling(
        f"softmax/{name}",
        inputs=QKV,
        out="btne",
        operands="q k v",
        scale=SCALE,
        count=None,
        **more,
    )


@streamed("online_scan")
def _(q, k, v):
    def step(carry, block):
        o, m, total = carry
        kb, vb = block
        s = dots(q * SCALE, kb)
        new = jnp.maximum(m, s.max(-1))
        e = jnp.exp(s - new[..., None])
        old = jnp.exp(m - new)
        o = o * old.transpose(0, 2, 1)[..., None] + weigh(e, vb)
        return (o, new, total * old + e.sum(-1)), None

    ks = k.reshape(B, 5, S // 5, N, H).swapaxes(0, 1)
    vs = v.reshape(B, 5, S // 5, N, E).swapaxes(0, 1)
    start = (
        jnp.zeros((B, T, N, E), q.dtype),
        jnp.full((B, N, T), -1e30, q.dtype),
        jnp.zeros((B, N, T), q.dtype),
    )
    (o, _, total), _ = lax.scan(step, start, (ks, vs))
    return o / total.transpose(0, 2, 1)[..., None]


@streamed("stacked_chunks")
def _(q, k, v):
    def chunk(block):
        kb, vb = block
        s = dots(q * SCALE, kb)
        m = lax.stop_gradient(s.max(-1, keepdims=True))
        e = jnp.exp(s - m)
        return weigh(e, vb), e.sum(-1), m[..., 0]

    ks = k.reshape(B, 5, S // 5, N, H).swapaxes(0, 1)
    vs = v.reshape(B, 5, S // 5, N, E).swapaxes(0, 1)
    o, total, m = lax.map(chunk, (ks, vs))
    weight = jnp.exp(m - m.max(0))
    o = (o * weight.transpose(0, 1, 3, 2)[..., None]).sum(0)
    return o / (total * weight).sum(0).transpose(0, 2, 1)[..., None]


@spelling(
    "softmax/query_chunks",
    inputs=QKV,
    out="btne",
    operands="q k v",
    scale=SCALE,
)
def _(q, k, v):
    qs = q.reshape(B, 4, T // 4, N, H).swapaxes(0, 1)
    out = lax.map(lambda part: attend(dots(part * SCALE, k), v), qs)
    return out.swapaxes(0, 1).reshape(B, T, N, E)


# ------------------------------------------------------------------- mask
def marked(name, mask_scores, window=CAUSAL, sizes=SQUARE, **more):
    """Attention whose scores are masked by `mask_scores(scores)`."""

    @spelling(
        f"mask/{name}",
        inputs=QKV,
        out="btne",
        operands=more.pop("operands", "q k v"),
        scale=SCALE,
        window=window,
        sizes=sizes,
        **more,
    )
    def fn(q, k, v):
        return attend(mask_scores(dots(q, k) * SCALE), v)


def positions(t=T, s=T):
    return jnp.arange(t)[:, None], jnp.arange(s)[None, :]


def difference(t=T, s=T):
    i, j = positions(t, s)
    return i - j


INF = -jnp.inf
marked("tril", lambda s: jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, INF))
marked("tril_of_floats", lambda s: jnp.where(jnp.tril(jnp.ones((T, T))) == 0, INF, s))
marked(
    "tril_of_ints",
    lambda s: jnp.where(jnp.tril(jnp.ones((T, T), jnp.int32)) > 0, s, INF),
)
marked("tril_4d", lambda s: jnp.where(jnp.tril(jnp.ones((1, 1, T, T), bool)), s, -1e9))
marked(
    "tril_of_scores_shape", lambda s: jnp.where(jnp.tril(jnp.ones_like(s)) > 0, s, -1e9)
)
marked(
    "triu_negated", lambda s: jnp.where(~jnp.triu(jnp.ones((T, T), bool), 1), s, INF)
)
marked(
    "triu_transposed", lambda s: jnp.where(jnp.triu(jnp.ones((T, T), bool)).T, s, INF)
)
marked(
    "triu_other_arm", lambda s: jnp.where(jnp.triu(jnp.ones((T, T), bool), k=1), INF, s)
)
marked("numpy_constant", lambda s: jnp.where(np.tril(np.ones((T, T), bool)), s, INF))
marked("numpy_additive", lambda s: s + np.triu(np.full((T, T), -np.inf, np.float32), 1))
marked(
    "numpy_float_constant",
    lambda s: jnp.where(np.tril(np.ones((T, T), np.float32)) == 1, s, -1e10),
)
marked(
    "iota_ge",
    lambda s: jnp.where(jnp.arange(T)[:, None] >= jnp.arange(T)[None], s, INF),
)
marked(
    "iota_le",
    lambda s: jnp.where(jnp.arange(T)[None] <= jnp.arange(T)[:, None], s, INF),
)
marked(
    "iota_gt_swapped",
    lambda s: jnp.where(jnp.arange(T)[None] > jnp.arange(T)[:, None], INF, s),
)
marked(
    "iota_lt_swapped",
    lambda s: jnp.where(jnp.arange(T)[:, None] < jnp.arange(T)[None], INF, s),
)
marked(
    "iota_plus_one",
    lambda s: jnp.where(jnp.arange(T)[:, None] + 1 > jnp.arange(T)[None], s, INF),
)
marked("iota_difference", lambda s: jnp.where(difference() >= 0, s, -1e30))
marked(
    "iota_floats",
    lambda s: jnp.where(
        jnp.arange(T, dtype=jnp.float32)[:, None] >= jnp.arange(T, dtype=jnp.float32),
        s,
        -1e30,
    ),
)
marked(
    "broadcasted_iota",
    lambda s: jnp.where(
        lax.broadcasted_iota(jnp.int32, (T, T), 1)
        <= lax.broadcasted_iota(jnp.int32, (T, T), 0),
        s,
        INF,
    ),
)
marked(
    "broadcasted_iota_4d",
    lambda s: jnp.where(
        lax.broadcasted_iota(jnp.int32, s.shape, 2)
        >= lax.broadcasted_iota(jnp.int32, s.shape, 3),
        s,
        INF,
    ),
)
marked(
    "positions_array",
    lambda s: jnp.where(
        (lambda p: p[:, None, :, None] >= p[:, None, None, :])(
            jnp.broadcast_to(jnp.arange(T), (B, T))
        ),
        s,
        -2.3819763e38,
    ),
)
marked(
    "cumsum_positions",
    lambda s: jnp.where(
        (lambda p: p[:, None] >= p[None, :])(jnp.cumsum(jnp.ones(T, jnp.int32)) - 1),
        s,
        INF,
    ),
    also=[dict(operands="q k v mask", scale=SCALE)],
)
marked(
    "lax_select_full",
    lambda s: lax.select(
        jnp.broadcast_to(causal(), s.shape), s, jnp.full_like(s, NEGATIVE)
    ),
)
marked(
    "select_bias",
    lambda s: (
        s
        + lax.select(
            causal(), jnp.zeros((T, T), s.dtype), jnp.full((T, T), NEGATIVE, s.dtype)
        )
    ),
)
marked("additive_where", lambda s: s + jnp.where(causal(), 0.0, -1e9))
marked("additive_infinity", lambda s: s + jnp.where(causal(), 0.0, INF))
marked("additive_one_minus", lambda s: s + (1.0 - causal().astype(s.dtype)) * -1e9)
marked("additive_minus_one", lambda s: s + 1e9 * (causal().astype(s.dtype) - 1.0))
marked("additive_not", lambda s: s + (~causal()) * -1e15)
marked("additive_log", lambda s: s + jnp.log(causal().astype(s.dtype)))
marked(
    "additive_before_scale",
    lambda s: (s * math.sqrt(H) + jnp.where(causal(), 0.0, -1e10)) * SCALE,
)
marked("multiply_minus", lambda s: s * causal() - 1e10 * (1 - causal()))
marked(
    "minimum_of_biases", lambda s: s + jnp.minimum(jnp.where(causal(), 0.0, -1e9), 0.0)
)
marked(
    "compared_bias",
    lambda s: jnp.where(jnp.where(causal(), 0.0, -2.38e38) >= -1.19e38, s, -2.38e38),
)
marked(
    "logical_and_of_two",
    lambda s: jnp.where(jnp.logical_and(causal(), jnp.ones((T, T), bool)), s, INF),
)
marked("twice", lambda s: masked(masked(s, fill=-1e9), fill=-1e9))
marked(
    "sliced_from_buffer",
    lambda s: jnp.where(jnp.tril(jnp.ones((64, 64), bool))[:T, :T], s, INF),
)
marked(
    "dynamic_sliced_from_buffer",
    lambda s: jnp.where(
        lax.dynamic_slice(jnp.tril(jnp.ones((64, 64), bool)), (0, 0), (T, T)), s, INF
    ),
)
marked(
    "numpy_sliced_from_buffer",
    lambda s: jnp.where(
        jnp.asarray(np.tril(np.ones((1, 1, 64, 64), bool)))[:, :, :T, :T], s, INF
    ),
)
marked(
    "in_bfloat16",
    lambda s: (
        s
        + jnp.where(causal(), 0.0, float(jnp.finfo(jnp.bfloat16).min))
        .astype(jnp.bfloat16)
        .astype(s.dtype)
    ),
)
marked(
    "segments_constant",
    lambda s: jnp.where(
        causal() & (jnp.zeros(T)[:, None] == jnp.zeros(T)[None]), s, INF
    ),
)
marked(
    "equal_or_greater",
    lambda s: jnp.where((difference() > 0) | (difference() == 0), s, INF),
)
marked("sign", lambda s: jnp.where(jnp.sign(difference()) >= 0, s, INF), count=None)

marked(
    "window",
    lambda s: jnp.where((difference() >= 0) & (difference() < 5), s, INF),
    window=(4, 0),
)
marked(
    "window_le",
    lambda s: jnp.where(causal() & (difference() <= 5), s, -1e30),
    window=(5, 0),
)
marked(
    "window_tril_triu",
    lambda s: jnp.where(
        jnp.tril(jnp.ones((T, T), bool)) & jnp.triu(jnp.ones((T, T), bool), -4),
        s,
        NEGATIVE,
    ),
    window=(4, 0),
)
marked(
    "window_tril_difference",
    lambda s: jnp.where(
        jnp.tril(jnp.ones((T, T))) - jnp.tril(jnp.ones((T, T)), -5) > 0, s, INF
    ),
    window=(4, 0),
)
marked(
    "window_gemma",
    lambda s: (
        lambda p: jnp.where(
            (p[None, :] <= p[:, None])
            & (p[None, :] > p[:, None] - 7)
            & (p[None, :] < p[:, None] + 7),
            s,
            -2.3819763e38,
        )
    )(jnp.arange(T)),
    window=(6, 0),
)
marked(
    "window_both_sides",
    lambda s: jnp.where(jnp.abs(difference()) <= 3, s, INF),
    window=(3, 3),
)
marked(
    "window_uneven",
    lambda s: jnp.where((difference() <= 4) & (difference() >= -2), s, INF),
    window=(4, 2),
)
marked(
    "window_left_only", lambda s: jnp.where(difference() <= 6, s, INF), window=(6, None)
)
marked(
    "window_right_only",
    lambda s: jnp.where(difference() >= -6, s, INF),
    window=(None, 6),
)
marked(
    "window_two_selects",
    lambda s: jnp.where(
        difference() < 5, jnp.where(difference() >= 0, s, -1e30), -1e30
    ),
    window=(4, 0),
)
marked(
    "window_two_biases",
    lambda s: (
        s
        + jnp.where(difference() < 5, 0.0, -1e9)
        + jnp.where(difference() >= 0, 0.0, -1e9)
    ),
    window=(4, 0),
)
marked("anticausal", lambda s: jnp.where(difference() <= 0, s, INF), window=(0, None))

RECT = {}
marked(
    "rectangle_top_left",
    lambda s: jnp.where(jnp.tril(jnp.ones((T, S), bool)), s, INF),
    sizes=RECT,
)
marked(
    "rectangle_bottom_right",
    lambda s: jnp.where(jnp.tril(jnp.ones((T, S), bool), S - T), s, INF),
    sizes=RECT,
    shift=S - T,
    also=[dict(operands="q k v", scale=SCALE, window=(None, S - T))],
)
marked(
    "rectangle_iota_offset",
    lambda s: jnp.where(jnp.arange(T)[:, None] + (S - T) >= jnp.arange(S), s, INF),
    sizes=RECT,
    shift=S - T,
    also=[dict(operands="q k v", scale=SCALE, window=(None, S - T))],
)
marked(
    "rectangle_sliced",
    lambda s: jnp.where(jnp.tril(jnp.ones((64, 64), bool))[S - T : S, :S], s, INF),
    sizes=RECT,
    shift=S - T,
    also=[dict(operands="q k v", scale=SCALE, window=(None, S - T))],
)
marked(
    "rectangle_window",
    lambda s: jnp.where(
        (jnp.arange(T)[:, None] + 16 >= jnp.arange(S))
        & (jnp.arange(T)[:, None] + 16 < jnp.arange(S) + 9),
        s,
        INF,
    ),
    sizes=RECT,
    window=(8, 0),
    shift=16,
    also=[dict(operands="q k v", scale=SCALE, window=(-8, 16))],
)
marked(
    "strictly_causal",
    lambda s: jnp.where(jnp.tril(jnp.ones((T, T), bool), -1), s, -1e9),
    window=(None, -1),
    masked_rows="mean",
    also=[dict(operands="q k v", scale=SCALE, window=CAUSAL, shift=-1)],
)
marked(
    "strictly_causal_nan",
    lambda s: jnp.where(difference() > 0, s, INF),
    window=(None, -1),
    masked_rows="nan",
    also=[dict(operands="q k v", scale=SCALE, window=CAUSAL, shift=-1)],
)
marked(
    "one_ahead",
    lambda s: jnp.where(jnp.tril(jnp.ones((T, T), bool), 1), s, -1e9),
    window=(None, 1),
    also=[dict(operands="q k v", scale=SCALE, window=CAUSAL, shift=1)],
)

AS_MASK = [dict(operands="q k v mask", scale=SCALE)]
SEGMENTS = "q k v q_segments kv_segments"


def block(q, k, v):
    ids = jnp.arange(T) // 6
    return dict(q=q, k=k, v=v, q_segments=ids[None], kv_segments=ids[None])


marked(
    "block_diagonal",
    lambda s: jnp.where(
        jnp.arange(T)[:, None] // 6 == jnp.arange(T)[None] // 6, s, INF
    ),
    window=ANY,
    operands=SEGMENTS,
    bind=block,
    also=AS_MASK,
)
marked(
    "block_diagonal_causal",
    lambda s: jnp.where(
        (jnp.arange(T)[:, None] // 6 == jnp.arange(T)[None] // 6) & (difference() >= 0),
        s,
        INF,
    ),
    operands=SEGMENTS,
    bind=block,
    also=[dict(AS_MASK[0], window=CAUSAL), *AS_MASK],
)
marked(
    "block_diagonal_numpy",
    lambda s: jnp.where(np.kron(np.eye(4), np.ones((6, 6))) > 0, s, INF),
    window=ANY,
    operands="q k v mask",
    bind=lambda q, k, v: dict(
        q=q, k=k, v=v, mask=np.kron(np.eye(4), np.ones((6, 6)))[None, None] > 0
    ),
    also=[dict(operands=SEGMENTS, scale=SCALE)],
)
marked(
    "strided",
    lambda s: jnp.where(difference() % 3 == 0, s, INF),
    window=ANY,
    operands="q k v mask",
    bind=lambda q, k, v: dict(q=q, k=k, v=v, mask=(difference() % 3 == 0)[None, None]),
)
marked(
    "dilated_causal",
    lambda s: jnp.where((difference() % 2 == 0) & (difference() >= 0), s, INF),
    operands="q k v mask",
    bind=lambda q, k, v: dict(q=q, k=k, v=v, mask=(difference() % 2 == 0)[None, None]),
    also=AS_MASK,
)
marked(
    "random_constant",
    lambda s: jnp.where(
        np.random.default_rng(3).random((T, T)) + np.eye(T) > 0.5, s, INF
    ),
    window=ANY,
    operands="q k v mask",
    bind=lambda q, k, v: dict(
        q=q,
        k=k,
        v=v,
        mask=(np.random.default_rng(3).random((T, T)) + np.eye(T) > 0.5)[None, None],
    ),
)
marked(
    "prefix_constant",
    lambda s: jnp.where((difference() >= 0) | (jnp.arange(T) < 7), s, INF),
    operands="q k v prefix",
    bind=lambda q, k, v: dict(q=q, k=k, v=v, prefix=jnp.array([7])),
    also=AS_MASK,
)


def documented(name, inputs, operands, masked_rows=None, **more):
    """A spelling with masking arrays among its arguments."""
    return spelling(
        f"mask/{name}",
        inputs={**QKV, **inputs},
        out="btne",
        operands=operands,
        scale=SCALE,
        masked_rows=masked_rows,
        **more,
    )


@documented(
    "prefix",
    dict(prefix=integers("b", 2, 9)),
    "q k v prefix",
    window=CAUSAL,
    sizes=SQUARE,
)
def _(q, k, v, prefix):
    keep = (difference() >= 0) | (jnp.arange(T) < prefix[:, None, None])
    return attend(jnp.where(keep[:, None], dots(q, k) * SCALE, -1e30), v)


@documented(
    "prefix_by_type",
    dict(is_prefix=booleans("bs", 0.4)),
    "q k v mask",
    sizes=SQUARE,
    bind=lambda q, k, v, m: dict(
        q=q, k=k, v=v, mask=m[:, None, None] | (difference() >= 0)
    ),
)
def _(q, k, v, is_prefix):
    keep = (difference() >= 0) | is_prefix[:, None, :]
    return attend(jnp.where(keep[:, None], dots(q, k) * SCALE, -1e30), v)


@documented(
    "prefix_by_cumsum",
    dict(ar=booleans("bs", 0.4, np.int32)),
    "q k v mask",
    sizes=SQUARE,
    bind=lambda q, k, v, m: dict(
        q=q,
        k=k,
        v=v,
        mask=(jnp.cumsum(m, 1)[:, None] <= jnp.cumsum(m, 1)[:, :, None])[:, None],
    ),
)
def _(q, k, v, ar):
    # Big_vision and its descendants: one attends to all with a smaller count.
    c = jnp.cumsum(ar, axis=1)
    keep = c[:, None, :] <= c[:, :, None]
    return attend(jnp.where(keep[:, None], dots(q, k) * SCALE, -2.3819763e38), v)


@documented(
    "segments",
    dict(q_segments=integers("bt", 0, 2)),
    SEGMENTS,
    sizes=SQUARE,
    bind=lambda q, k, v, i: dict(q=q, k=k, v=v, q_segments=i, kv_segments=i),
)
def _(q, k, v, ids):
    keep = ids[:, None, :, None] == ids[:, None, None, :]
    return attend(jnp.where(keep, dots(q, k) * SCALE, -1e30), v)


@documented(
    "segments_reversed_causal",
    dict(q_segments=integers("bt", 0, 2)),
    SEGMENTS,
    window=CAUSAL,
    sizes=SQUARE,
    bind=lambda q, k, v, i: dict(q=q, k=k, v=v, q_segments=i, kv_segments=i),
)
def _(q, k, v, ids):
    keep = jnp.logical_and(causal(), jnp.equal(ids[:, None, :], ids[:, :, None]))
    return attend(jnp.where(keep[:, None], dots(q, k) * SCALE, -1e9), v)


@documented(
    "segments_not_equal",
    dict(q_segments=integers("bt", 0, 2)),
    SEGMENTS,
    sizes=SQUARE,
    bind=lambda q, k, v, i: dict(q=q, k=k, v=v, q_segments=i, kv_segments=i),
)
def _(q, k, v, ids):
    drop = ids[:, None, :, None] != ids[:, None, None, :]
    return attend(dots(q, k) * SCALE + jnp.where(drop, -1e9, 0.0), v)


@documented(
    "segments_cross",
    dict(q_segments=integers("bt", 0, 2), kv_segments=integers("bs", 0, 2)),
    SEGMENTS,
    "mean",
)
def _(q, k, v, ids, kv_ids):
    keep = ids[:, :, None] == kv_ids[:, None]
    return attend(jnp.where(keep[:, None], dots(q, k) * SCALE, NEGATIVE), v)


@documented(
    "segments_nonzero",
    dict(q_segments=integers("bt", 0, 2)),
    SEGMENTS + " mask",
    "mean",
    window=CAUSAL,
    sizes=SQUARE,
    bind=lambda q, k, v, i: dict(
        q=q, k=k, v=v, q_segments=i, kv_segments=i, mask=(i != 0)[:, None, None]
    ),
    also=[dict(operands="q k v mask", scale=SCALE, window=CAUSAL)],
)
def _(q, k, v, ids):
    keep = (ids[:, :, None] == ids[:, None]) & (ids != 0)[:, None] & causal()
    return attend(jnp.where(keep[:, None], dots(q, k) * SCALE, NEGATIVE), v)


PADDING = [
    dict(operands="q k v bias", scale=SCALE, empty_rows=rows) for rows in ("nan", None)
]
FLOATS = [dict(operands="q k v bias", scale=SCALE, empty_rows=None)]
"""An array of floats may hold other numbers than 0 and 1: it is no mask."""


@documented(
    "padding_bool",
    dict(valid=booleans("bs")),
    "q k v mask",
    "mean",
    bind=lambda q, k, v, m: dict(q=q, k=k, v=v, mask=m[:, None, None]),
)
def _(q, k, v, valid):
    return attend(jnp.where(valid[:, None, None], dots(q, k) * SCALE, -1e30), v)


@documented(
    "padding_ids",
    dict(ids=integers("bs", 0, 3)),
    "q k v mask",
    "mean",
    bind=lambda q, k, v, i: dict(q=q, k=k, v=v, mask=(i > 0)[:, None, None]),
)
def _(q, k, v, ids):
    return attend(jnp.where((ids > 0)[:, None, None, :], dots(q, k) * SCALE, -1e30), v)


@documented(
    "padding_not_equal",
    dict(ids=integers("bs", 0, 3)),
    "q k v mask",
    "nan",
    bind=lambda q, k, v, i: dict(q=q, k=k, v=v, mask=(i != 2)[:, None, None]),
)
def _(q, k, v, ids):
    drop = jnp.expand_dims(ids == 2, (1, 2))
    return attend(jnp.where(drop, -jnp.inf, dots(q, k) * SCALE), v)


@documented(
    "padding_additive",
    dict(valid=booleans("bs", dtype=np.float32)),
    "q k v mask",
    "mean",
    also=FLOATS,
    bind=lambda q, k, v, m: dict(q=q, k=k, v=v, mask=(m > 0)[:, None, None]),
)
def _(q, k, v, valid):
    # BERT: the extended mask is made once for all layers.
    extended = (1.0 - valid[:, None, None, :]) * -1e9
    return attend(dots(q, k) * SCALE + extended, v)


@documented(
    "padding_moderate",
    dict(valid=booleans("bs", dtype=np.float32)),
    "q k v bias",
    also=[dict(operands="q k v mask", scale=SCALE)],
    bind=lambda q, k, v, m: dict(q=q, k=k, v=v, bias=((1.0 - m) * -1e4)[:, None, None]),
)
def _(q, k, v, valid):
    extended = (1.0 - valid[:, None, None, :]) * -10000.0
    return attend(dots(q, k) * SCALE + extended, v)


@documented(
    "padding_hugging_face",
    dict(valid=booleans("bs", dtype=np.int32)),
    "q k v mask",
    "mean",
    also=PADDING,
    bind=lambda q, k, v, m: dict(q=q, k=k, v=v, mask=(m > 0)[:, None, None]),
)
def _(q, k, v, valid):
    attention_mask = jnp.expand_dims(valid, axis=(-3, -2))
    bias = lax.select(
        attention_mask > 0,
        jnp.full(attention_mask.shape, 0.0).astype(q.dtype),
        jnp.full(attention_mask.shape, jnp.finfo(q.dtype).min).astype(q.dtype),
    )
    return attend(dots(q * SCALE, k) + bias, v)


@documented(
    "padding_and_causal",
    dict(valid=booleans("bs", dtype=np.int32)),
    "q k v mask",
    "mean",
    window=CAUSAL,
    sizes=SQUARE,
    bind=lambda q, k, v, m: dict(q=q, k=k, v=v, mask=(m > 0)[:, None, None]),
)
def _(q, k, v, valid):
    keep = jnp.logical_and(valid[:, None, None, :] > 0, causal()[None, None])
    return attend(jnp.where(keep, dots(q, k) * SCALE, NEGATIVE), v)


@documented(
    "padding_product",
    dict(valid=booleans("bs", dtype=np.float32)),
    "q k v mask",
    "mean",
    window=CAUSAL,
    sizes=SQUARE,
    bind=lambda q, k, v, m: dict(q=q, k=k, v=v, mask=(m > 0)[:, None, None]),
    also=[dict(operands="q k v mask", scale=SCALE)],  # a product of floats, as it is
)
def _(q, k, v, valid):
    keep = valid[:, None, None, :] * causal().astype(jnp.float32)
    return attend(jnp.where(keep > 0, dots(q, k) * SCALE, -1e30), v)


@documented(
    "padding_both_sides",
    dict(q_valid=booleans("bt"), kv_valid=booleans("bs")),
    "q k v q_segments kv_segments",
    "mean",
    bind=lambda q, k, v, a, b: dict(
        q=q,
        k=k,
        v=v,
        q_segments=a.astype(jnp.int32),
        kv_segments=2 - b.astype(jnp.int32),
    ),
    also=[dict(operands="q k v q_segments kv_segments", scale=SCALE)],
)
def _(q, k, v, q_valid, kv_valid):
    keep = q_valid[:, None, :, None] & kv_valid[:, None, None, :]
    return attend(jnp.where(keep, dots(q, k) * SCALE, -1e30), v)


LENGTHS = dict(kv_lengths=integers("b", 3, 20))


@documented("lengths", LENGTHS, "q k v kv_lengths")
def _(q, k, v, lengths):
    keep = jnp.arange(S) < lengths[:, None, None, None]
    return attend(jnp.where(keep, dots(q, k) * SCALE, -1e30), v)


@documented("lengths_ge", LENGTHS, "q k v kv_lengths")
def _(q, k, v, lengths):
    drop = jnp.arange(S)[None, None, None, :] >= lengths.reshape(B, 1, 1, 1)
    return attend(jnp.where(drop, -jnp.inf, dots(q, k) * SCALE), v)


@documented(
    "lengths_twice",
    dict(written=integers("", 5, 20), kv_lengths=integers("b", 3, 20)),
    "q k v kv_lengths",
    bind=lambda q, k, v, written, kv_lengths: dict(
        q=q, k=k, v=v, kv_lengths=jnp.minimum(jnp.minimum(written, kv_lengths), 17)
    ),
)
def _(q, k, v, written, lengths):
    """How much of a cache is written, a sequence's own length, and a number."""
    at = jnp.arange(S)
    keep = (at < written) & (at < lengths[:, None]) & (at < 17)
    return attend(jnp.where(keep[:, None, None], dots(q, k) * SCALE, -1e30), v)


@documented(
    "lengths_least",
    dict(written=integers("", 5, 20), kv_lengths=integers("b", 3, 20)),
    "q k v kv_lengths",
    bind=lambda q, k, v, written, kv_lengths: dict(
        q=q, k=k, v=v, kv_lengths=jnp.minimum(written, kv_lengths)
    ),
)
def _(q, k, v, written, lengths):
    keep = jnp.arange(S) < jnp.minimum(lengths, written)[:, None, None, None]
    return attend(jnp.where(keep, dots(q, k) * SCALE, -1e30), v)


@documented("lengths_causal", LENGTHS, "q k v kv_lengths", window=CAUSAL, sizes=SQUARE)
def _(q, k, v, lengths):
    keep = (jnp.arange(T) < lengths[:, None])[:, None, None] & causal()
    return attend(jnp.where(keep, dots(q, k) * SCALE, -1e30), v)


@documented(
    "lengths_of_library",
    dict(kv_lengths=integers("b", 3, 20)),
    "q k v kv_lengths",
    sizes=dict(e=H),
)
def _(q, k, v, lengths):
    return jax.nn.dot_product_attention(
        q, k, v, scale=SCALE, key_value_seq_lengths=lengths
    )


@documented(
    "query_lengths",
    dict(lengths=integers("b", 3, 20)),
    "q k v mask",
    "mean",
    bind=lambda q, k, v, n: dict(
        q=q, k=k, v=v, mask=(jnp.arange(T) < n[:, None])[:, None, :, None]
    ),
)
def _(q, k, v, lengths):
    keep = jnp.arange(T)[:, None] < lengths[:, None, None, None]
    return attend(jnp.where(keep, dots(q, k) * SCALE, -1e30), v)


@documented(
    "lengths_from_sum",
    dict(valid=booleans("bs", dtype=np.int32)),
    "q k v kv_lengths",
    bind=lambda q, k, v, m: dict(q=q, k=k, v=v, kv_lengths=m.sum(-1)),
)
def _(q, k, v, valid):
    keep = jnp.arange(S) < jnp.sum(valid, -1)[:, None, None, None]
    return attend(jnp.where(keep, dots(q, k) * SCALE, -1e30), v)


# --------------------------------------------- fills and rows without a key
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


@guard("selected_after_exp", "nan")
def _(q, k, v, mask):
    s = dots(q, k) * SCALE
    e = jnp.where(mask, jnp.exp(s - s.max(-1, keepdims=True)), 0.0)
    return weigh(e / jnp.sum(e, -1, keepdims=True), v)


@guard("renormalised_after_mask", "nan")
def _(q, k, v, mask):
    p = jax.nn.softmax(dots(q, k) * SCALE, axis=-1) * mask
    return weigh(p / p.sum(-1, keepdims=True), v)


# ------------------------------------------------------------------- bias
def biased(name, inputs, operands, **more):
    return spelling(
        f"bias/{name}",
        inputs={**QKV, **inputs},
        out="btne",
        operands=operands,
        **{"scale": SCALE, **more},
    )


BIASED = "q k v bias"


@biased("full", dict(bias="bnts"), BIASED)
def _(q, k, v, bias):
    return attend(dots(q, k) * SCALE + bias, v)


@biased("first", dict(bias="bnts"), BIASED)
def _(q, k, v, bias):
    return attend(bias + dots(q * SCALE, k), v)


@biased("over_batch", dict(bias="nts"), BIASED)
def _(q, k, v, bias):
    return attend(dots(q, k) * SCALE + bias[None], v)


@biased("over_heads", dict(bias="b1ts"), BIASED)
def _(q, k, v, bias):
    return attend(dots(q, k) * SCALE + bias, v)


@biased("over_both", dict(bias="ts"), BIASED)
def _(q, k, v, bias):
    return attend(dots(q, k) * SCALE + bias, v)


@biased("per_key", dict(bias="bs"), BIASED)
def _(q, k, v, bias):
    return attend(dots(q, k) * SCALE + bias[:, None, None], v)


@biased(
    "subtracted",
    dict(bias="bnts"),
    BIASED,
    bind=lambda q, k, v, x: dict(q=q, k=k, v=v, bias=-x),
)
def _(q, k, v, bias):
    return attend(dots(q, k) * SCALE - bias, v)


@biased(
    "before_scale",
    dict(bias="bnts"),
    BIASED,
    bind=lambda q, k, v, x: dict(q=q, k=k, v=v, bias=x * SCALE),
)
def _(q, k, v, bias):
    return attend((dots(q, k) + bias) * SCALE, v)


@biased(
    "two",
    dict(bias="bnts", pair="1nts"),
    BIASED,
    bind=lambda q, k, v, x, y: dict(q=q, k=k, v=v, bias=x + y),
)
def _(q, k, v, bias, pair):
    return attend(dots(q, k) * SCALE + bias + pair, v)


@biased(
    "pair_and_mask",
    dict(pair="tsn", mask=booleans("bs")),
    "q k v bias mask",
    masked_rows="mean",
    also=PADDING,
    bind=lambda q, k, v, x, m: dict(
        q=q, k=k, v=v, bias=x.transpose(2, 0, 1)[None], mask=m[:, None, None]
    ),
)
def _(q, k, v, pair, mask):
    # AlphaFold: the mask as 1e9·(m − 1), the pair bias after it.
    s = dots(q, k) * SCALE + 1e9 * (mask.astype(q.dtype) - 1.0)[:, None, None]
    return attend(s + pair.transpose(2, 0, 1), v)


@biased(
    "and_select",
    dict(bias="bnts", mask=booleans("b1ts")),
    "q k v bias mask",
    masked_rows="mean",
)
def _(q, k, v, bias, mask):
    return attend(jnp.where(mask, dots(q, k) * SCALE + bias, -1e30), v)


@biased("and_causal", dict(bias="nts"), BIASED, window=CAUSAL, sizes=SQUARE)
def _(q, k, v, bias):
    return attend(masked(dots(q, k) * SCALE + bias), v)


@biased("after_mask", dict(bias="nts"), BIASED, window=CAUSAL, sizes=SQUARE)
def _(q, k, v, bias):
    return attend(masked(dots(q, k) * SCALE) + bias, v)


@biased("of_library", dict(bias="bnts"), BIASED, sizes=dict(e=H))
def _(q, k, v, bias):
    return jax.nn.dot_product_attention(q, k, v, bias=bias)


@biased(
    "of_library_causal", dict(bias="bnts"), BIASED, window=CAUSAL, sizes=dict(e=H, s=T)
)
def _(q, k, v, bias):
    return jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=True)


@biased(
    "in_other_dtype",
    dict(bias="bnts"),
    BIASED,
    bind=lambda q, k, v, x: dict(
        q=q, k=k, v=v, bias=x.astype(jnp.bfloat16).astype(jnp.float32)
    ),
)
def _(q, k, v, bias):
    return attend(dots(q, k) * SCALE + bias.astype(jnp.bfloat16), v)


def buckets(t=T, s=S):
    i = jnp.arange(s)[None, :] - jnp.arange(t)[:, None]
    ahead = jnp.where(i > 0, 8, 0)
    n = jnp.abs(i)
    large = 4 + (jnp.log(n.astype(jnp.float32) / 4 + 1e-6) * 1.7).astype(jnp.int32)
    return ahead + jnp.where(n < 4, n, jnp.minimum(large, 7))


@biased(
    "relative_table",
    dict(table=floats("4n")),
    BIASED,
    scale=1.0,
    bind=lambda q, k, v, x: dict(
        q=q, k=k, v=v, bias=jnp.repeat(x, 4, 0)[buckets()].transpose(2, 0, 1)[None]
    ),
)
def _(q, k, v, table):
    # T5: no scale, a bias read from a table of buckets.
    bias = jnp.repeat(table, 4, 0)[buckets()].transpose(2, 0, 1)[None]
    return attend(dots(q, k) + bias, v)


@biased(
    "relative_one_hot",
    dict(table=floats("n8")),
    BIASED,
    scale=1.0,
    bind=lambda q, k, v, x: dict(q=q, k=k, v=v, bias=x[:, buckets() % 8][None]),
)
def _(q, k, v, table):
    one_hot = jax.nn.one_hot(buckets() % 8, 8)
    return attend(dots(q, k) + jnp.einsum("nr,tsr->nts", table, one_hot)[None], v)


SLOPES = np.array([2.0 ** -(i + 1) for i in range(N)], np.float32)
ALIBI = "q k v alibi"


@biased(
    "alibi_constant",
    {},
    ALIBI,
    window=CAUSAL,
    sizes=SQUARE,
    also=[dict(operands=BIASED, scale=SCALE, window=CAUSAL)],
    bind=lambda q, k, v: dict(q=q, k=k, v=v, alibi=SLOPES),
)
def _(q, k, v):
    i, j = positions()
    s = dots(q, k) * SCALE + SLOPES[:, None, None] * (j - i)
    return attend(masked(s), v)


@biased(
    "alibi_parameter", dict(alibi=positive("n")), ALIBI, window=CAUSAL, sizes=SQUARE
)
def _(q, k, v, slopes):
    i, j = positions()
    s = dots(q, k) * SCALE - slopes[:, None, None] * (i - j).astype(q.dtype)
    return attend(masked(s), v)


@biased("alibi_key_only", dict(alibi=positive("n")), ALIBI, window=CAUSAL, sizes=SQUARE)
def _(q, k, v, slopes):
    # Bloom: only the key's position; the rest is the same along the row.
    s = dots(q, k) * SCALE + slopes[None, :, None, None] * jnp.arange(T)
    return attend(masked(s, fill=NEGATIVE), v)


@biased(
    "alibi_absolute_causal",
    dict(alibi=positive("n")),
    ALIBI,
    window=CAUSAL,
    sizes=SQUARE,
    also=[dict(operands=BIASED, scale=SCALE, window=CAUSAL)],
)
def _(q, k, v, slopes):
    s = dots(q, k) * SCALE - slopes[:, None, None] * jnp.abs(difference())
    return attend(masked(s), v)


@biased(
    "alibi_two_sided",
    dict(slopes=positive("n")),
    BIASED,
    sizes=SQUARE,
    bind=lambda q, k, v, x: dict(
        q=q, k=k, v=v, bias=-(x[:, None, None] * jnp.abs(difference()))[None]
    ),
)
def _(q, k, v, slopes):
    s = dots(q, k) * SCALE - slopes[:, None, None] * jnp.abs(difference())
    return attend(s, v)


def capped(name, make_scores, inputs=QKV, operands="q k v", **more):
    @spelling(
        f"bias/{name}",
        inputs=inputs,
        out="btne",
        operands=operands,
        **{"scale": SCALE, "softcap": 5.0, "window": CAUSAL, "sizes": SQUARE, **more},
    )
    def fn(*args):
        return attend(make_scores(*args), args[2])


capped("softcap", lambda q, k, v: masked(5.0 * jnp.tanh(dots(q, k) * SCALE / 5.0)))
capped(
    "softcap_gemma",
    lambda q, k, v: masked(
        jnp.tanh(dots(q * SCALE, k) / 5.0) * 5.0, fill=-2.3819763e38
    ),
)
capped(
    "softcap_reciprocal",
    lambda q, k, v: masked(5.0 * jnp.tanh(dots(q, k) * (SCALE / 5.0))),
)
capped(
    "softcap_no_mask",
    lambda q, k, v: 5.0 * jnp.tanh(dots(q, k) * SCALE / 5.0),
    window=ANY,
)
capped(
    "softcap_bias",
    lambda q, k, v, x: masked(5.0 * jnp.tanh(dots(q, k) * SCALE / 5.0) + x),
    inputs=dict(**QKV, bias="nts"),
    operands=BIASED,
)
capped(
    "softcap_no_scale",
    lambda q, k, v: masked(30.0 * jnp.tanh(dots(q, k) / 30.0)),
    scale=1.0,
    softcap=30.0,
)
capped(
    "softcap_by_sigmoid",
    lambda q, k, v: masked(
        5.0 * (2.0 * jax.nn.sigmoid(dots(q, k) * (SCALE / 2.5)) - 1.0)
    ),
    count=None,
)
capped(
    "softcap_after_mask",
    lambda q, k, v: masked(5.0 * jnp.tanh(masked(dots(q, k) * SCALE, fill=0.0) / 5.0)),
    count=None,
)
