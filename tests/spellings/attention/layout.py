"""Attention: orders of axes, and the products that read them."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from tests.spellings.attention.pieces import (
    CAUSAL,
    HEADS_FIRST,
    PLAIN,
    QKV,
    SCALE,
    SQUARE,
    B,
    E,
    G,
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
from tests.spellings.spelling import booleans, integers


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
