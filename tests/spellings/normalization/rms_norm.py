"""RMSNorm as libraries and people write it."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.spellings.normalization.pieces import EPS, B, D, H, T, W, X, rms
from tests.spellings.spelling import positive


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
