"""LayerNorm whose gradient keeps two numbers per row beside the input.

Automatic differentiation of the usual spelling keeps the centred or the
normalised rows in float32 for the backward pass. This one keeps each row's
mean and inverse deviation and reads x again, in its own dtype. With
n = (x − mean)·r, r = (var + eps)^-½ and g the cotangent times scale:

    dx = r · (g − mean(g) − n · mean(g·n)),   dscale = Σ rows g₀·n,
    dbias = Σ rows g₀,   depsilon = −½ Σ g·n·r²

In rows far from 0 the mean is rounded, so that the mean of n is not exactly 0. That
remainder, times mean(g·n), is subtracted too.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rewriter.kernels.norms.layer_norm.estimate import estimate
from rewriter.kernels.norms.rms_norm.xla import supports as supports
from rewriter.ops.kernel import PLATFORMS, Kernel, Limits, Speed, Traits, pays_on_cpu


def forward(
    *,
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    epsilon: jax.Array | None = None,
    eps: float = 0.0,
    out_dtype: str | None = None,
    of_squares: bool = False,
    residuals: bool = False,
) -> Any:
    """Returns the result, and with `residuals` each row's mean and inverse."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = x.astype(wide)
    mean = jnp.mean(y, axis=-1)
    y = y - mean[..., None]
    variance = jnp.mean(y * y, axis=-1) + jnp.asarray(eps, wide)
    if of_squares:
        variance = variance + (mean * mean - mean * mean)  # inf - inf, or 0
    if epsilon is not None:
        variance = variance + epsilon.astype(wide)
    inverse = jax.lax.rsqrt(variance)
    y = y * inverse[..., None]
    if scale is not None:
        y = y * scale.astype(wide)
    if bias is not None:
        y = y + bias.astype(wide)
    out = y.astype(out_dtype or x.dtype)
    return (out, (mean, inverse)) if residuals else out


def backward(
    *,
    x: jax.Array,
    out: None,
    residuals: tuple[jax.Array, jax.Array],
    cotangent: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    epsilon: jax.Array | None = None,
    eps: float = 0.0,
    out_dtype: str | None = None,
    of_squares: bool = False,
) -> dict[str, jax.Array]:
    """Returns the cotangents of x, scale, bias and epsilon."""
    del out, eps, out_dtype, of_squares
    mean, inverse = residuals
    wide = inverse.dtype
    r = inverse[..., None]
    n = (x.astype(wide) - mean[..., None]) * r
    g = outer = cotangent.astype(wide)
    if scale is not None:
        g = outer * scale.astype(wide)
    along = jnp.mean(g * n, axis=-1, keepdims=True)
    level = jnp.mean(g, axis=-1, keepdims=True)
    if x.dtype.itemsize > 2:  # in 16 bits this correction is below rounding
        level = level - along * jnp.mean(n, axis=-1, keepdims=True)
    grads = {"x": (r * (g - level - n * along)).astype(x.dtype)}
    rows = tuple(range(x.ndim - 1))
    if scale is not None:
        grads["scale"] = jnp.sum(outer * n, axis=rows).astype(scale.dtype)
    if bias is not None:
        grads["bias"] = jnp.sum(outer, axis=rows).astype(bias.dtype)
    if epsilon is not None:
        total = -0.5 * x.shape[-1] * jnp.sum(along * r * r)
        grads["epsilon"] = total.astype(epsilon.dtype)
    return grads


KERNEL = Kernel(
    name="memory_bounded",
    op="layer_norm",
    platforms=PLATFORMS,
    version=1,
    forward=forward,
    backward=backward,
    limits=Limits(supports),
    speed=Speed(pays_on_cpu, estimate=estimate),
    traits=Traits(memory_bounded=True, saves_out=False),
)
