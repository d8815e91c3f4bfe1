"""RMSNorm and LayerNorm as libraries and people write them."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.spellings.spelling import collect, given, positive

RMS, rms_spelling = collect("rms_norm")
LAYER, layer_spelling = collect("layer_norm")

B, T, N, D, H, W = 2, 5, 3, 16, 4, 6
EPS = 1e-5
X = dict(x="btd")
XS = dict(x="btd", scale="d")
XB = dict(x="btd", bias="d")
XSB = dict(x="btd", scale="d", bias="d")


def rms(name, inputs=XS, operands=None, **more):
    return rms_spelling(
        f"rms/{name}",
        inputs=inputs,
        operands=" ".join(inputs) if operands is None else operands,
        **{"eps": EPS, **({"out": "btd"} if "read" not in more else {}), **more},
    )


def layer(name, inputs=XSB, operands=None, **more):
    return layer_spelling(
        f"layer/{name}",
        inputs=inputs,
        operands=" ".join(inputs) if operands is None else operands,
        **{"eps": EPS, **({"out": "btd"} if "read" not in more else {}), **more},
    )


# -------------------------------------------------------- RMSNorm: statistics
def rms_of(name, make, **more):
    @rms(name, **more)
    def fn(x, scale):
        return make(x) * scale


def ms(x):
    return jnp.mean(x * x, axis=-1, keepdims=True)


rms_of(
    "mean_of_product",
    lambda x: x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS),
)
rms_of(
    "mean_of_square",
    lambda x: x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + EPS),
)
rms_of(
    "integer_power", lambda x: x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + EPS)
)
rms_of(
    "float_power",
    lambda x: x * lax.rsqrt(jnp.mean(jnp.power(x, 2.0), -1, keepdims=True) + EPS),
)
rms_of(
    "absolute_square",
    lambda x: x * lax.rsqrt(jnp.mean(jnp.abs(x) ** 2, -1, keepdims=True) + EPS),
)
rms_of("mean_expanded", lambda x: x * lax.rsqrt(jnp.mean(x * x, -1) + EPS)[..., None])
rms_of(
    "positive_axis",
    lambda x: x * lax.rsqrt(jnp.mean(x * x, axis=2, keepdims=True) + EPS),
)
rms_of(
    "sum_divided", lambda x: x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) / D + EPS)
)
rms_of(
    "sum_multiplied",
    lambda x: x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) * (1 / D) + EPS),
)
rms_of(
    "einsum",
    lambda x: x * lax.rsqrt(jnp.einsum("btd,btd->bt", x, x) / D + EPS)[..., None],
)
rms_of(
    "vmapped_dot",
    lambda x: (
        x * lax.rsqrt(jax.vmap(jax.vmap(lambda r: r @ r))(x) / D + EPS)[..., None]
    ),
)
rms_of("mean_by_ones", lambda x: x * lax.rsqrt((x * x) @ jnp.full((D, 1), 1 / D) + EPS))
rms_of(
    "vector_norm",
    lambda x: x * lax.rsqrt(jnp.linalg.norm(x, axis=-1, keepdims=True) ** 2 / D + EPS),
)
rms_of(
    "prescaled",
    lambda x: x * lax.rsqrt(jnp.sum((x * D**-0.5) ** 2, -1, keepdims=True) + EPS),
)
rms_of("eps_first", lambda x: x * lax.rsqrt(EPS + ms(x)))
rms_of("eps_array", lambda x: x * lax.rsqrt(ms(x) + jnp.asarray(EPS, x.dtype)))
rms_of(
    "eps_rounded",
    lambda x: x * lax.rsqrt(ms(x) + jnp.asarray(EPS, jnp.bfloat16).astype(x.dtype)),
    eps=float(jnp.bfloat16(EPS)),
)
rms_of("eps_large", lambda x: x * lax.rsqrt(ms(x) + 0.1), eps=0.1)
rms_of("no_eps", lambda x: x * lax.rsqrt(ms(x)), eps=0.0)

# ------------------------------------------------------ RMSNorm: inverse root
rms_of("divided_by_sqrt", lambda x: x / jnp.sqrt(ms(x) + EPS))
rms_of("one_over_sqrt", lambda x: x * (1 / jnp.sqrt(ms(x) + EPS)))
rms_of("reciprocal_of_sqrt", lambda x: x * jnp.reciprocal(jnp.sqrt(ms(x) + EPS)))
rms_of("power_minus_half", lambda x: x * (ms(x) + EPS) ** -0.5)
rms_of("divided_by_power_half", lambda x: x / (ms(x) + EPS) ** 0.5)
rms_of("jnp_power", lambda x: x * jnp.power(ms(x) + EPS, -0.5))
rms_of("sqrt_of_reciprocal", lambda x: x * jnp.sqrt(1 / (ms(x) + EPS)))
rms_of("exp_of_log", lambda x: x * jnp.exp(-0.5 * jnp.log(ms(x) + EPS)), count=None)
rms_of(
    "broadcast_before_root",
    lambda x: x * lax.rsqrt(jnp.broadcast_to(ms(x), x.shape) + EPS),
)
rms_of(
    "vmapped",
    lambda x: jax.vmap(jax.vmap(lambda r: r * lax.rsqrt(jnp.mean(r * r) + EPS)))(x),
)
rms_of(
    "jitted_statistics",
    lambda x: (
        x * jax.jit(lambda y: lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + EPS))(x)
    ),
)
rms_of("negated_twice", lambda x: -(-x * lax.rsqrt(ms(-x) + EPS)))
rms_of(
    "unit_axis", lambda x: (x[:, :, None] * lax.rsqrt(ms(x[:, :, None]) + EPS))[:, :, 0]
)
rms_of(
    "flattened_rows",
    lambda x: (lambda y: y * lax.rsqrt(ms(y) + EPS))(x.reshape(-1, D)).reshape(x.shape),
    also=[dict(operands="x", eps=EPS)],
)


# --------------------------------------------------------- RMSNorm: the scale
@rms("scale_first")
def _(x, scale):
    return scale * (x * lax.rsqrt(ms(x) + EPS))


@rms("scale_before_division")
def _(x, scale):
    return scale * x / jnp.sqrt(ms(x) + EPS)


@rms("scale_times_inverse")
def _(x, scale):
    return x * (lax.rsqrt(ms(x) + EPS) * scale)


@rms("scale_by_einsum")
def _(x, scale):
    return jnp.einsum("i...k,...k->i...k", x * lax.rsqrt(ms(x) + EPS), scale)


@rms("scale_reshaped")
def _(x, scale):
    return x * lax.rsqrt(ms(x) + EPS) * scale.reshape(1, 1, D)


@rms("no_scale", X)
def _(x):
    return x * lax.rsqrt(ms(x) + EPS)


@rms("no_scale_divided", X)
def _(x):
    return x / jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + EPS)


@rms(
    "one_plus_scale",
    dict(x="btd", w="d"),
    "x scale",
    bind=lambda x, w: dict(x=x, scale=1 + w),
)
def _(x, w):
    return x * lax.rsqrt(ms(x) + EPS) * (1 + w)


@rms(
    "one_plus_scale_as_sum",
    dict(x="btd", w="d"),
    "x scale",
    bind=lambda x, w: dict(x=x, scale=1 + w),
)
def _(x, w):
    y = x * lax.rsqrt(ms(x) + EPS)
    return y + y * w


@rms(
    "one_plus_scale_big_vision",
    dict(x="btd", w="d"),
    "x scale",
    eps=1e-6,
    bind=lambda x, w: dict(x=x, scale=1 + w),
)
def _(x, w):
    y = x * jnp.reciprocal(jnp.sqrt(ms(x) + 1e-6))
    w = jnp.expand_dims(w, axis=range(x.ndim - 1))
    return y * (w + 1)


@rms(
    "constant_scale",
    X,
    "x scale",
    bind=lambda x: dict(x=x, scale=np.linspace(0.5, 1.5, D)),
)
def _(x):
    return x * lax.rsqrt(ms(x) + EPS) * np.linspace(0.5, 1.5, D, dtype=np.float32)


@rms(
    "root_width_outside",
    X,
    eps=EPS / D,
    also=[dict(eps=EPS / D, operands="x scale")],
    bind=lambda x: dict(x=x),
)
def _(x):
    # The norm of the vector with eps inside: eps/D, and a factor √D to undo.
    return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + EPS) * D**0.5


@rms(
    "l2_norm",
    X,
    "x scale",
    eps=EPS / D,
    count=None,
    bind=lambda x: dict(x=x, scale=np.full(D, D**-0.5)),
)
def _(x):
    return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + EPS)


@rms(
    "l2_norm_with_scale",
    eps=EPS / D,
    count=None,
    bind=lambda x, w: dict(x=x, scale=w * D**-0.5),
)
def _(x, scale):
    return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + EPS) * scale


@rms(
    "adaptive_scale",
    dict(x="btd", a="b1d"),
    "x",
    count=None,
    bind=lambda x, a: dict(x=x),
    read=lambda o: o[1],
)
def _(x, a):
    y = x * lax.rsqrt(ms(x) + EPS)
    return y * (1 + a), y


# ------------------------------------------------------------ RMSNorm: casts
@rms("upcast_then_scale")
def _(x, scale):
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(ms(y) + EPS)
    return y.astype(x.dtype) * scale.astype(x.dtype)


@rms("upcast_with_scale")
def _(x, scale):
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(ms(y) + EPS) * scale.astype(jnp.float32)
    return y.astype(x.dtype)


@rms("upcast_statistics_only")
def _(x, scale):
    variance = jnp.mean(lax.square(x.astype(jnp.float32)), -1, keepdims=True)
    return x * lax.rsqrt(variance + EPS).astype(x.dtype) * scale


@rms("hugging_face_llama")
def _(x, scale):
    variance = jnp.asarray(x, dtype=jnp.float32)
    variance = jnp.power(variance, 2)
    variance = variance.mean(-1, keepdims=True)
    y = x / jnp.sqrt(variance + EPS)
    return scale * jnp.asarray(y, dtype=x.dtype)


@rms("hugging_face_t5", eps=1e-6)
def _(x, scale):
    variance = jnp.power(x.astype("float32"), 2).mean(axis=-1, keepdims=True)
    return scale * (x / jnp.sqrt(variance + 1e-6))


@rms("jax_llm_examples")
def _(x, scale):
    root = jnp.sqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True) + EPS)
    return (scale * x.astype(jnp.float32) / root).astype(x.dtype)


@rms("maxtext", eps=1e-6)
def _(x, scale):
    y = jnp.asarray(x, jnp.float32)
    mean2 = jnp.mean(lax.square(y), axis=-1, keepdims=True)
    y = jnp.asarray(y * lax.rsqrt(mean2 + 1e-6), x.dtype)
    return jnp.einsum("i...k,...k->i...k", y, jnp.asarray(scale, x.dtype) + 0.0)


@rms(
    "gemma",
    dict(x="btd", w="d"),
    "x scale",
    eps=1e-6,
    bind=lambda x, w: dict(x=x, scale=1 + w),
)
def _(x, w):
    var = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    y = x * lax.rsqrt(var + 1e-06)
    w = jnp.expand_dims(w, axis=range(len(x.shape) - 1))
    return y * (1 + w)


@rms("equinox", dict(x="d", scale="d"), out="d")
def _(x, scale):
    with jax.numpy_dtype_promotion("standard"):
        y = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(y**2) + EPS)
    return (inverse * y * scale).astype(x.dtype)


@rms("haiku_and_grok")
def _(x, scale):
    mean_squared = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    mean_squared = jnp.broadcast_to(mean_squared, x.shape)
    scale = jnp.broadcast_to(scale, x.shape)
    return scale * x * lax.rsqrt(mean_squared + EPS)


@rms("flax_linen")
def _(x, scale):
    y = jnp.asarray(x, jnp.promote_types(jnp.float32, x.dtype))
    mean2 = lax.square(y).mean(-1)
    mean2 = jnp.expand_dims(mean2, -1)
    factor = lax.rsqrt(mean2 + EPS)
    factor = factor * scale.reshape((1, 1, D))
    return jnp.asarray(y * factor, x.dtype)


@rms("torch_bridge", eps=1e-6)
def _(x, scale):
    variance = jnp.mean(jnp.power(x, 2), axis=(-1,), keepdims=True)
    return jnp.multiply(scale, x * lax.rsqrt(variance + 1e-6))


@rms(
    "traced_epsilon",
    dict(x="btd", scale="d", epsilon=positive("")),
    "x scale epsilon",
    eps=0.0,
)
def _(x, scale, epsilon):
    return x * lax.rsqrt(ms(x) + epsilon) * scale


# --------------------------------------------------- RMSNorm: axes and users
@rms("per_head", dict(x="btnd", scale="d"), out="btnd")
def _(x, scale):
    return x * lax.rsqrt(ms(x) + EPS) * scale


@rms(
    "per_head_own_scale",
    dict(x="btnd", w="nd"),
    "x",
    out="btnd",
    count=None,
    bind=lambda x, w: dict(x=x),
    read=lambda o: o[1],
)
def _(x, w):
    y = x * lax.rsqrt(ms(x) + EPS)
    return y * w, y


@rms("channels_first", dict(x="bdt", scale="d"), out="bdt")
def _(x, scale):
    y = x * lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + EPS)
    return y * scale[:, None]


@rms("first_axis", dict(x="dbt", scale="d"), out="dbt")
def _(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, 0) + EPS) * scale[:, None, None]


@rms(
    "two_axes",
    dict(x="bthw", scale="hw"),
    "x scale",
    bind=lambda x, w: dict(x=x.reshape(B, T, H * W), scale=w.reshape(-1)),
    read=lambda o: o.reshape(B, T, H * W),
)
def _(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, (2, 3), keepdims=True) + EPS) * scale


@rms("one_row", dict(x="d", scale="d"), out="d")
def _(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x) + EPS) * scale


@rms(
    "group_of_merged",
    dict(x="btd", scale="h"),
    "x scale",
    sizes=dict(d=12),
    bind=lambda x, w: dict(x=x.reshape(B, T, 3, 4), scale=w),
    read=lambda o: o.reshape(B, T, 3, 4),
)
def _(x, scale):
    y = x.reshape(B, T, 3, 4)
    y = y * lax.rsqrt(ms(y) + EPS) * scale
    return y.reshape(B, T, 12)


@rms(
    "residual",
    dict(x="btd", r="btd", scale="d"),
    "x scale",
    bind=lambda x, r, w: dict(x=x + r, scale=w),
    read=lambda o: o[0],
)
def _(x, r, scale):
    x = x + r
    return x * lax.rsqrt(ms(x) + EPS) * scale, x


@rms("residual_after", read=lambda o: o[1])
def _(x, scale):
    y = x * lax.rsqrt(ms(x) + EPS) * scale
    return x + y, y


@rms(
    "then_projection",
    dict(x="btd", scale="d", w="dw"),
    "x scale",
    bind=lambda x, s, w: dict(x=x, scale=s),
    read=lambda o: o[1],
)
def _(x, scale, w):
    y = x * lax.rsqrt(ms(x) + EPS) * scale
    return y @ w, y


@rms("statistics_returned", read=lambda o: o[0])
def _(x, scale):
    inverse = lax.rsqrt(ms(x) + EPS)
    return x * inverse * scale, inverse


@rms("dead_statistics")
def _(x, scale):
    unused = jnp.sqrt(jnp.mean(x * x))
    del unused
    return x * lax.rsqrt(ms(x) + EPS) * scale


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
    "instance_norm",
    dict(x="bhwn"),
    "x",
    bind=lambda x: dict(x=x.transpose(0, 3, 1, 2).reshape(B, N, -1)),
    read=lambda o: o.transpose(0, 3, 1, 2).reshape(B, N, -1),
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
    "group_norm",
    dict(x="bhwd", scale="d", bias="d"),
    "x",
    count=None,
    bind=lambda x, s, b: dict(
        x=x.reshape(B, H * W, 4, 4).transpose(0, 2, 1, 3).reshape(B, 4, -1)
    ),
    read=lambda o: o[1].reshape(B, H * W, 4, 4).transpose(0, 2, 1, 3).reshape(B, 4, -1),
)
def _(x, scale, bias):
    y = x.reshape(B, H, W, 4, 4)
    mu = y.mean((1, 2, 4), keepdims=True)
    mu2 = jnp.square(y).mean((1, 2, 4), keepdims=True)
    var = jnp.maximum(0.0, mu2 - jnp.square(mu))
    y = ((y - mu) * lax.rsqrt(var + EPS)).reshape(x.shape)
    return y * scale + bias, y


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


SPELLINGS = [*RMS, *LAYER]
