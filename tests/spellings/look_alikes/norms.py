"""What is no norm, or only with care."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.spellings.look_alikes.pieces import CAREFUL, REFUSED, _add

NORM = dict(x="btd", scale="d")
NORM_BIAS = dict(x="btd", scale="d", bias="d")
rms = _add(REFUSED, "rms_norm", NORM, {})
layer = _add(REFUSED, "layer_norm", NORM_BIAS, {})
careful_rms = _add(CAREFUL, "rms_norm", NORM, {})
careful_layer = _add(CAREFUL, "layer_norm", NORM_BIAS, {})
EPS = 1e-5


def ms(x):
    return jnp.mean(x * x, -1, keepdims=True)


def mean(x):
    return jnp.mean(x, -1, keepdims=True)


@rms("eps_outside_root", "eps is added to the root")
def _(x, scale):
    return x / (jnp.sqrt(ms(x)) + 0.1) * scale


@rms("eps_by_maximum", "the root is bounded below, not shifted")
def _(x, scale):
    return x / jnp.maximum(jnp.sqrt(ms(x)), 0.5) * scale


@rms("mean_of_absolute", "the mean of |x|")
def _(x, scale):
    return x / (jnp.mean(jnp.abs(x), -1, keepdims=True) + EPS) * scale


@rms("of_complex_moduli", "the mean of |z|² of complex numbers")
def _(x, scale):
    moduli = jnp.abs(x * np.complex64(1 + 2j))
    return x / jnp.sqrt(ms(moduli) + EPS) * scale


@rms("of_complex_squares", "the real part of z² is not the square of a real part")
def _(x, scale):
    squares = jnp.real(jnp.square(x * np.complex64(2 + 1j)))
    return x / jnp.sqrt(mean(squares) + EPS) * scale


@rms("not_inverted", "multiplied by the root")
def _(x, scale):
    return x * jnp.sqrt(ms(x) + EPS) * scale


@rms("fourth_power", "the mean of x⁴")
def _(x, scale):
    return x * (jnp.mean(x**4, -1, keepdims=True) + EPS) ** -0.25 * scale


@rms("no_root", "divided by the mean square itself")
def _(x, scale):
    return x / (ms(x) + EPS) * scale


@rms("largest", "divided by the largest entry")
def _(x, scale):
    return x / (jnp.max(jnp.abs(x), -1, keepdims=True) + EPS) * scale


@rms("of_another", "the statistics are another array's", dict(r="btd"))
def _(x, scale, r):
    return x * lax.rsqrt(ms(r) + EPS) * scale


@rms("of_a_part", "the statistics are of half the entries")
def _(x, scale):
    return x * lax.rsqrt(ms(x[..., :8]) + EPS) * scale


@rms("product_of_two", "the mean of x·r", dict(r="btd"))
def _(x, scale, r):
    return x * lax.rsqrt(jnp.abs(jnp.mean(x * r, -1, keepdims=True)) + EPS) * scale


@rms("layer_norm", "x is centred in the variance only")
def _(x, scale):
    return x * lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPS) * scale


@rms("unit_length_times_a_number", "of unit length, then scaled by 1/K")
def _(x, scale):
    y = x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + EPS)
    return jnp.sin(y * 0.25) * scale


@rms("squared_output", "the output is squared")
def _(x, scale):
    return jnp.square(x) * lax.rsqrt(ms(x) + EPS) * scale


@rms("absolute_output", "√(x²) is |x|")
def _(x, scale):
    return jnp.sqrt(x * x) * lax.rsqrt(ms(x) + EPS) * scale


@rms("stopped_statistics", "no gradient through the statistics")
def _(x, scale):
    return x * lax.stop_gradient(lax.rsqrt(ms(x) + EPS)) * scale


@rms("stopped_under_the_root", "no gradient through the mean square")
def _(x, scale):
    return x * jnp.sqrt(1 / lax.stop_gradient(ms(x) + EPS)) * scale


@rms("running_statistics", "the statistics are given", dict(r="b51"))
def _(x, scale, r):
    return x * lax.rsqrt(r * r + EPS) * scale


@rms("along_tokens_in_turn", "a running mean along the tokens")
def _(x, scale):
    m = jnp.cumsum(x * x, 1) / (jnp.arange(5)[:, None] + 1.0)
    return x * lax.rsqrt(m + EPS) * scale


@rms("inner_constants", "two calls with equal text multiply by other constants")
def _(x, scale):
    rng = np.random.default_rng(1)
    a, b = (jnp.asarray(rng.normal(size=16), jnp.float32) for _ in range(2))
    one, two = jax.jit(lambda y: y * a)(x), jax.jit(lambda y: y * b)(x)
    return x * lax.rsqrt(jnp.abs(mean(one * two)) + EPS) * scale


@rms("scalar_statistics", "one statistic for the whole array, another per row below")
def _(x, scale):
    return x * lax.rsqrt(ms(x) + jnp.mean(x * x) + EPS) * scale


@layer("rms_norm", "x is not centred")
def _(x, scale, bias):
    return x * lax.rsqrt(ms(x) + EPS) * scale + bias


@layer("variance_without_centring", "centred above, not in the variance")
def _(x, scale, bias):
    return (x - mean(x)) * lax.rsqrt(ms(x) + EPS) * scale + bias


@layer("centred_by_other_axis", "the mean is over the tokens")
def _(x, scale, bias):
    var = jnp.var(x, -1, keepdims=True)
    return (x - x.mean(1, keepdims=True)) * lax.rsqrt(var + EPS) * scale + bias


@layer("variance_of_other_axis", "the variance is over the tokens")
def _(x, scale, bias):
    var = jnp.var(x, 1, keepdims=True)
    return (x - mean(x)) * lax.rsqrt(var + EPS) * scale + bias


@layer("variance_of_another", "mean of one array, variance of another", dict(r="btd"))
def _(x, scale, bias, r):
    return (x - mean(x)) * lax.rsqrt(r.var(-1, keepdims=True) + EPS) * scale + bias


@layer("mean_of_another", "centred by another array's mean", dict(r="btd"))
def _(x, scale, bias, r):
    var = jnp.var(x, -1, keepdims=True)
    return (x - mean(r)) * lax.rsqrt(var + EPS) * scale + bias


@layer("eps_outside_root", "eps is added to the standard deviation")
def _(x, scale, bias):
    return (x - mean(x)) / (jnp.std(x, -1, keepdims=True) + 0.1) * scale + bias


@layer("clipped_non_variance", "max(0, ·) of something that may be negative")
def _(x, scale, bias):
    var = jnp.maximum(0.0, ms(x) - 2 * mean(x) ** 2)
    return (x - mean(x)) * lax.rsqrt(var + EPS) * scale + bias


@layer("mean_absolute_deviation", "the mean of |x − μ|")
def _(x, scale, bias):
    centred = x - mean(x)
    return centred / (mean(jnp.abs(centred)) + EPS) * scale + bias


@layer("median", "centred by the median")
def _(x, scale, bias):
    centred = x - jnp.median(x, -1, keepdims=True)
    return centred * lax.rsqrt(ms(centred) + EPS) * scale + bias


@layer("half_centred", "half the mean is subtracted")
def _(x, scale, bias):
    var = jnp.var(x, -1, keepdims=True)
    return (x - 0.5 * mean(x)) * lax.rsqrt(var + EPS) * scale + bias


@layer(
    "batch_norm",
    "statistics over batch and tokens, per channel, given",
    dict(m="d", r="d"),
)
def _(x, scale, bias, m, r):
    return (x - m) * lax.rsqrt(r * r + EPS) * scale + bias


@layer("stopped_mean", "no gradient through the mean")
def _(x, scale, bias):
    mu = lax.stop_gradient(mean(x))
    return (x - mu) * lax.rsqrt(ms(x - mu) + EPS) * scale + bias


@layer("covariance", "the variance is a covariance", dict(r="btd"))
def _(x, scale, bias, r):
    cov = mean((x - mean(x)) * (r - mean(r)))
    return (x - mean(x)) * lax.rsqrt(jnp.abs(cov) + EPS) * scale + bias


@careful_rms("eps_per_row", "eps differs by row", dict(r="b51"))
def _(x, scale, r):
    return x * lax.rsqrt(ms(x) + r * r) * scale


@careful_rms("scale_per_row", "the scale differs by row", dict(r="btd"))
def _(x, scale, r):
    return x * lax.rsqrt(ms(x) + EPS) * r


@careful_rms("eps_negative", "a negative eps")
def _(x, scale):
    return x * lax.rsqrt(ms(x + 3) - 1e-3) * scale


@careful_rms("l2_norm", "eps/K and scale/√K")
def _(x, scale):
    return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 0.1) * scale


@careful_rms("sum_over_other_count", "divided by another number than the width")
def _(x, scale):
    return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) / 7 + EPS) * scale


@careful_rms("statistics_of_double", "the statistics are of 2x")
def _(x, scale):
    return x * lax.rsqrt(ms(2 * x) + EPS) * scale


@careful_rms("over_tokens", "normalised over the tokens")
def _(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, 1, keepdims=True) + EPS) * scale


@careful_rms("over_both", "normalised over tokens and channels")
def _(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, (1, 2), keepdims=True) + EPS) * scale


@careful_rms("of_centred", "a LayerNorm")
def _(x, scale):
    x = x - mean(x)
    return x * lax.rsqrt(ms(x) + EPS) * scale


@careful_rms("equal_sizes", "T = D = B", x="444", scale="4")
def _(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, 1, keepdims=True) + EPS) * scale[:, None]


@careful_layer("ddof_two", "divided by K − 2")
def _(x, scale, bias):
    var = jnp.var(x, -1, keepdims=True, ddof=2)
    return (x - mean(x)) * lax.rsqrt(var + EPS) * scale + bias


@careful_layer("bias_before_scale", "the bias is scaled")
def _(x, scale, bias):
    y = (x - mean(x)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPS)
    return (y + bias) * scale


@careful_layer("bias_subtracted", "the bias is subtracted")
def _(x, scale, bias):
    y = (x - mean(x)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPS)
    return y * scale - bias


@careful_layer("negative_scale", "the scale is negated")
def _(x, scale, bias):
    y = (mean(x) - x) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPS)
    return y * scale + bias


@careful_layer("equal_sizes", "T = D = B", x="444", scale="4", bias="4")
def _(x, scale, bias):
    y = (x - x.mean(0)) * lax.rsqrt(x.var(0) + EPS)
    return y * scale[:, None, None] + bias[:, None, None]
