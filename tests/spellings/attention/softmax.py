"""Attention: the ways to write a softmax, to guard it and to give it a sink."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.spellings.attention.pieces import (
    CAUSAL,
    NEGATIVE,
    QKV,
    SCALE,
    SQUARE,
    B,
    E,
    H,
    N,
    S,
    T,
    attend,
    causal,
    dots,
    masked,
    spelling,
    weigh,
)
from tests.spellings.spelling import booleans


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
    assume=("finite",),  # it overflows otherwise than a softmax
)
softened(
    "upcast",
    lambda s: jax.nn.softmax(s.astype(jnp.float32)).astype(s.dtype),
)
softened(
    "shifted_by_constant",
    lambda s: divided(jnp.exp(s - 5.0)),
    assume=("finite",),
)
softened(
    "shifted_by_mean",
    lambda s: divided(jnp.exp(s - jnp.mean(jnp.where(causal(), s, 0), -1)[..., None])),
    assume=("finite",),
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


@guard("guard_scores_all_minus_infinity", "zero_nan")
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
