"""RMSNorm in plain `jax.numpy`.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), eq. 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp


def reference(
    *,
    x: jax.Array,
    scale: jax.Array | None = None,
    epsilon: jax.Array | None = None,
    eps: float = 0.0,
    out_dtype: str | None = None,
) -> jax.Array:
    """Returns ``x / sqrt(mean(x², -1) + eps + epsilon) * scale``.

    Operands are documented where the op is declared.

    Args:
        eps: Added to the mean square.
        out_dtype: The result's dtype; x's by default.

    Returns:
        [..., d]. Computed in float32, or float64 if x is, and rounded once.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = x.astype(wide)
    mean = jnp.mean(y * y, axis=-1, keepdims=True) + jnp.asarray(eps, wide)
    if epsilon is not None:
        mean = mean + epsilon.astype(wide)
    y = y * jax.lax.rsqrt(mean)
    if scale is not None:
        y = y * scale.astype(wide)
    return y.astype(out_dtype or x.dtype)


def sample(
    key: jax.Array, operands: Mapping[str, Any], params: Mapping[str, object]
) -> dict[str, jax.Array]:
    """Returns normal rows, scales near 1 and a small positive epsilon."""
    del params
    x_key, scale_key = jax.random.split(key)
    made = {"x": jax.random.normal(x_key, operands["x"].shape)}
    if "scale" in operands:
        made["scale"] = 1 + jax.random.normal(scale_key, operands["scale"].shape) / 8
    if "epsilon" in operands:
        made["epsilon"] = jnp.full(operands["epsilon"].shape, 1e-6)
    return {n: v.astype(operands[n].dtype) for n, v in made.items()}
