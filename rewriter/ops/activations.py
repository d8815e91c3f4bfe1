"""Activations by name: functions of a branch, and the number that some of them have.

Patterns recognise them by their traces; kernels compute with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

Activation = Callable[[jax.Array, float], jax.Array]

Bounds = tuple[float | None, float | None]
"""A lower and an upper bound, None for none."""

SELU_ALPHA, SELU_SCALE = 1.6732632423543772, 1.0507009873554805
"""Klambauer et al., "Self-Normalizing Neural Networks" (2017), eq. 14."""


def _relu(y: jax.Array) -> jax.Array:
    """Keeps NaN, like max(y, 0); the derivative there and at 0 is 0."""
    return jnp.where(y > 0, y, jnp.where(y <= 0, jnp.zeros_like(y), jnp.nan))


def _bounded_above(y: jax.Array, most: float) -> jax.Array:
    """Keeps NaN, like min(y, most); the derivative there and at the bound is 0."""
    above = jnp.where(y >= most, jnp.full_like(y, most), jnp.nan)
    return jnp.where(y < most, y, above)


def _not_above_zero(y: jax.Array) -> jax.Array:
    """Its exponential does not overflow, nor do gradients."""
    return jnp.where(y > 0, jnp.zeros_like(y), y)


def _elu(y: jax.Array, alpha: float) -> jax.Array:
    return jnp.where(y > 0, y, alpha * jnp.expm1(_not_above_zero(y)))


def _gelu_tanh(y: jax.Array) -> jax.Array:
    inner = math.sqrt(2 / math.pi) * (y + 0.044715 * (y * y * y))
    return 0.5 * y * (1 + jnp.tanh(inner))


def _gate_of_six(y: jax.Array) -> jax.Array:
    """How far y is between -3 and 3, from 0 to 1."""
    return _bounded_above(_relu(y + 3), 6) / 6


def _softplus(y: jax.Array) -> jax.Array:
    return jnp.logaddexp(y, jnp.zeros_like(y))


ACTIVATIONS: Mapping[str, Activation] = {
    "silu": lambda y, beta: y * jax.lax.logistic(y),
    "gelu_tanh": lambda y, beta: _gelu_tanh(y),
    "gelu_erf": lambda y, beta: 0.5 * y * jax.lax.erfc(-y * math.sqrt(0.5)),
    "gelu_quick": lambda y, beta: y * jax.lax.logistic(1.702 * y),
    "sigmoid": lambda y, beta: jax.lax.logistic(y),
    "tanh": lambda y, beta: jnp.tanh(y),
    "relu": lambda y, beta: _relu(y),
    "relu2": lambda y, beta: jnp.square(_relu(y)),
    "relu_by_product": lambda y, beta: y * (y > 0).astype(y.dtype),
    "relu2_by_product": lambda y, beta: jnp.square(y * (y > 0).astype(y.dtype)),
    "relu6": lambda y, beta: _bounded_above(_relu(y), 6),
    "hard_sigmoid": lambda y, beta: _gate_of_six(y),
    "hard_silu": lambda y, beta: y * _gate_of_six(y),
    "selu": lambda y, beta: SELU_SCALE * _elu(y, SELU_ALPHA),
    "softplus": lambda y, beta: _softplus(y),
    "mish": lambda y, beta: y * jnp.tanh(_softplus(y)),
    "identity": lambda y, beta: y,
    "swish": lambda y, beta: y * jax.lax.logistic(beta * y),
    "elu": _elu,
    "leaky_relu": lambda y, beta: jnp.where(y > 0, y, beta * y),
    "celu": lambda y, beta: _relu(y) + beta * jnp.expm1(_not_above_zero(y) / beta),
}
"""Activations by name; only those in `PARAMETRIC` read the number."""

PARAMETRIC = ("swish", "elu", "leaky_relu", "celu")
"""Activations with a number: a factor inside, what is left below zero, or a slope."""

BY_PRODUCT: Mapping[str, str] = {
    "relu": "relu_by_product",
    "relu2": "relu2_by_product",
}
"""Activations of the same real numbers that are NaN for -inf: 0 is a factor there."""

KINKS: Mapping[str, tuple[float, ...]] = {
    "relu": (0.0,),
    "relu2": (0.0,),
    "relu_by_product": (0.0,),
    "relu2_by_product": (0.0,),
    "relu6": (0.0, 6.0),
    "hard_sigmoid": (-3.0, 3.0),
    "hard_silu": (-3.0, 3.0),
    "selu": (0.0,),
    "elu": (0.0,),
    "leaky_relu": (0.0,),
    "celu": (0.0,),
}
"""Where activations have no derivative, or no second one. What they give there is a
convention: of `max(y, 0)` it is 1/2, of `where(y < 0, 0, y)` it is 1."""


def clipped(y: jax.Array, bounds: Bounds) -> jax.Array:
    """Returns a branch within bounds: the definition, by which gradients are proved."""
    return y if bounds == (None, None) else jnp.clip(y, *bounds)


def clipped_by_choice(y: jax.Array, bounds: Bounds) -> jax.Array:
    """Returns a branch within bounds, as kernels compute it.

    Derivatives are those of `clipped`: 1/2 at a bound. Beyond one the derivative is
    chosen, not multiplied. So an infinite cotangent gives 0 there, and not NaN.
    """
    low, high = bounds
    if low is not None:
        y = jnp.maximum(jnp.where(y < low, jnp.full_like(y, low), y), low)
    if high is not None:
        y = jnp.minimum(jnp.where(y > high, jnp.full_like(y, high), y), high)
    return y
