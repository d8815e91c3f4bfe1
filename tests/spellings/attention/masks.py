"""Attention: masks by position, segments, lengths and documents."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.spellings.attention.pieces import (
    ANY,
    CAUSAL,
    NEGATIVE,
    QKV,
    SCALE,
    SQUARE,
    B,
    H,
    S,
    T,
    attend,
    causal,
    dots,
    masked,
    spelling,
)
from tests.spellings.spelling import booleans, integers


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
PLACES = "q k v kv_positions last_position"
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
    also=[dict(operands=PLACES, scale=SCALE)],
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
    PLACES,
    sizes=SQUARE,
    bind=lambda q, k, v, m: dict(
        q=q,
        k=k,
        v=v,
        kv_positions=jnp.cumsum(m, 1),
        last_position=jnp.cumsum(m, 1),
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
