"""Group norms in plain `jax.numpy`.

Sources: Wu and He, "Group Normalization" (2018), eq. 1 to 3; Ulyanov, Vedaldi and
Lempitsky, "Instance Normalization" (2016), eq. 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

AXES = (-4, -2, -1)
"""The axes of x over which the statistics are: positions and channels of a group."""


def reference(
    *,
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    epsilon: jax.Array | None = None,
    eps: float = 0.0,
    out_dtype: str | None = None,
    of_squares: bool = False,
) -> jax.Array:
    """Returns ``(x - mean) / sqrt(var + eps + epsilon) * scale + bias``.

    Operands are documented where the op is declared.

    Args:
        eps: Added to the variance.
        out_dtype: The result's dtype; x's by default.
        of_squares: Whether a group whose mean's square overflows is NaN, as where that
            is taken off the mean of squares.

    Returns:
        [..., m, g, c, n]. Computed in float32, or float64 if x is, and rounded once.

    Example:
        Two positions, two groups of one channel:

        >>> x = jax.numpy.array([[1.0, 5.0], [3.0, 5.0]])
        >>> reference(x=x[:, :, None, None], eps=3.0)[:, :, 0, 0].tolist()
        [[-0.5, 0.0], [0.5, 0.0]]
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = x.astype(wide)
    mean = group_mean(y)
    y = y - mean
    square = group_mean(y * y) + jnp.asarray(eps, wide)
    if of_squares:
        square = square + (mean * mean - mean * mean)  # inf - inf, or 0
    if epsilon is not None:
        square = square + epsilon.astype(wide)
    y = y * jax.lax.rsqrt(square)
    if scale is not None:
        y = y * scale.astype(wide)[..., None]
    if bias is not None:
        y = y + bias.astype(wide)[..., None]
    return y.astype(out_dtype or x.dtype)


def group_mean(x: jax.Array) -> jax.Array:
    """Returns the mean of each group, [..., 1, g, 1, 1], in the dtype of x."""
    axes = tuple(x.ndim + k for k in AXES)
    total = jax.lax.reduce_sum(x, axes)
    return jax.lax.expand_dims(total, axes) / count(x.shape)


def count(shape: tuple[int, ...]) -> int:
    """Returns how many numbers of an array [..., m, g, c, n] a group has."""
    return shape[-4] * shape[-2] * shape[-1]


def sample(
    key: jax.Array, operands: Mapping[str, Any], params: Mapping[str, object]
) -> dict[str, jax.Array]:
    """Returns channels off centre, scales near 1, small biases, epsilon."""
    del params
    keys = jax.random.split(key, 3)
    made = {"x": 0.5 + jax.random.normal(keys[0], operands["x"].shape)}
    if "scale" in operands:
        made["scale"] = 1 + jax.random.normal(keys[1], operands["scale"].shape) / 8
    if "bias" in operands:
        made["bias"] = jax.random.normal(keys[2], operands["bias"].shape) / 8
    if "epsilon" in operands:
        made["epsilon"] = jnp.full(operands["epsilon"].shape, 1e-6)
    return {n: v.astype(operands[n].dtype) for n, v in made.items()}
