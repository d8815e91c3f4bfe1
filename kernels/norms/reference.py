"""Norms of rows in plain `jax.numpy`.

Sources: Ba, Kiros and Hinton, "Layer Normalization" (2016), eq. 3 and 4; Zhang and
Sennrich, "Root Mean Square Layer Normalization" (2019), eq. 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.kernels.shared.rows import row_mean


def reference(
    *,
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    epsilon: jax.Array | None = None,
    centred: bool,
    eps: float = 0.0,
    out_dtype: str | None = None,
    of_squares: bool = False,
) -> jax.Array:
    """Returns ``x / sqrt(mean(x²) + eps + epsilon) * scale + bias``.

    Operands are documented where the op is declared.

    Args:
        centred: Whether the mean of each row is subtracted from x first.
        eps: Added to the mean square.
        out_dtype: The result's dtype; x's by default.
        of_squares: Whether a row whose mean's square overflows is NaN, as where that is
            taken off the mean of squares.

    Returns:
        [..., d]. Computed in float32, or float64 if x is, and rounded once.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y, mean = x.astype(wide), None
    if centred:
        mean = row_mean(y)
        y = y - mean
    square = row_mean(y * y) + jnp.asarray(eps, wide)
    if of_squares:
        square = square + (mean * mean - mean * mean)  # inf - inf, or 0
    if epsilon is not None:
        square = square + epsilon.astype(wide)
    y = y * jax.lax.rsqrt(square)
    if scale is not None:
        y = y * scale.astype(wide)
    if bias is not None:
        y = y + bias.astype(wide)
    return y.astype(out_dtype or x.dtype)


def sample(
    key: jax.Array,
    operands: Mapping[str, Any],
    params: Mapping[str, object],
    *,
    centred: bool,
) -> dict[str, jax.Array]:
    """Returns rows, off centre if `centred`; scales near 1, small biases, epsilon."""
    del params
    keys = jax.random.split(key, 3 if centred else 2)
    rows = jax.random.normal(keys[0], operands["x"].shape)
    made = {"x": 0.5 + rows if centred else rows}
    if "scale" in operands:
        made["scale"] = 1 + jax.random.normal(keys[1], operands["scale"].shape) / 8
    if "bias" in operands:
        made["bias"] = jax.random.normal(keys[2], operands["bias"].shape) / 8
    if "epsilon" in operands:
        made["epsilon"] = jnp.full(operands["epsilon"].shape, 1e-6)
    return {n: v.astype(operands[n].dtype) for n, v in made.items()}
