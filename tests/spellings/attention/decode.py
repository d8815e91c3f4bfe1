"""Attention: few queries against a cache."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.spellings.attention.pieces import (
    CAUSAL,
    NEGATIVE,
    SCALE,
    B,
    E,
    G,
    H,
    K,
    N,
    S,
    attend,
    dots,
    spelling,
)
from tests.spellings.spelling import given, integers

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
