"""Attention: as libraries write it."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.spellings.attention.pieces import (
    CAUSAL,
    GROUPED,
    HEADS_FIRST,
    NEGATIVE,
    PLAIN,
    QKV,
    SCALE,
    SQUARE,
    B,
    E,
    G,
    H,
    K,
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


def from_library(name, inputs=QKV, out="btne", **more):
    return spelling(f"library/{name}", inputs=inputs, out=out, **{**PLAIN, **more})


@from_library(
    "flax_linen",
    dict(**QKV, mask=booleans("b1ts")),
    operands="q k v mask",
    masked_rows="mean",
)
def _(q, k, v, mask):
    depth = q.shape[-1]
    q = q / jnp.sqrt(depth).astype(q.dtype)
    s = jnp.einsum("...qhd,...khd->...hqk", q, k)
    s = jnp.where(mask, s, jnp.finfo(q.dtype).min)
    p = jax.nn.softmax(s).astype(q.dtype)
    return jnp.einsum("...hqk,...khd->...qhd", p, v)


@from_library("flax_linen_causal", window=CAUSAL, sizes=SQUARE)
def _(q, k, v):
    x = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    mask = jnp.greater_equal(x[..., :, None], x[..., None, :])
    mask = jnp.expand_dims(mask, -3).astype(jnp.float32)
    q = q / jnp.sqrt(H).astype(q.dtype)
    s = jnp.einsum("...qhd,...khd->...hqk", q, k)
    s = jnp.where(mask, s, jnp.finfo(q.dtype).min)
    return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(s), v)


@from_library(
    "hugging_face_flax_gpt2",
    dict(**QKV, mask=booleans("bs", dtype=np.int32)),
    operands="q k v mask",
    masked_rows="mean",
    window=CAUSAL,
    sizes=SQUARE,
)
def _(q, k, v, mask):
    allowed = jnp.tril(jnp.ones((1, 64), bool) & jnp.ones((64, 64), bool))
    allowed = jnp.broadcast_to(allowed[None, None, :T, :T], (B, 1, T, T))
    mask = jnp.broadcast_to(jnp.expand_dims(mask, (-3, -2)), allowed.shape)
    mask = jnp.logical_and(mask, allowed)
    bias = lax.select(
        mask > 0,
        jnp.full(mask.shape, 0.0).astype(q.dtype),
        jnp.full(mask.shape, jnp.finfo(q.dtype).min).astype(q.dtype),
    )
    q = q / jnp.sqrt(H).astype(q.dtype)
    s = jnp.einsum("...qhd,...khd->...hqk", q, k) + bias
    return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(s).astype(q.dtype), v)


@from_library("haiku", window=CAUSAL, sizes=SQUARE)
def _(q, k, v):
    s = jnp.einsum("...thd,...Thd->...htT", q, k)
    s = s / np.sqrt(H)
    mask = np.tril(np.ones((1, 1, T, T)))
    s = jnp.where(mask, s, -1e30)
    return jnp.einsum("...htT,...Thd->...thd", jax.nn.softmax(s), v)


@from_library(
    "equinox",
    dict(q="tnh", k="snh", v="sne", mask=booleans("ts")),
    "tne",
    operands="q k v mask",
    masked_rows="mean",
)
def _(q, k, v, mask):
    def one(q, k, v):
        q = q / math.sqrt(q.shape[-1])
        s = jnp.einsum("sd,Sd->sS", q, k)
        s = jnp.where(mask, s, jnp.finfo(s.dtype).min)
        with jax.numpy_dtype_promotion("standard"):
            p = jax.nn.softmax(s.astype(jnp.float32), axis=-1).astype(s.dtype)
        return jnp.einsum("sS,Sd->sd", p, v)

    return jax.vmap(one, in_axes=1, out_axes=1)(q, k, v)


@from_library(
    "keras_einsum",
    dict(**QKV, mask=booleans("bts")),
    operands="q k v mask",
    masked_rows="mean",
    also=[dict(operands="q k v bias", scale=SCALE, empty_rows=None)],
)
def _(q, k, v, mask):
    q = jnp.multiply(q, 1.0 / math.sqrt(float(H)))
    s = jnp.einsum("aecd,abcd->acbe", k, q)
    mask = jnp.expand_dims(mask, -3)
    adder = (1.0 - mask.astype(s.dtype)) * -1e9
    return jnp.einsum("acbe,aecd->abcd", jax.nn.softmax(s + adder, axis=-1), v)


@from_library("maxtext", GROUPED, scale=1.0, window=CAUSAL, sizes=SQUARE)
def _(q, k, v):
    q = q.reshape(B, T, K, G, H)
    s = jnp.einsum("btkgd,bskd->bkgts", q, k)
    row = lax.broadcasted_iota(jnp.int32, (T, T), 0)
    column = lax.broadcasted_iota(jnp.int32, (T, T), 1)
    keep = (column <= row)[None, None, None]
    low = -0.7 * float(np.finfo(np.dtype("float32")).max)
    bias = jnp.where(keep, 0.0, low)
    s = jnp.where(bias >= low * 0.5, s, low)
    top = jnp.max(s, axis=-1, keepdims=True)
    e = jnp.exp(s - top)
    total = jnp.sum(e, axis=-1, keepdims=True)
    total = jnp.moveaxis(total, -2, 1).reshape(B, T, N, 1)
    out = jnp.einsum("bkgts,bske->btkge", e, v).reshape(B, T, N, E)
    return out / total


@from_library(
    "maxtext_decode_parts",
    dict(**QKV, k2="b7nh", v2="b7ne"),
    bind=lambda q, k, v, a, b: dict(
        q=q, k=jnp.concatenate([k, a], 1), v=jnp.concatenate([v, b], 1)
    ),
    count=None,
)
def _(q, k, v, k2, v2):
    def part(k, v):
        s = dots(q, k) * SCALE
        top = s.max(-1, keepdims=True)
        e = jnp.exp(s - top)
        return weigh(e, v), top, e.sum(-1, keepdims=True)

    def turn(x):
        return x.transpose(0, 2, 1, 3)

    (o1, m1, l1), (o2, m2, l2) = part(k, v), part(k2, v2)
    m = jnp.maximum(m1, m2)
    w1, w2 = jnp.exp(m1 - m), jnp.exp(m2 - m)
    return (o1 * turn(w1) + o2 * turn(w2)) / turn(l1 * w1 + l2 * w2)


@from_library("gemma2", GROUPED, window=(7, 0), softcap=50.0, sizes=SQUARE)
def _(q, k, v):
    q = (q * SCALE).reshape(B, T, K, G, H)
    s = jnp.einsum("BTKGH,BSKH->BTKGS", q, k).reshape(B, T, N, T)
    s = jnp.tanh(s / 50.0) * 50.0
    allowed = jnp.tril(jnp.ones((1, T, T), bool))
    ones = jnp.ones_like(allowed)
    sliding = jnp.triu(ones, -7) * jnp.tril(ones, 7)
    allowed = sliding * allowed
    s = jnp.where(jnp.expand_dims(allowed, -2), s, -2.3819763e38)
    p = jax.nn.softmax(s, axis=-1).astype(k.dtype).reshape(B, T, K, G, T)
    return jnp.einsum("BTKGS,BSKH->BTKGH", p, v).reshape(B, T, N, E)


@from_library(
    "t5x",
    dict(**QKV, bias="1nts"),
    operands="q k v bias",
    scale=1.0,
    window=CAUSAL,
    sizes=SQUARE,
)
def _(q, k, v, bias):
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    mask = lax.select(
        causal()[None, None],
        jnp.full((1, 1, T, T), 0.0),
        jnp.full((1, 1, T, T), -1e10),
    )
    s = s + (bias + mask).astype(s.dtype)
    p = jax.nn.softmax(s).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


@from_library(
    "big_vision_gemma",
    dict(**GROUPED, mask=booleans("b1ts")),
    operands="q k v mask",
    masked_rows="mean",
)
def _(q, k, v, mask):
    q = (q * SCALE).reshape(B, T, K, G, H)
    s = jnp.einsum("BTKGH,BSKH->BKGTS", q, k, preferred_element_type=jnp.float32)
    s = jnp.where(mask[:, :, None, :, :], s, -2.3819763e38)
    p = jax.nn.softmax(s, axis=-1).astype(k.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", p, v).reshape(B, T, N, E)


@from_library(
    "penzai",
    dict(q="tbnh", k="bskh", v="bske"),
    "",
    sizes=dict(n=K),
    bind=lambda q, k, v: dict(q=q.swapaxes(0, 1), k=k, v=v),
    read=lambda o: o.transpose(1, 0, 2, 3),
)
def _(q, k, v):
    # Named axes leave the arrays in any order.
    s = jnp.einsum("tbnh,bsnh->tbns", q, k) * jnp.array(SCALE, q.dtype)
    p = jax.nn.softmax(jnp.array(s.transpose(3, 1, 0, 2)), axis=0)
    return jnp.einsum("sbtn,bsne->tbne", p, v)


@from_library(
    "alphafold_gated",
    dict(**QKV, mask=booleans("bs", dtype=np.float32), pair="nts"),
    operands="q k v bias mask",
    masked_rows="mean",
    also=[dict(operands="q k v bias", scale=SCALE, empty_rows=None)],
    bind=lambda q, k, v, m, x: dict(
        q=q, k=k, v=v, bias=x[None], mask=(m > 0)[:, None, None]
    ),
)
def _(q, k, v, mask, pair):
    bias = (1e9 * (mask - 1.0))[:, None, None, :]
    s = jnp.einsum("bqhc,bkhc->bhqk", q * H ** (-0.5), k) + bias
    s = s + jnp.expand_dims(pair, 0)
    return jnp.einsum("bhqk,bkhc->bqhc", jax.nn.softmax(s), v)


@from_library("torch_math", HEADS_FIRST, "bnte", window=CAUSAL, sizes=SQUARE)
def _(q, k, v):
    # Scaled_dot_product_attention after torch.export, as a bridge runs it.
    mask = jnp.tril(jnp.ones((T, T), bool), 0)
    bias = jnp.where(jnp.logical_not(mask), -jnp.inf, jnp.zeros((T, T), q.dtype))
    root = math.sqrt(SCALE)
    q = jnp.broadcast_to(q * root, q.shape).reshape(B * N, T, H)
    k = (jnp.transpose(k, (0, 1, 3, 2)) * root).reshape(B * N, H, T)
    s = jnp.matmul(q, k).reshape(B, N, T, T) + bias
    p = jax.nn.softmax(s, axis=-1)
    empty = jnp.logical_not(jnp.any(jnp.logical_not(s == -jnp.inf), -1, keepdims=True))
    p = jnp.where(empty, jnp.zeros_like(p), p).reshape(B * N, T, T)
    return jnp.matmul(p, v.reshape(B * N, T, E)).reshape(B, N, T, E)


@from_library(
    "torch_repeat_kv",
    dict(q="bnth", k="bksh", v="bkse"),
    "bnte",
    window=CAUSAL,
    sizes=SQUARE,
)
def _(q, k, v):
    def repeat_kv(x):
        x = jnp.broadcast_to(x[:, :, None], (B, K, G, T, x.shape[-1]))
        return x.reshape(B, N, T, x.shape[-1])

    k, v = repeat_kv(k), repeat_kv(v)
    s = jnp.matmul(q, k.transpose(0, 1, 3, 2)) * SCALE
    i = jnp.arange(T)
    bias = jnp.full((T, T), NEGATIVE) * (i[None] > i[:, None])
    s = s + jnp.triu(bias, 1)[None, None].astype(q.dtype)
    p = jax.nn.softmax(s.astype(jnp.float32), axis=-1).astype(q.dtype)
    return jnp.matmul(p, v)


@from_library(
    "diffusers_flattened",
    dict(q="bth", k="bsh", v="bse"),
    "",
    sizes=dict(h=N * H, e=N * E),
    bind=lambda q, k, v: dict(
        q=q.reshape(B, T, N, H), k=k.reshape(B, S, N, H), v=v.reshape(B, S, N, E)
    ),
    read=lambda o: o.reshape(B, T, N, E),
)
def _(q, k, v):
    def heads_to_batch(x):
        x = x.reshape(B, x.shape[1], N, -1).transpose(0, 2, 1, 3)
        return x.reshape(B * N, *x.shape[2:])

    q, k, v = map(heads_to_batch, (q, k, v))
    s = jnp.einsum("b i d, b j d->b i j", q, k) * SCALE
    out = jnp.einsum("b i j, b j d -> b i d", jax.nn.softmax(s, axis=-1), v)
    out = out.reshape(B, N, T, E).transpose(0, 2, 1, 3)
    return out.reshape(B, T, N * E)


@from_library("jitted_parts", window=CAUSAL, sizes=SQUARE)
def _(q, k, v):
    scores = jax.jit(lambda q, k: dots(q, k) * SCALE)(q, k)
    probs = jax.jit(jax.nn.softmax)(jax.jit(masked)(scores))
    return jax.jit(weigh)(probs, v)


@from_library("checkpoint_names", window=CAUSAL, sizes=SQUARE)
def _(q, k, v):
    from jax.ad_checkpoint import checkpoint_name

    q = checkpoint_name(q, "query")
    s = masked(dots(q, checkpoint_name(k, "key")) * SCALE)
    return checkpoint_name(attend(s, checkpoint_name(v, "value")), "out")


@from_library("rematerialised_parts", window=CAUSAL, sizes=SQUARE)
def _(q, k, v):
    probs = jax.checkpoint(lambda q, k: jax.nn.softmax(masked(dots(q, k) * SCALE)))
    return weigh(probs(q, k), v)


@from_library("custom_jvp_softmax", window=CAUSAL, sizes=SQUARE, count=0)
def _(q, k, v):
    return weigh(softmax_with_rule(masked(dots(q, k) * SCALE)), v)


@jax.custom_jvp
def softmax_with_rule(s):
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@softmax_with_rule.defjvp
def _(primals, tangents):
    p = softmax_with_rule(*primals)
    t = jnp.where(p == 0, 0.0, tangents[0])
    return p, p * (t - (p * t).sum(-1, keepdims=True))


@from_library("named_scope_and_precision", window=CAUSAL, sizes=SQUARE)
def _(q, k, v):
    with jax.named_scope("attention"):
        s = jnp.einsum("btnh,bsnh->bnts", q, k, precision=lax.Precision.HIGHEST)
        p = jax.nn.softmax(masked(s * SCALE))
        return jnp.einsum("bnts,bsne->btne", p, v, precision="float32")


@from_library(
    "two_sites",
    dict(**QKV, w="bsne"),
    count=2,
    sizes=dict(h=H, e=H),
    window=CAUSAL,
    bind=lambda q, k, v, w: dict(
        q=attend(jnp.where(causal(T, S), dots(q, k) * SCALE, -jnp.inf), v), k=k, v=w
    ),
)
def _(q, k, v, w):
    q = attend(jnp.where(causal(T, S), dots(q, k) * SCALE, -jnp.inf), v)
    return attend(jnp.where(causal(T, S), dots(q, k) * SCALE, -jnp.inf), w)
