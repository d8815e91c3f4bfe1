"""Group norm and instance norm as libraries and people write them."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from tests.spellings.normalization.pieces import EPS, B, D, H, W
from tests.spellings.spelling import collect, floats

GROUP, group_spelling = collect("group_norm")
G = 4
LAST = dict(x=floats("bhwd", 0.7), scale="d", bias="d")
FIRST = dict(x=floats("bdhw", 0.7), scale="d", bias="d")


def group(name, inputs=LAST, groups=G, first=None, of=None, **more):
    """Adds a spelling; `of` gives x, scale and bias of arguments of other names."""
    inputs = {n: floats(i) if isinstance(i, str) else i for n, i in inputs.items()}
    first = inputs["x"].dims[1] == "d" if first is None else first

    def wide(x):
        c = D // groups
        if first:
            return x.reshape(x.shape[0], 1, groups, c, -1)
        return x.reshape(x.shape[0], -1, groups, c, 1)

    def bind(*args):
        given = dict(zip(inputs, args, strict=True))
        if of is not None:
            given = of(**given)
        of_channels = {
            n: jnp.reshape(given[n], (groups, D // groups))
            for n in ("scale", "bias")
            if n in given
        }
        return dict(x=wide(given["x"]), **of_channels)

    names = " ".join(n for n in ("x", "scale", "bias") if n in inputs)
    return group_spelling(
        f"group/{name}",
        inputs=inputs,
        operands=more.pop("operands", names),
        bind=bind,
        read=more.pop("read", wide),
        **{"eps": EPS, **more},
    )


def without(inputs, *names):
    return {n: i for n, i in inputs.items() if n not in names}


# ------------------------------------------------------------------- statistics
def last(x, groups=G):
    """Normalised, channels last, in two passes."""
    b, *spatial, d = x.shape
    y = x.reshape(b, *spatial, groups, d // groups)
    axes = (*range(1, y.ndim - 2), y.ndim - 1)
    mu, var = y.mean(axes, keepdims=True), y.var(axes, keepdims=True)
    return ((y - mu) / jnp.sqrt(var + EPS)).reshape(x.shape)


def first(x, groups=G):
    """Normalised, channels first, as rows."""
    y = x.reshape(x.shape[0], groups, -1)
    mu, var = y.mean(-1, keepdims=True), y.var(-1, keepdims=True)
    return ((y - mu) * lax.rsqrt(var + EPS)).reshape(x.shape)


def over(x, axes):
    mu, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mu) * lax.rsqrt(var + EPS)


def channel(v, rank):
    """A number for each channel, of an array whose axis 1 has the channels."""
    return v.reshape(-1, *(1,) * (rank - 2))


@group("last")
def _(x, scale, bias):
    return last(x) * scale + bias


@group("flax_fast")
def _(x, scale, bias):
    y = x.reshape(B, H, W, G, D // G)
    mu, mu2 = y.mean((1, 2, 4)), lax.square(y).mean((1, 2, 4))
    var = jnp.maximum(0.0, mu2 - lax.square(mu))
    mu, var = (jnp.repeat(v, D // G, axis=-1)[:, None, None] for v in (mu, var))
    return (x - mu) * (lax.rsqrt(var + EPS) * scale) + bias


@group("folded_scale")
def _(x, scale, bias):
    y = x.reshape(B, H * W, G, -1)
    mu, var = y.mean((1, 3), keepdims=True), y.var((1, 3), keepdims=True)
    a = scale.reshape(G, -1) * lax.rsqrt(var + EPS)
    return (y * a + (bias.reshape(G, -1) - mu * a)).reshape(x.shape)


@group("einsums")
def _(x, scale, bias):
    y = x.reshape(B, H * W, G, -1)
    n = H * W * D // G
    centred = y - (jnp.einsum("bsgc->bg", y) / n)[:, None, :, None]
    var = jnp.einsum("bsgc,bsgc->bg", centred, centred) / n
    y = centred / jnp.sqrt(var + EPS)[:, None, :, None]
    return y.reshape(x.shape) * scale + bias


@group("sums_of_channels_first")
def _(x, scale, bias):
    n = H * W * D // G
    s1, s2 = x.sum((1, 2)), (x * x).sum((1, 2))
    mu, mu2 = (s.reshape(B, G, -1).sum(-1) / n for s in (s1, s2))
    inverse = lax.rsqrt(mu2 - mu * mu + EPS)
    mu, inverse = (jnp.repeat(v, D // G, -1)[:, None, None] for v in (mu, inverse))
    return (x - mu) * inverse * scale + bias


@group("bare", without(LAST, "scale", "bias"))
def _(x):
    return last(x)


@group("no_bias", without(LAST, "bias"))
def _(x, scale):
    return scale * last(x)


@group("no_scale", without(LAST, "scale"))
def _(x, bias):
    return last(x) + bias


@group(
    "one_plus_scale", of=lambda x, scale, bias: dict(x=x, scale=1 + scale, bias=bias)
)
def _(x, scale, bias):
    return last(x) * (1.0 + scale) + bias


@group("silu_behind", read=lambda o: o[1].reshape(B, -1, G, D // G, 1))
def _(x, scale, bias):
    y = last(x) * scale + bias
    return jax.nn.silu(y), y


@group(
    "two_in_a_row",
    count=2,
    of=lambda x, scale, bias: dict(x=last(x) * scale + bias, scale=scale, bias=bias),
)
def _(x, scale, bias):
    return last(last(x) * scale + bias) * scale + bias


# ------------------------------------------------------------------------ layout
@group("first", FIRST)
def _(x, scale, bias):
    return first(x) * channel(scale, 4) + channel(bias, 4)


@group("first_five_axes", FIRST)
def _(x, scale, bias):
    y = over(x.reshape(B, G, -1, H, W), (2, 3, 4))
    scale, bias = (v.reshape(G, -1, 1, 1) for v in (scale, bias))
    return (y * scale + bias).reshape(x.shape)


@group("first_by_transpositions", FIRST)
def _(x, scale, bias):
    return jnp.moveaxis(last(jnp.moveaxis(x, 1, -1)) * scale + bias, -1, 1)


@group("tokens", dict(x="btd", scale="d", bias="d"))
def _(x, scale, bias):
    return last(x) * scale + bias


@group("tokens_first", dict(x="bdt", scale="d", bias="d"))
def _(x, scale, bias):
    return first(x) * channel(scale, 3) + channel(bias, 3)


@group("volume", dict(x="bthwd", scale="d", bias="d"))
def _(x, scale, bias):
    return last(x) * scale + bias


@group("volume_first", dict(x="bdthw", scale="d", bias="d"))
def _(x, scale, bias):
    return first(x) * channel(scale, 5) + channel(bias, 5)


@group("channels_alone", dict(x="bd", scale="d", bias="d"), first=False)
def _(x, scale, bias):
    y = over(x.reshape(B, G, -1), 2)
    return y.reshape(x.shape) * scale + bias


@group("under_vmap", FIRST)
def _(x, scale, bias):
    def one(x):
        y = over(x.reshape(G, -1), 1).reshape(x.shape)
        return y * scale[:, None, None] + bias[:, None, None]

    return jax.vmap(one)(x)


@group("one_sample_first", dict(x="dhw", scale="d", bias="d"), of=lambda x, scale, bias:
       dict(x=x[None], scale=scale, bias=bias), first=True, read=lambda o:
       o.reshape(1, 1, G, D // G, -1))  # fmt: skip
def _(x, scale, bias):
    y = over(x.reshape(G, -1), 1).reshape(x.shape)
    return y * scale[:, None, None] + bias[:, None, None]


@group("one_group", groups=1)
def _(x, scale, bias):
    return over(x, (1, 2, 3)) * scale + bias


@group("one_group_first", FIRST, groups=1)
def _(x, scale, bias):
    return over(x, (1, 2, 3)) * channel(scale, 4) + channel(bias, 4)


# --------------------------------------------------------------- instance norms
@group("instance", groups=D)
def _(x, scale, bias):
    return over(x, (1, 2)) * scale + bias


@group("instance_first", FIRST, groups=D)
def _(x, scale, bias):
    return over(x, (2, 3)) * channel(scale, 4) + channel(bias, 4)


@group("instance_bare", without(LAST, "scale", "bias"), groups=D)
def _(x):
    mu, var = x.mean((1, 2), keepdims=True), x.var((1, 2), keepdims=True)
    return (x - mu) * lax.rsqrt(var + EPS)


@group("instance_of_tokens", dict(x="btd", scale="d", bias="d"), groups=D)
def _(x, scale, bias):
    return over(x, 1) * scale + bias


@group("instance_of_one_sample", dict(x="1hwd", scale="d", bias="d"), groups=D)
def _(x, scale, bias):
    return over(x, (1, 2)) * scale + bias


# -------------------------------------- scale and shift from sample to sample
ADAPTIVE = dict(x=floats("bhwd", 0.7), s="bd", t="bd")


def bare_part(x, groups=G):
    return x.reshape(B, -1, groups, D // groups, 1)


@group(
    "adaptive", ADAPTIVE, operands="x", of=lambda x, s, t: dict(x=x),
    read=lambda o: bare_part(o[1]),
)  # fmt: skip
def _(x, s, t):
    y = last(x)
    return y * (1 + s[:, None, None]) + t[:, None, None], y


@group(
    "adaptive_behind_scale",
    dict(x=floats("bhwd", 0.7), scale="d", bias="d", s="bd", t="bd"),
    of=lambda x, scale, bias, s, t: dict(x=x, scale=scale, bias=bias),
    read=lambda o: bare_part(o[1]),
)
def _(x, scale, bias, s, t):
    y = last(x) * scale + bias
    return y * (1 + s[:, None, None]) + t[:, None, None], y


@group(
    "adaptive_instance", ADAPTIVE, groups=D, operands="x",
    of=lambda x, s, t: dict(x=x), read=lambda o: bare_part(o[1], D),
)  # fmt: skip
def _(x, s, t):
    y = over(x, (1, 2))
    return y * s[:, None, None] + t[:, None, None], y


# ----------------------------------------------------------------- other numbers
@group(
    "traced_epsilon",
    dict(x=floats("bhwd", 0.7), scale="d", e=floats("", 1e-3, 0.0)),
    of=lambda x, scale, e: dict(x=x, scale=scale),
    eps=1e-3,
    operands="x scale",
    also=({"eps": 0.0, "operands": "x scale epsilon"},),
)
def _(x, scale, e):
    y = x.reshape(B, H * W, G, -1)
    mu, var = y.mean((1, 3), keepdims=True), y.var((1, 3), keepdims=True)
    return ((y - mu) / jnp.sqrt(var + e)).reshape(x.shape) * scale


@group("wide_inside")
def _(x, scale, bias):
    y = last(x.astype(jnp.float32))
    return (y * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


@group("unbiased", eps=EPS * (1 - G / (H * W * D)),
       of=lambda x, scale, bias: dict(
           x=x, scale=scale * math.sqrt(1 - G / (H * W * D)), bias=bias))  # fmt: skip
def _(x, scale, bias):
    y = x.reshape(B, H * W, G, -1)
    var = y.var((1, 3), keepdims=True, ddof=1)
    y = (y - y.mean((1, 3), keepdims=True)) * lax.rsqrt(var + EPS)
    return y.reshape(x.shape) * scale + bias


@group("standardize", groups=D)
def _(x, scale, bias):
    return jax.nn.standardize(x, axis=(1, 2), epsilon=EPS) * scale + bias
