"""Attention: groups of query heads that share a key head."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from tests.spellings.attention.pieces import (
    CAUSAL,
    GROUPED,
    NEGATIVE,
    PLAIN,
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
)


def grouped(name, inputs=GROUPED, out="btne", **more):
    return spelling(f"heads/{name}", inputs=inputs, out=out, **{**PLAIN, **more})


@grouped("repeat")
def _(q, k, v):
    k, v = jnp.repeat(k, G, axis=2), jnp.repeat(v, G, axis=2)
    return attend(dots(q, k) * SCALE, v)


@grouped("repeat_causal", window=CAUSAL, sizes=SQUARE)
def _(q, k, v):
    k, v = jnp.repeat(k, N // K, axis=-2), jnp.repeat(v, N // K, axis=-2)
    return attend(masked(dots(q, k) * SCALE, fill=NEGATIVE), v)


@grouped("broadcast_and_reshape")
def _(q, k, v):
    k = jnp.broadcast_to(k[:, :, :, None], (B, S, K, G, H)).reshape(B, S, N, H)
    v = jnp.broadcast_to(v[:, :, :, None], (B, S, K, G, E)).reshape(B, S, N, E)
    return attend(dots(q, k) * SCALE, v)


@grouped("stack")
def _(q, k, v):
    k = jnp.stack([k, k], axis=3).reshape(B, S, N, H)
    v = jnp.stack([v, v], axis=3).reshape(B, S, N, E)
    return attend(dots(q, k) * SCALE, v)


@grouped("gather")
def _(q, k, v):
    heads = np.arange(N) // G
    return attend(dots(q, k[:, :, heads]) * SCALE, v[:, :, heads])


@grouped("einsum_with_group")
def _(q, k, v):
    q = q.reshape(B, T, K, G, H)
    s = jnp.einsum("btkgh,bskh->bkgts", q * SCALE, k)
    return jnp.einsum("bkgts,bske->btkge", jax.nn.softmax(s), v).reshape(B, T, N, E)


@grouped("einsum_gemma", window=CAUSAL, sizes=SQUARE)
def _(q, k, v):
    q = q.reshape(B, T, K, G, H) * SCALE
    s = jnp.einsum("BTKGH,BSKH->BTKGS", q, k)
    keep = jnp.tril(jnp.ones((T, T), bool))[None, :, None, None, :]
    p = jax.nn.softmax(jnp.where(keep, s, -2.3819763e38)).astype(k.dtype)
    return jnp.einsum("BTKGS,BSKE->BTKGE", p, v).reshape(B, T, N, E)


@grouped("einsum_keys_first", window=CAUSAL, sizes=SQUARE)
def _(q, k, v):
    q = q.reshape(B, T, K, G, H) * SCALE
    s = jnp.einsum("bskh,btkgh->bkgts", k, q)
    p = jax.nn.softmax(jnp.where(causal(), s, -1e30))
    return jnp.einsum("bske,bkgts->btkge", v, p).reshape(B, T, N, E)


@grouped("middle_axis")
def _(q, k, v):
    q = q.reshape(B, T, K, G, H)
    s = jnp.einsum("btkgh,bskh->btskg", q, k) * SCALE
    p = jax.nn.softmax(s, axis=2)
    return jnp.einsum("btskg,bske->btkge", p, v).reshape(B, T, N, E)


@grouped("heads_first_broadcast", dict(q="bnth", k="bksh", v="bkse"), "bnte")
def _(q, k, v):
    q = q.reshape(B, K, G, T, H)
    s = q @ k[:, :, None].swapaxes(-1, -2) * SCALE
    return (jax.nn.softmax(s) @ v[:, :, None]).reshape(B, N, T, E)


@grouped("heads_first_group_in_rows", dict(q="bnth", k="bksh", v="bkse"), "bnte")
def _(q, k, v):
    # All query heads of a group share the rows of one matrix product.
    q = q.reshape(B, K, G * T, H)
    p = jax.nn.softmax(q @ k.swapaxes(-1, -2) * SCALE)
    return (p @ v).reshape(B, N, T, E)


@grouped(
    "llama_jax",
    dict(q="btkgh", k="bskh", v="bske"),
    "",
    window=CAUSAL,
    sizes=SQUARE,
    bind=lambda q, k, v: dict(q=q.reshape(B, T, N, H), k=k, v=v),
    read=lambda o: o.reshape(B, T, N, E),
)
def _(q, k, v):
    s = jnp.einsum("bthrd,bshd->bhrts", q, k) / math.sqrt(H)
    p = jax.nn.softmax(jnp.where(causal(), s, -jnp.inf), axis=-1)
    p = jnp.where(causal(), p, 0)
    return jnp.einsum("bhrts,bshe->bthre", p, v)


@grouped("library", sizes=dict(e=H))
def _(q, k, v):
    return jax.nn.dot_product_attention(q, k, v)


@grouped("library_causal", window=CAUSAL, sizes=dict(e=H, s=T))
def _(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@grouped("library_one_kv_head", sizes=dict(e=H, k=1))
def _(q, k, v):
    return jax.nn.dot_product_attention(q, k, v)


@grouped("vmapped_groups")
def _(q, k, v):
    def one(q, k, v):
        return jax.nn.softmax(jnp.einsum("bth,bsh->bts", q, k) * SCALE) @ v

    q = q.reshape(B, T, K, G, H)
    inner = jax.vmap(one, in_axes=(2, None, None), out_axes=2)
    out = jax.vmap(inner, in_axes=(2, 2, 2), out_axes=2)(q, k, v)
    return out.reshape(B, T, N, E)


@grouped(
    "one_kv_head",
    dict(q="btnh", k="bsh", v="bse"),
    bind=lambda q, k, v: dict(q=q, k=k[:, :, None], v=v[:, :, None]),
)
def _(q, k, v):
    # PaLM: a single key and value head.
    s = jnp.einsum("btnh,bsh->bnts", q * SCALE, k)
    return jnp.einsum("bnts,bse->btne", jax.nn.softmax(s), v)


@grouped("one_kv_head_unit_axis", sizes=dict(k=1))
def _(q, k, v):
    return attend(jnp.einsum("btnh,bszh->bnts", q * SCALE, k), jnp.repeat(v, N, 2))


@grouped(
    "keys_are_values",
    dict(q="btnh", k="bsh"),
    "",
    bind=lambda q, k: dict(q=q, k=k[:, :, None], v=k[:, :, None]),
)
def _(q, k):
    s = jnp.einsum("btnh,bsh->bnts", q * SCALE, k)
    return jnp.einsum("bnts,bsh->btnh", jax.nn.softmax(s), k)


@grouped(
    "queries_are_keys",
    dict(q="btnh", v="btne"),
    sizes=SQUARE,
    bind=lambda q, v: dict(q=q, k=q, v=v),
)
def _(q, v):
    return attend(dots(q, q) * SCALE, v)


@grouped(
    "all_one_value",
    dict(q="btnh"),
    "",
    bind=lambda q: dict(q=q, k=q, v=q),
    window=CAUSAL,
)
def _(q):
    return attend(masked(dots(q, q) * SCALE), q)


def regroup(x):
    """Heads r·K + k in the order k·G + r."""
    return x.reshape(*x.shape[:2], G, K, -1).swapaxes(2, 3).reshape(*x.shape[:2], N, -1)


def tiled(name):
    return grouped(
        name,
        out="",
        bind=lambda q, k, v: dict(q=regroup(q), k=k, v=v),
        read=regroup,
        also=[PLAIN],
    )


@tiled("tile")
def _(q, k, v):
    k, v = jnp.tile(k, (1, 1, G, 1)), jnp.tile(v, (1, 1, G, 1))
    return attend(dots(q, k) * SCALE, v)


@tiled("concatenated")
def _(q, k, v):
    k, v = jnp.concatenate([k] * G, 2), jnp.concatenate([v] * G, 2)
    return attend(dots(q, k) * SCALE, v)


@tiled("interleaved_einsum")
def _(q, k, v):
    q = q.reshape(B, T, G, K, H)
    s = jnp.einsum("btrkh,bskh->brkts", q, k) * SCALE
    return jnp.einsum("brkts,bske->btrke", jax.nn.softmax(s), v).reshape(B, T, N, E)


@grouped("group_bias", dict(**GROUPED, bias="nts"), operands="q k v bias")
def _(q, k, v, bias):
    s = jnp.einsum("btkgh,bskh->bkgts", q.reshape(B, T, K, G, H), k) * SCALE
    s = s + bias.reshape(K, G, T, S)
    out = jnp.einsum("bkgts,bske->btkge", jax.nn.softmax(s), v)
    return out.reshape(B, T, N, E)


@grouped(
    "group_sinks",
    dict(**GROUPED, sinks="n"),
    operands="q k v sinks",
    window=(5, 0),
    sizes=SQUARE,
)
def _(q, k, v, sinks):
    # GPT-OSS.
    q = q.reshape(B, T, K, G, H)
    s = jnp.einsum("bqhmd,bkhd->bhmqk", q, k) * SCALE
    bias = jnp.triu(jnp.full((T, T), -jnp.inf), 1)
    bias = bias + jnp.tril(jnp.full((T, T), -jnp.inf), -6)
    column = jnp.broadcast_to(sinks.reshape(K, G, 1, 1), (B, K, G, T, 1))
    p = jax.nn.softmax(jnp.concatenate([s + bias, column], -1), axis=-1)
    return jnp.einsum("bhmqk,bkhe->bqhme", p[..., :-1], v).reshape(B, T, N, E)
