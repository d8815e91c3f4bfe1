"""Activations by name: functions of a branch, and the number that some of them have.

Patterns recognise them by their traces; kernels compute with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

Activation = Callable[[jax.Array, float], jax.Array]

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
