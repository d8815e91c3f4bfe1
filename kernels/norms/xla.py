"""Norms whose gradients keep one or two numbers per row beside the input.

Automatic differentiation of the usual spelling keeps a float32 copy of the input, of
the centred or of the normalised rows for the backward pass. This one keeps each row's
inverse root, and its mean if rows are centred, and reads x again, in its own dtype.
With n = (x − mean)·r, r = (mean((x − mean)²) + eps)^-½ and g the cotangent times scale:

    dx = r · (g − mean(g) − n · mean(g·n)),   dscale = Σ rows g₀·n,
    dbias = Σ rows g₀,   depsilon = −½ Σ g·n·r²

Both means of the first line's right are taken as 0 if rows are not centred. In centred
rows far from 0 the mean is rounded, so that the mean of n is not exactly 0. That
remainder, times mean(g·n), is subtracted too.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rewriter.kernels.norms.estimate import estimate
from rewriter.kernels.norms.forms import is_centred, kernels
from rewriter.kernels.norms.memory import temporary
from rewriter.ops.kernel import (
    PLATFORMS,
    Limits,
    Spec,
    Speed,
    Traits,
    pays_on_cpu,
)
from rewriter.support.verdict import YES, Verdict, no


def supports(spec: Spec) -> Verdict:
    """Takes real floating rows of any rank; a scale of the row's width."""
    dtype, shape = jnp.dtype(spec.dtype("x")), spec.shape("x")
    if not jnp.issubdtype(dtype, jnp.floating):
        return no("dtype", f"x is {dtype}, expected a real floating dtype")
    for name in ("scale", "bias"):
        if spec.has(name) and spec.shape(name) != shape[-1:]:
            return no("shape", f"{name} is {spec.shape(name)}, expected {shape[-1:]}")
    return YES


def forward(
    *,
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    epsilon: jax.Array | None = None,
    centred: bool,
    eps: float = 0.0,
    out_dtype: str | None = None,
    of_squares: bool = False,
    residuals: bool = False,
) -> Any:
    """Returns the result; with `residuals` each row's mean, if centred, and inverse."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y, means = x.astype(wide), ()
    if centred:
        mean = jnp.mean(y, axis=-1)
        y, means = y - mean[..., None], (mean,)
    square = jnp.mean(y * y, axis=-1) + jnp.asarray(eps, wide)
    if of_squares:
        (mean,) = means
        square = square + (mean * mean - mean * mean)  # inf - inf, or 0
    if epsilon is not None:
        square = square + epsilon.astype(wide)
    inverse = jax.lax.rsqrt(square)
    y = y * inverse[..., None]
    if scale is not None:
        y = y * scale.astype(wide)
    if bias is not None:
        y = y + bias.astype(wide)
    out = y.astype(out_dtype or x.dtype)
    return (out, (*means, inverse)) if residuals else out


def backward(
    *,
    x: jax.Array,
    out: None,
    residuals: tuple[jax.Array, ...],
    cotangent: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    epsilon: jax.Array | None = None,
    centred: bool,
    eps: float = 0.0,
    out_dtype: str | None = None,
    of_squares: bool = False,
) -> dict[str, jax.Array]:
    """Returns the cotangents of x, scale, bias and epsilon."""
    del out, eps, out_dtype, of_squares
    *means, inverse = residuals
    wide = inverse.dtype
    r = inverse[..., None]
    n = x.astype(wide)
    if centred:
        n = n - means[0][..., None]
    n = n * r
    g = outer = cotangent.astype(wide)
    if scale is not None:
        g = outer * scale.astype(wide)
    along = jnp.mean(g * n, axis=-1, keepdims=True)
    inner = g
    if centred:
        level = jnp.mean(g, axis=-1, keepdims=True)
        if x.dtype.itemsize > 2:  # in 16 bits this correction is below rounding
            level = level - along * jnp.mean(n, axis=-1, keepdims=True)
        inner = g - level
    grads = {"x": (r * (inner - n * along)).astype(x.dtype)}
    rows = tuple(range(x.ndim - 1))
    if scale is not None:
        grads["scale"] = jnp.sum(outer * n, axis=rows).astype(scale.dtype)
    if bias is not None:
        grads["bias"] = jnp.sum(outer, axis=rows).astype(bias.dtype)
    if epsilon is not None:
        total = -0.5 * x.shape[-1] * jnp.sum(along * r * r)
        grads["epsilon"] = total.astype(epsilon.dtype)
    return grads


def _saves(spec: Spec) -> list[Any]:
    wide = jnp.promote_types(spec.dtype("x"), jnp.float32)
    return [(spec.shape("x")[:-1], wide)] * (2 if is_centred(spec) else 1)


KERNELS = kernels(
    forward,
    backward,
    name="memory_bounded",
    platforms=PLATFORMS,
    version=1,
    limits=Limits(supports),
    speed=Speed(pays_on_cpu, estimate=estimate, temporary=temporary),
    traits=Traits(memory_bounded=True, saves_out=False, saves=_saves, flat=True),
)
