"""LayerNorm as libraries and people write it."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.spellings.normalization.pieces import (
    EPS,
    XB,
    XS,
    B,
    D,
    H,
    T,
    W,
    X,
    layer,
)
from tests.spellings.normalization.rms_norm import ms
from tests.spellings.spelling import given


# ------------------------------------------------------ LayerNorm: statistics
def layer_of(name, make, **more):
    @layer(name, **more)
    def fn(x, scale, bias):
        return make(x) * scale + bias


def mean(x):
    return jnp.mean(x, -1, keepdims=True)


def two_pass(x):
    centred = x - mean(x)
    return centred * lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + EPS)


def fast(x):
    mu, mu2 = mean(x), jnp.mean(x * x, -1, keepdims=True)
    return (x - mu) * lax.rsqrt(jnp.maximum(0.0, mu2 - mu * mu) + EPS)


layer_of("two_pass", two_pass)
layer_of("fast", fast)
layer_of(
    "fast_unclipped",
    lambda x: (x - mean(x)) * lax.rsqrt(mean(x * x) - mean(x) ** 2 + EPS),
)
layer_of(
    "fast_divided",
    lambda x: (x - mean(x)) / jnp.sqrt(mean(x * x) - jnp.square(mean(x)) + EPS),
)
layer_of(
    "fast_select",
    lambda x: (lambda v: (x - mean(x)) * lax.rsqrt(jnp.where(v > 0, v, 0.0) + EPS))(
        mean(x * x) - mean(x) ** 2
    ),
)
layer_of(
    "jnp_var", lambda x: (x - mean(x)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPS)
)
layer_of(
    "jnp_var_divided",
    lambda x: (x - mean(x)) / jnp.sqrt(jnp.var(x, axis=-1, keepdims=True) + EPS),
)
layer_of(
    "jnp_var_clipped",
    lambda x: (
        (x - mean(x)) * lax.rsqrt(jnp.maximum(jnp.var(x, -1, keepdims=True), 0.0) + EPS)
    ),
)
layer_of("standardize", lambda x: jax.nn.standardize(x, axis=-1, epsilon=EPS))
layer_of(
    "standardize_given",
    lambda x: jax.nn.standardize(
        x, axis=-1, mean=mean(x), variance=jnp.var(x, -1, keepdims=True), epsilon=EPS
    ),
)
layer_of(
    "sums",
    lambda x: (lambda c: c / jnp.sqrt(jnp.sum(c * c, -1, keepdims=True) / D + EPS))(
        x - jnp.sum(x, -1, keepdims=True) / D
    ),
)
layer_of(
    "sums_multiplied",
    lambda x: (
        lambda c: c * lax.rsqrt(jnp.sum(c * c, -1, keepdims=True) * (1 / D) + EPS)
    )(x - jnp.sum(x, -1, keepdims=True) * (1 / D)),
)
layer_of(
    "einsum",
    lambda x: (
        lambda c: c * lax.rsqrt(jnp.einsum("btd,btd->bt", c, c) / D + EPS)[..., None]
    )(x - jnp.einsum("btd->bt", x)[..., None] / D),
)
layer_of(
    "mean_by_ones",
    lambda x: (lambda c: c * lax.rsqrt((c * c) @ jnp.full((D, 1), 1 / D) + EPS))(
        x - x @ jnp.full((D, D), 1 / D)
    ),
)
layer_of(
    "vmapped",
    lambda x: jax.vmap(jax.vmap(lambda r: (r - r.mean()) * lax.rsqrt(r.var() + EPS)))(
        x
    ),
)
layer_of("rms_of_centred", lambda x: (lambda c: c / jnp.sqrt(ms(c) + EPS))(x - mean(x)))
layer_of(
    "power_minus_half",
    lambda x: (x - mean(x)) * (jnp.var(x, -1, keepdims=True) + EPS) ** -0.5,
)
layer_of("no_eps", lambda x: (x - mean(x)) / jnp.std(x, -1, keepdims=True), eps=0.0)
layer_of(
    "ddof_one",
    lambda x: (x - mean(x)) * lax.rsqrt(jnp.var(x, -1, keepdims=True, ddof=1) + EPS),
    eps=EPS * (D - 1) / D,
    bind=lambda x, s, b: dict(x=x, scale=s * ((D - 1) / D) ** 0.5, bias=b),
)
layer_of("centred_twice", lambda x: two_pass(x - mean(x)))


# ------------------------------------------------ LayerNorm: scale and bias
@layer("bias_first")
def _(x, scale, bias):
    return bias + scale * two_pass(x)


@layer("factor_then_bias")
def _(x, scale, bias):
    mu = jnp.mean(x, -1, keepdims=True)
    var = jnp.maximum(0.0, jnp.mean(lax.square(x), -1, keepdims=True) - lax.square(mu))
    factor = lax.rsqrt(var + EPS) * scale.reshape(1, 1, D)
    return (x - mu) * factor + bias.reshape(1, 1, D)


@layer("keras")
def _(x, scale, bias):
    mu, var = mean(x), jnp.var(x, axis=-1, keepdims=True)
    inverse = lax.rsqrt(var + EPS) * scale
    return x * inverse + (-mu * inverse + bias)


@layer("no_bias", XS)
def _(x, scale):
    return two_pass(x) * scale


@layer("no_scale", XB)
def _(x, bias):
    return fast(x) + bias


@layer("neither", X)
def _(x):
    return fast(x)


@layer("neither_two_pass", X)
def _(x):
    return two_pass(x)


@layer(
    "one_plus_scale",
    dict(x="btd", w="d", bias="d"),
    "x scale bias",
    bind=lambda x, w, b: dict(x=x, scale=1 + w, bias=b),
)
def _(x, w, bias):
    return two_pass(x) * (1 + w) + bias


@layer(
    "adaptive",
    dict(x="btd", shift="b1d", w="b1d"),
    "x",
    count=None,
    bind=lambda x, a, w: dict(x=x),
    read=lambda o: o[1],
)
def _(x, shift, w):
    y = two_pass(x)
    return y * (1 + w) + shift, y


# --------------------------------------------------------- LayerNorm: library
@layer("flax_linen", eps=1e-6)
def _(x, scale, bias):
    y = jnp.asarray(x, jnp.float32)
    mu, mu2 = y.mean(-1), lax.square(y).mean(-1)
    var = jnp.maximum(0.0, mu2 - lax.square(mu))
    mu, var = jnp.expand_dims(mu, -1), jnp.expand_dims(var, -1)
    y = x - mu
    factor = lax.rsqrt(var + 1e-6) * scale.reshape(1, 1, D)
    return jnp.asarray(y * factor + bias.reshape(1, 1, D), x.dtype)


@layer("haiku")
def _(x, scale, bias):
    mu = jnp.mean(x, axis=-1, keepdims=True)
    var = jnp.var(x, axis=-1, keepdims=True)
    scale, bias = (jnp.broadcast_to(a, x.shape) for a in (scale, bias))
    inverse = scale * lax.rsqrt(jnp.asarray(EPS, var.dtype) + var)
    return inverse * (x - mu) + bias


@layer("equinox", dict(x="d", scale="d", bias="d"), out="d")
def _(x, scale, bias):
    mu = jnp.mean(x, keepdims=True)
    var = jnp.maximum(0.0, jnp.var(x, keepdims=True))
    out = (x - mu) * lax.rsqrt(var + EPS)
    return (scale * out + bias).astype(x.dtype)


@layer("upcast")
def _(x, scale, bias):
    y = two_pass(x.astype(jnp.float32))
    return (y * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


@layer("upcast_then_affine")
def _(x, scale, bias):
    return two_pass(x.astype(jnp.float32)).astype(x.dtype) * scale + bias


@layer("torch_bridge")
def _(x, scale, bias):
    mu = jnp.mean(x, axis=(2,), keepdims=True)
    var = jnp.var(x, axis=(2,), keepdims=True)
    out = jnp.subtract(x, mu) * (1.0 / jnp.sqrt(var + EPS))
    return jnp.add(jnp.multiply(out, scale), bias)


@layer("alphafold", dict(x="btd", scale="d", bias="d"))
def _(x, scale, bias):
    mu = jnp.mean(x, axis=(-1,), keepdims=True)
    var = jnp.mean(x * x, (-1,), keepdims=True) - mu * mu
    inverse = scale * lax.rsqrt(var + EPS)
    return inverse * (x - mu) + bias


@layer("palm", XS)
def _(x, scale):
    mu = jnp.mean(x, axis=-1, keepdims=True)
    centred = x - mu
    var = jnp.mean(x * x, -1, keepdims=True) - mu * mu
    return centred * lax.rsqrt(var + EPS) * scale


# --------------------------------------------------- LayerNorm: axes, users
@layer("per_head", dict(x="btnd", scale="d", bias="d"), out="btnd")
def _(x, scale, bias):
    return two_pass(x) * scale + bias


@layer("channels_first", dict(x="bdt", scale="d", bias="d"), out="bdt")
def _(x, scale, bias):
    mu = x.mean(1, keepdims=True)
    var = ((x - mu) ** 2).mean(1, keepdims=True)
    return (x - mu) / jnp.sqrt(var + EPS) * scale[:, None] + bias[:, None]


@layer(
    "two_axes",
    dict(x="bthw", scale="hw", bias="hw"),
    "x scale bias",
    bind=lambda x, s, b: dict(
        x=x.reshape(B, T, -1), scale=s.reshape(-1), bias=b.reshape(-1)
    ),
    read=lambda o: o.reshape(B, T, H * W),
)
def _(x, scale, bias):
    mu = x.mean((2, 3), keepdims=True)
    var = x.var((2, 3), keepdims=True)
    return (x - mu) * lax.rsqrt(var + EPS) * scale + bias


@layer(
    "all_but_batch",
    dict(x="btd"),
    "x",
    bind=lambda x: dict(x=x.reshape(B, -1)),
    read=lambda o: o.reshape(B, -1),
)
def _(x):
    mu, var = x.mean((1, 2), keepdims=True), x.var((1, 2), keepdims=True)
    return (x - mu) * lax.rsqrt(var + EPS)


@layer(
    "group_norm_channels_first",
    dict(x="bdhw"),
    "x",
    bind=lambda x: dict(x=x.reshape(B, 4, -1)),
    read=lambda o: o.reshape(B, 4, -1),
)
def _(x):
    y = x.reshape(B, 4, 4 * H * W)
    y = (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + EPS)
    return y.reshape(x.shape)


@layer(
    "residual",
    dict(x="btd", r="btd", scale="d", bias="d"),
    "x scale bias",
    bind=lambda x, r, s, b: dict(x=x + r, scale=s, bias=b),
    read=lambda o: o[0],
)
def _(x, r, scale, bias):
    x = x + r
    return fast(x) * scale + bias, x


@layer(
    "post_norm",
    dict(x="btd", r="btd", scale="d", bias="d"),
    "x scale bias",
    bind=lambda x, r, s, b: dict(x=x + r, scale=s, bias=b),
)
def _(x, r, scale, bias):
    return fast(r + x) * scale + bias


@layer("statistics_returned", read=lambda o: o[0])
def _(x, scale, bias):
    mu, var = mean(x), jnp.var(x, -1, keepdims=True)
    return (x - mu) * lax.rsqrt(var + EPS) * scale + bias, mu, var


@layer(
    "masked_mean",
    dict(x="btd", keep=given("d", lambda draw: np.arange(draw.sizes["d"]) < 9)),
    "x",
    count=None,
    read=lambda o: o[1],
    bind=lambda x, m: dict(x=x[..., :9]),
)
def _(x, keep):
    n = keep.sum()
    mu = jnp.where(keep, x, 0).sum(-1, keepdims=True) / n
    var = jnp.where(keep, (x - mu) ** 2, 0).sum(-1, keepdims=True) / n
    y = (x - mu) * lax.rsqrt(var + EPS)
    return y * keep, y[..., :9]


@layer("then_quantised", read=lambda o: o[1])
def _(x, scale, bias):
    y = two_pass(x) * scale + bias
    top = jnp.abs(y).max(-1, keepdims=True)
    return jnp.round(y / top * 127).astype(jnp.int8), y


@layer(
    "two_norms",
    count=2,
    bind=lambda x, s, b: dict(x=two_pass(x) * s + b, scale=s, bias=b),
)
def _(x, scale, bias):
    return two_pass(two_pass(x) * scale + bias) * scale + bias
