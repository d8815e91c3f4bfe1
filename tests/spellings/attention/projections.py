"""Attention: projections and rotations around it."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.spellings.attention.heads import grouped
from tests.spellings.attention.pieces import (
    CAUSAL,
    PLAIN,
    QKV,
    SCALE,
    SQUARE,
    B,
    H,
    N,
    T,
    attend,
    causal,
    dots,
    masked,
    spelling,
    weigh,
)
from tests.spellings.spelling import Input, positive

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
