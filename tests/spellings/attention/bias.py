"""Attention: what is added to the scores."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tests.spellings.attention.masks import PADDING, difference, positions
from tests.spellings.attention.pieces import (
    ANY,
    CAUSAL,
    NEGATIVE,
    QKV,
    SCALE,
    SQUARE,
    H,
    N,
    S,
    T,
    attend,
    dots,
    masked,
    spelling,
)
from tests.spellings.spelling import booleans, floats, positive


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
