"""Activations by name, in Mosaic TPU operations; missing operations are replaced."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from rewriter.ops.activations import ACTIVATIONS, Activation

WITHOUT = ("elu", "selu", "celu")
"""Activations that need ``expm1``, which the compiler lacks: they do not compile."""


@jax.custom_jvp
def _erf(y: jax.Array) -> jax.Array:
    """Has its own derivative: JAX's asks for an accuracy unknown to the compiler."""
    return jax.lax.erf(y)


_erf.defjvps(lambda t, out, y: t * (2 / math.sqrt(math.pi)) * jnp.exp(-y * y))


def _gelu_erf(y: jax.Array, beta: float) -> jax.Array:
    """Exact up to float32's rounding of 1; there is no ``erfc``."""
    del beta
    return 0.5 * y * (1 + _erf(y * math.sqrt(0.5)))


ON_TPU: Mapping[str, Activation] = {**ACTIVATIONS, "gelu_erf": _gelu_erf}
"""All activations, as kernels compute them of float32 blocks; see `WITHOUT`."""
