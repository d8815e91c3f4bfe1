"""Attention in other layouts, with groups of heads, caches, dropout, projections.

Families: layout, heads, decode, dropout, escape, library.
"""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.spellings.attention import (
    CAUSAL,
    GROUPED,
    HEADS_FIRST,
    NEGATIVE,
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
    weigh,
)
from tests.spellings.spelling import (
    Input,
    booleans,
    collect,
    given,
    integers,
    key,
    positive,
)

SPELLINGS, spelling = collect("attention")

PLAIN = dict(operands="q k v", scale=SCALE)


# ----------------------------------------------------------------- layout
def laid(name, inputs, out, **more):
    return spelling(f"layout/{name}", inputs=inputs, out=out, **{**PLAIN, **more})


@laid("heads_first", HEADS_FIRST, "bnte")
def _(q, k, v):
    return jax.nn.softmax(q @ k.swapaxes(-1, -2) * SCALE) @ v


@laid("heads_first_matmul", HEADS_FIRST, "bnte", window=CAUSAL, sizes=SQUARE)
def _(q, k, v):
    # NanoGPT.
    s = jnp.matmul(q, jnp.swapaxes(k, -2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
    mask = jnp.tril(jnp.ones((64, 64))).reshape(1, 1, 64, 64)
    s = jnp.where(mask[:, :, :T, :T] == 0, float("-inf"), s)
    return jnp.matmul(jax.nn.softmax(s, axis=-1), v)


@laid("heads_first_einsum", HEADS_FIRST, "bnte")
def _(q, k, v):
    s = jnp.einsum("bhid,bhjd->bhij", q, k) * SCALE
    return jnp.einsum("bhij,bhjd->bhid", jax.nn.softmax(s), v)


@laid("heads_first_dot_general", HEADS_FIRST, "bnte")
def _(q, k, v):
    s = lax.dot_general(q, k, (((3,), (3,)), ((0, 1), (0, 1))))
    p = jax.nn.softmax(s * SCALE)
    return lax.dot_general(p, v, (((3,), (2,)), ((0, 1), (0, 1))))


@laid("transposed_in_and_out", QKV, "btne", window=CAUSAL, sizes=SQUARE)
def _(q, k, v):
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    s = (q @ k.swapaxes(-1, -2)) / math.sqrt(H)
    return (jax.nn.softmax(masked(s)) @ v).transpose(0, 2, 1, 3)


@laid("swapaxes", QKV, "btne")
def _(q, k, v):
    q, v = jnp.swapaxes(q, 1, 2), jnp.swapaxes(v, 1, 2)
    k = jnp.transpose(k, (0, 2, 3, 1))
    return jnp.swapaxes(jax.nn.softmax(jnp.matmul(q * SCALE, k)) @ v, 1, 2)


@laid("dot_dimension_numbers", QKV, "bnte")
def _(q, k, v):
    s = lax.dot_general(q, k, (((3,), (3,)), ((0, 2), (0, 2)))) * SCALE
    return lax.dot_general(jax.nn.softmax(s), v, (((3,), (1,)), ((0, 1), (0, 2))))


@laid("operands_exchanged", QKV, "bnet")
def _(q, k, v):
    s = jnp.einsum("bsnh,btnh->bnst", k, q).swapaxes(2, 3) * SCALE
    p = jax.nn.softmax(s)
    return lax.dot_general(v, p, (((1,), (3,)), ((0, 2), (0, 1))))


@laid("scores_transposed", QKV, "btne")
def _(q, k, v):
    s = jnp.einsum("bsnh,btnh->bnst", k, q) * SCALE
    return jnp.einsum("bnst,bsne->btne", jax.nn.softmax(s, axis=2), v)


@laid("heads_last", QKV, "btne")
def _(q, k, v):
    s = jnp.einsum("btnh,bsnh->btsn", q, k) * SCALE
    return jnp.einsum("btsn,bsne->btne", jax.nn.softmax(s, axis=2), v)


@laid("flattened", QKV, "btne")
def _(q, k, v):
    q, k, v = (
        x.transpose(0, 2, 1, 3).reshape(B * N, x.shape[1], x.shape[3])
        for x in (q, k, v)
    )
    p = jax.nn.softmax(lax.batch_matmul(q, k.transpose(0, 2, 1)) * SCALE)
    return lax.batch_matmul(p, v).reshape(B, N, T, E).transpose(0, 2, 1, 3)


@laid("flattened_causal", HEADS_FIRST, "bnte", window=CAUSAL, sizes=SQUARE)
def _(q, k, v):
    q, k, v = (x.reshape(B * N, *x.shape[2:]) for x in (q, k, v))
    s = jnp.einsum("zth,zsh->zts", q, k) * SCALE
    p = jax.nn.softmax(jnp.where(causal()[None], s, -1e9))
    return jnp.einsum("zts,zse->zte", p, v).reshape(B, N, T, E)


@laid(
    "flattened_inputs",
    dict(q="bth", k="bsh", v="bse"),
    "",
    read=lambda o: o[:, :, None],
    bind=lambda q, k, v: dict(q=q[:, :, None], k=k[:, :, None], v=v[:, :, None]),
)
def _(q, k, v):
    return jax.nn.softmax(jnp.einsum("bid,bjd->bij", q, k) * SCALE) @ v


@laid("time_first", dict(q="tbnh", k="sbnh", v="sbne"), "tbne")
def _(q, k, v):
    s = jnp.einsum("tbnh,sbnh->bnts", q, k) * SCALE
    return jnp.einsum("bnts,sbne->tbne", jax.nn.softmax(s), v)


@laid("unbatched", dict(q="tnh", k="snh", v="sne"), "tne")
def _(q, k, v):
    s = jnp.einsum("tnh,snh->nts", q, k) * SCALE
    return jnp.einsum("nts,sne->tne", jax.nn.softmax(s), v)


@laid("one_head", dict(q="th", k="sh", v="se"), "te", window=CAUSAL, sizes=SQUARE)
def _(q, k, v):
    s = q @ k.T / math.sqrt(H)
    return jax.nn.softmax(jnp.where(causal(), s, -jnp.inf), axis=-1) @ v


@laid("vmapped_heads_and_batch", QKV, "btne", window=CAUSAL, sizes=SQUARE)
def _(q, k, v):
    def one(q, k, v):
        return jax.nn.softmax(masked(q @ k.T * SCALE)) @ v

    return jax.vmap(jax.vmap(one, in_axes=1, out_axes=1))(q, k, v)


@laid("vmapped_batch", QKV, "btne")
def _(q, k, v):
    def one(q, k, v):
        s = jnp.einsum("tnh,snh->nts", q, k) * SCALE
        return jnp.einsum("nts,sne->tne", jax.nn.softmax(s), v)

    return jax.vmap(one)(q, k, v)


@laid("vmapped_heads", QKV, "btne")
def _(q, k, v):
    def one(q, k, v):
        return jax.nn.softmax(jnp.einsum("bth,bsh->bts", q, k) * SCALE) @ v

    return jax.vmap(one, in_axes=2, out_axes=2)(q, k, v)


@laid("vmapped_queries", QKV, "btne")
def _(q, k, v):
    def one(row, k, v):  # equinox style: a single query against all keys
        return jax.nn.softmax(k @ row * SCALE) @ v

    def head(q, k, v):
        return jax.vmap(one, in_axes=(0, None, None))(q, k, v)

    return jax.vmap(jax.vmap(head, in_axes=1, out_axes=1))(q, k, v)


@laid("vectorized", HEADS_FIRST, "bnte")
def _(q, k, v):
    def one(q, k, v):
        return jax.nn.softmax(q @ k.T * SCALE) @ v

    return jnp.vectorize(one, signature="(t,h),(s,h),(s,e)->(t,e)")(q, k, v)


@laid("library", QKV, "btne", sizes=dict(e=H))
def _(q, k, v):
    return jax.nn.dot_product_attention(q, k, v)


@laid("library_causal", QKV, "btne", window=CAUSAL, sizes=dict(e=H, s=T))
def _(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@laid("library_window", QKV, "btne", window=(4, 0), sizes=dict(e=H, s=T))
def _(q, k, v):
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=True, local_window_size=(4, 0)
    )


@laid("library_two_sided", QKV, "btne", window=(4, 2), sizes=dict(e=H, s=T))
def _(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, local_window_size=(4, 2))


@laid(
    "library_mask",
    dict(**QKV, mask=booleans("b1ts")),
    "btne",
    operands="q k v mask",
    masked_rows="mean",
    sizes=dict(e=H),
)
def _(q, k, v, mask):
    return jax.nn.dot_product_attention(q, k, v, mask=mask)


@laid("unit_axes", QKV, "btne")
def _(q, k, v):
    q = q.reshape(B, T, N, 1, H)
    s = jnp.einsum("BTKGH,BSKH->BKGTS", q, k) * SCALE
    return jnp.einsum("BKGTS,BSKE->BTKGE", jax.nn.softmax(s), v).reshape(B, T, N, E)


@laid("batch_one", QKV, "btne", sizes=dict(b=1))
def _(q, k, v):
    return attend(dots(q, k) * SCALE, v)


@laid("batch_one_squeezed", QKV, "btne", sizes=dict(b=1))
def _(q, k, v):
    s = jnp.einsum("tnh,snh->nts", q[0], k.squeeze(0)) * SCALE
    return jnp.einsum("nts,sne->tne", jax.nn.softmax(s), v[0])[None]


@laid("heads_one", QKV, "btne", sizes=dict(n=1))
def _(q, k, v):
    return attend(dots(q, k) * SCALE, v)


@laid("one_query", QKV, "btne", sizes=dict(t=1))
def _(q, k, v):
    return attend(dots(q, k) * SCALE, v)


@laid("one_query_squeezed", dict(q="bnh", k="bsnh", v="bsne"), "bne")
def _(q, k, v):
    s = jnp.einsum("bnh,bsnh->bns", q, k) * SCALE
    return jnp.einsum("bns,bsne->bne", jax.nn.softmax(s), v)


@laid("width_one", QKV, "btne", sizes=dict(h=1), count=None)
def _(q, k, v):
    return attend(dots(q, k) * SCALE, v)


@laid("all_sizes_equal", QKV, "btne", sizes=dict(b=4, t=4, s=4, n=4, h=4, e=4))
def _(q, k, v):
    return attend(dots(q, k) * SCALE, v)


@laid("keys_stored_transposed", dict(q="bnth", k="bnhs", v="bnse"), "bnte")
def _(q, k, v):
    return jax.nn.softmax(q @ k * SCALE) @ v


@laid("values_stored_transposed", dict(q="bnth", k="bnsh", v="bnes"), "bnet")
def _(q, k, v):
    p = jax.nn.softmax(jnp.einsum("bnth,bnsh->bnts", q, k) * SCALE)
    return v @ p.swapaxes(-1, -2)


@laid("values_narrow", QKV, "btne", sizes=dict(e=3))
def _(q, k, v):
    return attend(dots(q, k) * SCALE, v)


@laid("values_wide", QKV, "btne", sizes=dict(e=32))
def _(q, k, v):
    return attend(dots(q, k) * SCALE, v)


@laid("output_merged", QKV, "", read=lambda o: o.reshape(B, T, N, E))
def _(q, k, v):
    return attend(dots(q, k) * SCALE, v).reshape(B, T, N * E)


@laid(
    "split_from_merged",
    dict(q="bth", k="bsh", v="bse"),
    "",
    sizes=dict(h=N * H, e=N * E),
    bind=lambda q, k, v: dict(
        q=q.reshape(B, T, N, H), k=k.reshape(B, S, N, H), v=v.reshape(B, S, N, E)
    ),
    read=lambda o: o.reshape(B, T, N, E),
)
def _(q, k, v):
    q, k, v = (x.reshape(B, x.shape[1], N, -1) for x in (q, k, v))
    return attend(dots(q, k) * SCALE, v).reshape(B, T, N * E)


@laid(
    "split_heads_major",
    dict(q="bth", k="bsh", v="bse"),
    "",
    sizes=dict(h=N * H, e=N * E),
    bind=lambda q, k, v: dict(
        q=q.reshape(B, T, H, N).swapaxes(2, 3),
        k=k.reshape(B, S, H, N).swapaxes(2, 3),
        v=v.reshape(B, S, E, N).swapaxes(2, 3),
    ),
    read=lambda o: o.reshape(B, T, E, N).swapaxes(2, 3),
)
def _(q, k, v):
    q, k, v = (x.reshape(B, x.shape[1], -1, N) for x in (q, k, v))
    p = jax.nn.softmax(jnp.einsum("btdh,bsdh->bhts", q, k) * SCALE)
    return jnp.einsum("bhts,bsdh->btdh", p, v).reshape(B, T, N * E)


@laid("reshaped_between", QKV, "btne")
def _(q, k, v):
    s = (dots(q, k) * SCALE).reshape(B * N * T, S)
    p = jax.nn.softmax(s, -1).reshape(B, N, T, S)
    return weigh(p, v)


@laid("redundant_copies", QKV, "btne")
def _(q, k, v):
    q = jnp.array(q.swapaxes(1, 2)).swapaxes(1, 2)
    s = jnp.array(dots(q, jnp.array(k)) * SCALE)
    p = jax.nn.softmax(s.transpose(2, 3, 0, 1), axis=1).transpose(2, 3, 0, 1)
    return jnp.array(weigh(p, v))


@laid(
    "two_spatial_axes",
    dict(q="bgknh", k="bsnh", v="bsne"),
    "",
    sizes=dict(g=4, k=6),
    bind=lambda q, k, v: dict(q=q.reshape(B, T, N, H), k=k, v=v),
    read=lambda o: o.reshape(B, T, N, E),
)
def _(q, k, v):
    s = jnp.einsum("bxynh,bsnh->bnxys", q, k) * SCALE
    return jnp.einsum("bnxys,bsne->bxyne", jax.nn.softmax(s), v)


@laid(
    "two_batch_axes",
    dict(q="bgtnh", k="bgsnh", v="bgsne"),
    "",
    bind=lambda q, k, v: dict(
        q=q.reshape(B * G, T, N, H),
        k=k.reshape(B * G, S, N, H),
        v=v.reshape(B * G, S, N, E),
    ),
    read=lambda o: o.reshape(B * G, T, N, E),
)
def _(q, k, v):
    s = jnp.einsum("...qhd,...khd->...hqk", q, k) * SCALE
    return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(s), v)


@laid(
    "tokens_packed",
    dict(q="tnh", k="snh", v="sne", q_segments=integers("t", 0, 2)),
    "tne",
    operands="q k v q_segments kv_segments",
    window=CAUSAL,
    sizes=SQUARE,
    bind=lambda q, k, v, i: dict(
        q=q[None], k=k[None], v=v[None], q_segments=i[None], kv_segments=i[None]
    ),
)
def _(q, k, v, ids):
    s = jnp.einsum("tnh,snh->nts", q, k) * SCALE
    keep = (ids[:, None] == ids[None, :]) & causal()
    return jnp.einsum("nts,sne->tne", jax.nn.softmax(jnp.where(keep, s, -1e30)), v)


@laid(
    "rows_and_columns",
    dict(q="btsnh", k="btsnh", v="btsne"),
    "",
    sizes=dict(t=5, s=7),
    bind=lambda q, k, v: dict(
        q=q.reshape(10, 7, N, H), k=k.reshape(10, 7, N, H), v=v.reshape(10, 7, N, E)
    ),
    read=lambda o: o.reshape(10, 7, N, E),
)
def _(q, k, v):
    # AlphaFold: attention along one of two sequence axes.
    s = jnp.einsum("brqhc,brkhc->brhqk", q * SCALE, k)
    return jnp.einsum("brhqk,brkhc->brqhc", jax.nn.softmax(s), v)


@laid(
    "windows_of_image",
    dict(q="bthn", k="bthn", v="bthn"),
    "",
    sizes=dict(t=4, h=6, n=8),
    scale=8**-0.5,
    bind=lambda *x: dict(
        zip(
            "qkv",
            (
                a.reshape(B, 2, 2, 2, 3, 8)
                .transpose(0, 1, 3, 2, 4, 5)
                .reshape(8, 6, 1, 8)
                for a in x
            ),
            strict=True,
        )
    ),
    read=lambda o: (
        o.reshape(B, 2, 2, 2, 3, 8).transpose(0, 1, 3, 2, 4, 5).reshape(8, 6, 1, 8)
    ),
)
def _(q, k, v):
    # Swin: the image is cut into windows of 2 by 3, each attends to itself.
    def cut(x):
        x = x.reshape(B, 2, 2, 2, 3, 8).transpose(0, 1, 3, 2, 4, 5)
        return x.reshape(8, 6, 8)

    p = jax.nn.softmax(jnp.einsum("wqc,wkc->wqk", cut(q), cut(k)) * 8**-0.5)
    out = jnp.einsum("wqk,wkc->wqc", p, cut(v)).reshape(B, 2, 2, 2, 3, 8)
    return out.transpose(0, 1, 3, 2, 4, 5).reshape(B, 4, 6, 8)


# ------------------------------------------------------------------ heads
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


# ----------------------------------------------- projections and rotations
D = 20  # model width


def projected(name, inputs, bind, **more):
    return spelling(
        f"heads/{name}",
        inputs=inputs,
        bind=bind,
        **{**PLAIN, "window": CAUSAL, "sizes": dict(s=T, m=D), "out": "btne", **more},
    )


def project(x, w):
    return jnp.einsum("btm,mnh->btnh", x, w)


@projected(
    "projected_separately",
    dict(x="btm", wq="mnh", wk="mnh", wv="mne"),
    lambda x, wq, wk, wv: dict(q=project(x, wq), k=project(x, wk), v=project(x, wv)),
)
def _(x, wq, wk, wv):
    s = dots(project(x, wq), project(x, wk)) * SCALE
    return attend(masked(s), project(x, wv))


@projected(
    "projected_with_bias_and_output",
    dict(x="btm", wq="mnh", wk="mnh", wv="mne", bq="nh", bk="nh", bv="ne"),
    lambda x, wq, wk, wv, bq, bk, bv: dict(
        q=project(x, wq) + bq, k=project(x, wk) + bk, v=project(x, wv) + bv
    ),
)
def _(x, wq, wk, wv, bq, bk, bv):
    q, k = project(x, wq) + bq, project(x, wk) + bk
    return attend(masked(dots(q * SCALE, k)), project(x, wv) + bv)


def packed_bind(x, w):
    q, k, v = jnp.split((x @ w).reshape(B, T, 3 * N, H), 3, axis=2)
    return dict(q=q, k=k, v=v)


PACKED = dict(x="btm", w="mh")
PACKED_SIZES = dict(s=T, m=D, h=3 * N * H)


def packed(name, bind=packed_bind, **more):
    return projected(name, PACKED, bind, sizes=PACKED_SIZES, **more)


@packed("packed_split")
def _(x, w):
    q, k, v = (a.reshape(B, T, N, H) for a in jnp.split(x @ w, 3, axis=-1))
    return attend(masked(dots(q, k) * SCALE), v)


@packed("packed_slice")
def _(x, w):
    a = (x @ w).reshape(B, T, 3 * N, H)
    q, k, v = a[:, :, :N], a[:, :, N : 2 * N], a[:, :, 2 * N :]
    return attend(masked(dots(q, k) * SCALE), v)


@packed("packed_index")
def _(x, w):
    a = (x @ w).reshape(B, T, 3, N, H)
    return attend(masked(dots(a[:, :, 0], a[:, :, 1]) * SCALE), a[:, :, 2])


@packed("packed_timm", out="bnte")
def _(x, w):
    q, k, v = (x @ w).reshape(B, T, 3, N, H).transpose(2, 0, 3, 1, 4)
    s = q @ k.transpose(0, 1, 3, 2) * SCALE
    return jax.nn.softmax(jnp.where(causal(), s, -jnp.inf)) @ v


@packed("packed_dynamic_index")
def _(x, w):
    a = (x @ w).reshape(B, T, 3, N, H)
    q, k, v = (lax.dynamic_index_in_dim(a, i, 2, keepdims=False) for i in range(3))
    return attend(masked(dots(q, k) * SCALE), v)


@packed(
    "packed_per_head",
    bind=lambda x, w: dict(
        zip("qkv", jnp.split((x @ w).reshape(B, T, N, 3 * H), 3, -1), strict=True)
    ),
)
def _(x, w):
    q, k, v = jnp.split((x @ w).reshape(B, T, N, 3 * H), 3, axis=-1)
    return attend(masked(dots(q, k) * SCALE), v)


@projected(
    "packed_weight_stacked",
    dict(x="btm", w="3mnh"),
    lambda x, w: dict(q=project(x, w[0]), k=project(x, w[1]), v=project(x, w[2])),
)
def _(x, w):
    a = jnp.einsum("btm,zmnh->zbtnh", x, w)
    q, k, v = a
    return attend(masked(dots(q, k) * SCALE), v)


@projected(
    "packed_keys_and_values",
    dict(x="btm", wq="mnh", wkv="2mnh"),
    lambda x, wq, w: dict(q=project(x, wq), k=project(x, w[0]), v=project(x, w[1])),
)
def _(x, wq, wkv):
    k, v = jnp.einsum("bsd,zdkh->zbskh", x, wkv)
    return attend(masked(dots(project(x, wq) * SCALE, k)), v)


@projected(
    "low_rank_keys_and_values",
    dict(x="btm", wq="mnh", down="m5", wk="5nh", wv="5ne"),
    lambda x, wq, d, wk, wv: dict(
        q=project(x, wq), k=project(x @ d, wk), v=project(x @ d, wv)
    ),
)
def _(x, wq, down, wk, wv):
    c = x @ down
    s = dots(project(x, wq), project(c, wk)) * SCALE
    return attend(masked(s), project(c, wv))


@projected(
    "low_rank_absorbed",
    dict(q="btn5", c="bs5", qr="btnh", kr="bsh"),
    lambda q, c, qr, kr: dict(
        q=jnp.concatenate([q, qr], -1),
        k=jnp.concatenate([c, kr], -1)[:, :, None],
        v=c[:, :, None],
    ),
    out="",
    count=None,
)
def _(q, c, qr, kr):
    # Multi-head latent attention: two score products are added.
    s = jnp.einsum("btnr,bsr->bnts", q, c) + jnp.einsum("btnh,bsh->bnts", qr, kr)
    return jnp.einsum("bnts,bsr->btnr", jax.nn.softmax(masked(s * SCALE)), c)


@projected(
    "rotary_part_concatenated",
    dict(q="btn5", k="bsn5", v="bsne", qr="btnh", kr="bsh"),
    lambda q, k, v, qr, kr: dict(
        q=jnp.concatenate([q, qr], -1),
        k=jnp.concatenate([k, jnp.broadcast_to(kr[:, :, None], (B, T, N, H))], -1),
        v=v,
    ),
)
def _(q, k, v, qr, kr):
    q = jnp.concatenate([q, qr], -1)
    k = jnp.concatenate([k, jnp.broadcast_to(kr[:, :, None], (B, T, N, H))], -1)
    return attend(masked(dots(q, k) * SCALE), v)


def angles():
    return jnp.arange(T)[:, None] / 10.0 ** (jnp.arange(H // 2) / 4.0)


def rotate_halves(x):
    a, b = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angles())[:, None], jnp.cos(angles())[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rotate_half_negated(x):
    half = jnp.concatenate([-x[..., H // 2 :], x[..., : H // 2]], axis=-1)
    both = jnp.concatenate([angles(), angles()], -1)[:, None]
    return x * jnp.cos(both) + half * jnp.sin(both)


def rotate_interleaved(x):
    a, b = x[..., ::2], x[..., 1::2]
    sin, cos = jnp.sin(angles())[:, None], jnp.cos(angles())[:, None]
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)


def rotate_complex(x):
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    z = lax.complex(pairs[..., 0], pairs[..., 1])
    z = z * jnp.exp(1j * angles())[:, None]
    out = jnp.stack([jnp.real(z), jnp.imag(z)], -1)
    return out.reshape(x.shape).astype(x.dtype)


def rotate_part(x):
    return jnp.concatenate([rotate_part_of(x[..., :4]), x[..., 4:]], axis=-1)


def rotate_part_of(x):
    a, b = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angles())[:, None, :2], jnp.cos(angles())[:, None, :2]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rotated(name, rotate):
    @spelling(
        f"heads/rotary_{name}",
        inputs=QKV,
        out="btne",
        window=CAUSAL,
        sizes=SQUARE,
        bind=lambda q, k, v: dict(q=rotate(q), k=rotate(k), v=v),
        **PLAIN,
    )
    def fn(q, k, v):
        return attend(masked(dots(rotate(q), rotate(k)) * SCALE), v)


rotated("halves", rotate_halves)
rotated("half_negated", rotate_half_negated)
rotated("interleaved", rotate_interleaved)
rotated("complex", rotate_complex)
rotated("part", rotate_part)


def root_mean_square(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


@grouped(
    "norm_of_q_and_k",
    dict(**QKV, a="h", b="h"),
    bind=lambda q, k, v, a, b: dict(
        q=root_mean_square(q, a), k=root_mean_square(k, b), v=v
    ),
)
def _(q, k, v, a, b):
    return attend(dots(root_mean_square(q, a), root_mean_square(k, b)) * SCALE, v)


@grouped(
    "extra_keys",
    dict(**QKV, pk="5nh", pv="5ne"),
    bind=lambda q, k, v, a, b: dict(
        q=q,
        k=jnp.concatenate([jnp.broadcast_to(a, (B, *a.shape)), k], 1),
        v=jnp.concatenate([jnp.broadcast_to(b, (B, *b.shape)), v], 1),
    ),
)
def _(q, k, v, pk, pv):
    k = jnp.concatenate([jnp.broadcast_to(pk, (B, *pk.shape)), k], axis=1)
    v = jnp.concatenate([jnp.broadcast_to(pv, (B, *pv.shape)), v], axis=1)
    return attend(dots(q, k) * SCALE, v)


def bytes_(dims):
    return Input(
        dims, lambda draw, shape: draw.rng.integers(-20, 20, shape).astype(np.int8)
    )


@grouped(
    "int8_keys_and_values",
    dict(
        q="btnh",
        k=bytes_("bsnh"),
        v=bytes_("bsne"),
        ks=positive("bsn", 0.01, 0.1),
        vs=positive("bsn", 0.01, 0.1),
    ),
    bind=lambda q, k, v, ks, vs: dict(q=q, k=k * ks[..., None], v=v * vs[..., None]),
)
def _(q, k, v, ks, vs):
    k = k.astype(q.dtype) * ks[..., None]
    v = v.astype(q.dtype) * vs[..., None]
    return attend(dots(q, k) * SCALE, v)


@grouped(
    "int8_scales_on_scores",
    dict(
        q="btnh",
        k=bytes_("bsnh"),
        v=bytes_("bsne"),
        ks=positive("bsn", 0.01, 0.1),
        vs=positive("bsn", 0.01, 0.1),
    ),
    bind=lambda q, k, v, ks, vs: dict(q=q, k=k * ks[..., None], v=v * vs[..., None]),
    count=None,
)
def _(q, k, v, ks, vs):
    s = dots(q, k.astype(q.dtype)) * ks.transpose(0, 2, 1)[:, :, None] * SCALE
    p = jax.nn.softmax(s) * vs.transpose(0, 2, 1)[:, :, None]
    return weigh(p, v.astype(q.dtype))


# ----------------------------------------------------------------- decode
ONE = dict(q="btnh", k="btnh", v="btne")
CACHE = dict(kc="bsnh", vc="bsne")
STEP = dict(t=1)


def decoded(name, inputs, bind, **more):
    return spelling(
        f"decode/{name}",
        inputs={**ONE, **CACHE, **inputs},
        bind=bind,
        **{
            "read": lambda o: o[0],
            "sizes": STEP,
            "scale": SCALE,
            "operands": "q k v kv_lengths",
            "also": [
                dict(operands="q k v offset", scale=SCALE, window=CAUSAL),
                dict(operands="q k v kv_lengths", scale=SCALE, window=CAUSAL),
            ],
            **more,
        },
    )


def write(cache, new, at):
    return lax.dynamic_update_slice(cache, new, (0, at, 0, 0))


def written(q, k, v, kc, vc, at):
    return dict(
        q=q, k=write(kc, k, at), v=write(vc, v, at), kv_lengths=jnp.atleast_1d(at + 1)
    )


AT = dict(at=integers("", 9, 30))


@decoded("update_slice", AT, written)
def _(q, k, v, kc, vc, at):
    kc, vc = write(kc, k, at), write(vc, v, at)
    s = jnp.where(jnp.arange(S) <= at, dots(q, kc) * SCALE, -1e30)
    return attend(s, vc), kc, vc


@decoded("update_slice_less_than", AT, written)
def _(q, k, v, kc, vc, at):
    kc = lax.dynamic_update_slice_in_dim(kc, k, at, axis=1)
    vc = lax.dynamic_update_slice_in_dim(vc, v, at, axis=1)
    keep = (jnp.arange(S) < at + 1)[None, None, None]
    return attend(jnp.where(keep, dots(q * SCALE, kc), NEGATIVE), vc), kc, vc


@decoded("linen_cache", AT, written)
def _(q, k, v, kc, vc, at):
    zero = jnp.zeros((), jnp.int32)
    kc = lax.dynamic_update_slice(kc, k, (zero, at, zero, zero))
    vc = lax.dynamic_update_slice(vc, v, (zero, at, zero, zero))
    mask = jnp.broadcast_to(jnp.arange(S) <= at, (B, 1, 1, S))
    q = q / jnp.sqrt(H).astype(q.dtype)
    s = jnp.einsum("...qhd,...khd->...hqk", q, kc)
    p = jax.nn.softmax(jnp.where(mask, s, jnp.finfo(s.dtype).min))
    return jnp.einsum("...hqk,...khd->...qhd", p, vc), kc, vc, at + 1


@decoded(
    "several_queries",
    AT,
    lambda q, k, v, kc, vc, at: dict(
        q=q, k=write(kc, k, at), v=write(vc, v, at), offset=jnp.atleast_1d(at)
    ),
    operands="q k v offset",
    window=CAUSAL,
    sizes=dict(t=4),
    # Behind the largest int32 the position wraps around, and the query sees nothing.
    also=[dict(operands="q k v offset mask", scale=SCALE, window=CAUSAL)],
)
def _(q, k, v, kc, vc, at):
    kc, vc = write(kc, k, at), write(vc, v, at)
    keep = jnp.arange(4)[:, None] + at >= jnp.arange(S)
    return attend(jnp.where(keep, dots(q, kc) * SCALE, -1e30), vc), kc, vc


@decoded(
    "sliced_causal_mask",
    AT,
    lambda q, k, v, kc, vc, at: dict(
        q=q,
        k=write(kc, k, at),
        v=write(vc, v, at),
        mask=(jnp.arange(4)[:, None] + at >= jnp.arange(S))[None, None],
    ),
    operands="q k v mask",
    sizes=dict(t=4),
    masked_rows="mean",
    also=[
        dict(operands=f"q k v {more}", scale=SCALE, window=CAUSAL, empty_rows=None)
        for more in ("offset", "offset mask")
    ],
)
def _(q, k, v, kc, vc, at):
    # GPT-2 in Hugging Face Flax.
    kc, vc = write(kc, k, at), write(vc, v, at)
    mask = jnp.tril(jnp.ones((1, 1, S, S), bool))
    mask = lax.dynamic_slice(mask, (0, 0, at, 0), (1, 1, 4, S))
    bias = lax.select(mask, jnp.zeros(mask.shape), jnp.full(mask.shape, NEGATIVE))
    return attend(dots(q, kc) * SCALE + bias.astype(q.dtype), vc), kc, vc


def causal_row(q, k, v, kc, vc, at, row, keep=True):
    """A step that masks keys by its row of a causal mask of the whole cache."""
    kc, vc = write(kc, k, at), write(vc, v, at)
    s = jnp.where(row & keep, dots(q, kc) * SCALE, NEGATIVE)
    return attend(s, vc), kc, vc


def whole_causal():
    return jnp.arange(S)[:, None] >= jnp.arange(S)


@decoded("causal_row", AT, written)
def _(q, k, v, kc, vc, at):
    # Llama, GPT-2, OPT and others in Hugging Face Flax.
    mask = jnp.broadcast_to(whole_causal(), (1, 1, S, S))
    row = lax.dynamic_slice(mask, (0, 0, at, 0), (1, 1, 1, S))
    row = jnp.broadcast_to(row, (B, 1, 1, S))
    seen = jnp.broadcast_to(jnp.arange(S) < at + 1, (B, 1, 1, S))
    keep = jnp.logical_and(seen.astype(q.dtype), row).astype(q.dtype) > 0
    return causal_row(q, k, v, kc, vc, at, keep)


@decoded("causal_row_alone", AT, written)
def _(q, k, v, kc, vc, at):
    return causal_row(q, k, v, kc, vc, at, whole_causal()[at])


@decoded("causal_row_in_numpy", AT, written)
def _(q, k, v, kc, vc, at):
    row = jnp.asarray(np.tril(np.ones((S, S), bool)))[at]
    return causal_row(q, k, v, kc, vc, at, row, jnp.arange(S) < at + 1)


@decoded("causal_row_of_integers", AT, written)
def _(q, k, v, kc, vc, at):
    mask = jnp.tril(jnp.ones((1, 1, S, S), jnp.int32))
    row = lax.dynamic_index_in_dim(mask, at, 2)
    return causal_row(q, k, v, kc, vc, at, row != 0)


@decoded("causal_row_of_bias", AT, written)
def _(q, k, v, kc, vc, at):
    kc, vc = write(kc, k, at), write(vc, v, at)
    bias = jnp.where(whole_causal(), 0.0, -1e30)
    row = lax.dynamic_slice_in_dim(bias, at, 1)
    return attend(dots(q, kc) * SCALE + row, vc), kc, vc


@decoded("causal_row_taken", AT, written)
def _(q, k, v, kc, vc, at):
    row = jnp.take(whole_causal(), at, axis=0)
    return causal_row(q, k, v, kc, vc, at, row, jnp.arange(S) < at + 1)


@decoded("causal_row_from_offset", AT, written)
def _(q, k, v, kc, vc, at):
    row = whole_causal()[at + jnp.arange(1)]
    return causal_row(q, k, v, kc, vc, at, row)


@decoded(
    "windowed_row",
    AT,
    lambda q, k, v, kc, vc, at: dict(
        q=q, k=write(kc, k, at), v=write(vc, v, at), offset=jnp.atleast_1d(at)
    ),
    operands="q k v offset",
    window=(6, 0),
    also=[dict(operands="q k v kv_lengths offset", scale=SCALE, window=(0, None))],
)
def _(q, k, v, kc, vc, at):
    # Mistral in Hugging Face Flax.
    row = lax.dynamic_slice_in_dim(jnp.triu(whole_causal(), -6), at, 1)
    return causal_row(q, k, v, kc, vc, at, row, jnp.arange(S) < at + 1)


@decoded(
    "two_sided_row",
    AT,
    lambda q, k, v, kc, vc, at: dict(
        q=q,
        k=write(kc, k, at),
        v=write(vc, v, at),
        mask=(jnp.abs(at - jnp.arange(S)) < 5)[None, None, None],
    ),
    operands="q k v mask",
    also=(),
)
def _(q, k, v, kc, vc, at):
    near = jnp.abs(jnp.arange(S)[:, None] - jnp.arange(S)) < 5
    row = lax.dynamic_slice_in_dim(near, at, 1)
    return causal_row(q, k, v, kc, vc, at, row)


@decoded(
    "row_by_key",
    dict(at=integers("", 9, 30), rows=integers("s", 0, 39)),
    lambda q, k, v, kc, vc, at, rows: dict(
        q=q,
        k=write(kc, k, at),
        v=write(vc, v, at),
        mask=(rows >= jnp.arange(S))[None, None, None],
    ),
    operands="q k v mask",
    masked_rows="mean",
    also=(),
)
def _(q, k, v, kc, vc, at, rows):
    row = whole_causal()[rows, jnp.arange(S)]
    return causal_row(q, k, v, kc, vc, at, row)


ROWS = dict(at=integers("b", 9, 30))


def written_per_sequence(q, k, v, kc, vc, at):
    rows = jnp.arange(B)
    kc, vc = kc.at[rows, at].set(k[:, 0]), vc.at[rows, at].set(v[:, 0])
    return dict(q=q, k=kc, v=vc, kv_lengths=at + 1)


@decoded(
    "causal_row_per_sequence",
    ROWS,
    written_per_sequence,
)
def _(q, k, v, kc, vc, at):
    rows = jnp.arange(B)
    kc, vc = kc.at[rows, at].set(k[:, 0]), vc.at[rows, at].set(v[:, 0])
    row = jax.vmap(lambda i: lax.dynamic_slice_in_dim(whole_causal(), i, 1))(at)
    s = jnp.where(row[:, None], dots(q, kc) * SCALE, NEGATIVE)
    return attend(s, vc), kc, vc


@decoded(
    "position_per_row",
    ROWS,
    written_per_sequence,
)
def _(q, k, v, kc, vc, at):
    rows = jnp.arange(B)
    kc, vc = kc.at[rows, at].set(k[:, 0]), vc.at[rows, at].set(v[:, 0])
    keep = (jnp.arange(S) <= at[:, None])[:, None, None]
    return attend(jnp.where(keep, dots(q, kc) * SCALE, -1e30), vc), kc, vc


@decoded(
    "position_per_row_vmapped",
    ROWS,
    written_per_sequence,
)
def _(q, k, v, kc, vc, at):
    def put(cache, new, at):
        return lax.dynamic_update_slice(cache, new, (at, 0, 0))

    kc, vc = jax.vmap(put)(kc, k, at), jax.vmap(put)(vc, v, at)
    keep = jnp.arange(S)[None] < (at + 1)[:, None]
    s = jnp.where(keep[:, None, None], dots(q, kc) * SCALE, -2.3819763e38)
    return attend(s, vc), kc, vc


@decoded(
    "one_hot_write",
    ROWS,
    written_per_sequence,
)
def _(q, k, v, kc, vc, at):
    here = jax.nn.one_hot(at, S, dtype=q.dtype)[:, :, None, None]
    kc, vc = kc * (1 - here) + k * here, vc * (1 - here) + v * here
    keep = (jnp.arange(S) <= at[:, None])[:, None, None]
    return attend(jnp.where(keep, dots(q, kc) * SCALE, -1e30), vc), kc, vc


@decoded(
    "concatenated",
    {},
    lambda q, k, v, kc, vc: dict(
        q=q, k=jnp.concatenate([kc, k], 1), v=jnp.concatenate([vc, v], 1)
    ),
    operands="q k v",
    also=(),
)
def _(q, k, v, kc, vc):
    kc, vc = jnp.concatenate([kc, k], 1), jnp.concatenate([vc, v], 1)
    return attend(dots(q, kc) * SCALE, vc), kc, vc


@decoded(
    "concatenated_prefill",
    {},
    lambda q, k, v, kc, vc: dict(
        q=q, k=jnp.concatenate([kc, k], 1), v=jnp.concatenate([vc, v], 1)
    ),
    operands="q k v",
    window=CAUSAL,
    shift=S,
    sizes=dict(t=4),
    also=[dict(operands="q k v", scale=SCALE, window=(None, S))],
)
def _(q, k, v, kc, vc):
    kc, vc = jnp.concatenate([kc, k], 1), jnp.concatenate([vc, v], 1)
    keep = jnp.tril(jnp.ones((4, S + 4), bool), S)
    return attend(jnp.where(keep, dots(q, kc) * SCALE, -1e30), vc), kc, vc


@decoded(
    "ring_buffer",
    AT,
    lambda q, k, v, kc, vc, at: dict(
        q=q,
        k=write(kc, k, at % S),
        v=write(vc, v, at % S),
        mask=((at - (at - jnp.arange(S)) % S >= 0) & ((at - jnp.arange(S)) % S < 8))[
            None, None, None
        ],
    ),
    operands="q k v mask",
    masked_rows="mean",
    also=[dict(operands="q k v mask", scale=SCALE)],
)
def _(q, k, v, kc, vc, at):
    kc, vc = write(kc, k, at % S), write(vc, v, at % S)
    age = (at - jnp.arange(S)) % S
    keep = (at - age >= 0) & (age < 8)
    return attend(jnp.where(keep, dots(q, kc) * SCALE, -1e30), vc), kc, vc


@decoded(
    "window_on_cache",
    AT,
    lambda q, k, v, kc, vc, at: dict(
        q=q, k=write(kc, k, at), v=write(vc, v, at), offset=jnp.atleast_1d(at)
    ),
    operands="q k v offset",
    window=(6, 0),
    also=[dict(operands="q k v kv_lengths offset", scale=SCALE, window=(6, None))],
)
def _(q, k, v, kc, vc, at):
    kc, vc = write(kc, k, at), write(vc, v, at)
    j = jnp.arange(S)
    keep = (j <= at) & (j > at - 7)
    return attend(jnp.where(keep, dots(q, kc) * SCALE, -1e30), vc), kc, vc


@decoded(
    "grouped_one_query",
    dict(q="bnh", k="btkh", v="btke", kc="bskh", vc="bske", at=integers("b", 9, 30)),
    lambda q, k, v, kc, vc, at: dict(
        q=q[:, None],
        k=kc.at[jnp.arange(B), at].set(k[:, 0]),
        v=vc.at[jnp.arange(B), at].set(v[:, 0]),
        kv_lengths=at + 1,
    ),
    read=lambda o: o[0][:, None],
)
def _(q, k, v, kc, vc, at):
    rows = jnp.arange(B)
    kc, vc = kc.at[rows, at].set(k[:, 0]), vc.at[rows, at].set(v[:, 0])
    s = jnp.einsum("bkgh,bskh->bkgs", q.reshape(B, K, G, H), kc) * SCALE
    s = jnp.where((jnp.arange(S) <= at[:, None])[:, None, None], s, -1e30)
    o = jnp.einsum("bkgs,bske->bkge", jax.nn.softmax(s), vc)
    return o.reshape(B, N, E), kc, vc


@decoded(
    "paged",
    dict(
        kc="56nh",
        vc="56ne",
        table=given(
            "b4", lambda draw: np.array([[3, 1, 4, 0], [2, 0, 1, 3]], np.int32)
        ),
        lengths=integers("b", 3, 20),
    ),
    lambda q, k, v, kc, vc, table, n: dict(
        q=q,
        k=kc[table].reshape(B, 24, N, H),
        v=vc[table].reshape(B, 24, N, E),
        kv_lengths=n,
    ),
    read=lambda o: o,
    also=[dict(operands="q k v kv_lengths", scale=SCALE)],
)
def _(q, k, v, kc, vc, table, lengths):
    # Five pages of six tokens; each row of the table lists a sequence's pages.
    kc, vc = kc[table].reshape(B, 24, N, H), vc[table].reshape(B, 24, N, E)
    keep = (jnp.arange(24) < lengths[:, None])[:, None, None]
    return attend(jnp.where(keep, dots(q, kc) * SCALE, -1e30), vc)


# ---------------------------------------------------------------- dropout
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


# ----------------------------------------------------------------- escape
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


# ---------------------------------------------------------------- library
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
