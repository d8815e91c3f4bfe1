"""Activations by name, in Mosaic GPU operations; missing operations are replaced."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax

from rewriter.ops.activations import ACTIVATIONS, Activation

WITHOUT = {
    "elu": "expm1", "selu": "expm1", "celu": "expm1", "softplus": "log1p",
    "mish": "log1p",
}  # fmt: skip
"""Activations that need functions missing in Mosaic GPU."""


def _gelu_erf(y: jax.Array, beta: float) -> jax.Array:
    """Exact up to float32's rounding of 1; there is no ``erfc``."""
    del beta
    return 0.5 * y * (1 + jax.lax.erf(y * math.sqrt(0.5)))


def _gelu_tanh(y: jax.Array, beta: float) -> jax.Array:
    """Uses a logistic function: near -1 a fast tanh leaves few digits of 1 + tanh."""
    del beta
    inner = math.sqrt(2 / math.pi) * (y + 0.044715 * (y * y * y))
    return y * jax.lax.logistic(2 * inner)


ON_HOPPER: Mapping[str, Activation] = {
    **{name: of for name, of in ACTIVATIONS.items() if name not in WITHOUT},
    "gelu_erf": _gelu_erf,
    "gelu_tanh": _gelu_tanh,
}
"""Activations as kernels compute them of float32 blocks."""
