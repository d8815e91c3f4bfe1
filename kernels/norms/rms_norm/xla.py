"""RMSNorm whose gradient keeps one number per row beside the input.

Automatic differentiation of the usual spelling keeps a float32 copy of the
input or of the normalised rows for the backward pass. This one keeps the
inverse root per row and reads x again, in its own dtype. With n = x·r,
r = (mean(x²) + eps)^-½ and g the cotangent times scale:

    dx = r · (g − n · mean(g·n)),   dscale = Σ rows g₀·n,
    depsilon = −½ Σ g·n·r²
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rewriter.kernels.norms.rms_norm.estimate import estimate
from rewriter.ops.kernel import (
    PLATFORMS,
    Kernel,
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
    epsilon: jax.Array | None = None,
    eps: float = 0.0,
    out_dtype: str | None = None,
    residuals: bool = False,
) -> Any:
    """Returns the result, and with `residuals` the inverse root of each row."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = x.astype(wide)
    mean = jnp.mean(y * y, axis=-1) + jnp.asarray(eps, wide)
    if epsilon is not None:
        mean = mean + epsilon.astype(wide)
    inverse = jax.lax.rsqrt(mean)
    y = y * inverse[..., None]
    if scale is not None:
        y = y * scale.astype(wide)
    out = y.astype(out_dtype or x.dtype)
    return (out, (inverse,)) if residuals else out


def backward(
    *,
    x: jax.Array,
    out: None,
    residuals: tuple[jax.Array],
    cotangent: jax.Array,
    scale: jax.Array | None = None,
    epsilon: jax.Array | None = None,
    eps: float = 0.0,
    out_dtype: str | None = None,
) -> dict[str, jax.Array]:
    """Returns the cotangents of x, scale and epsilon."""
    del out, eps, out_dtype
    (inverse,) = residuals
    wide = inverse.dtype
    r = inverse[..., None]
    n = x.astype(wide) * r
    g = outer = cotangent.astype(wide)
    if scale is not None:
        g = outer * scale.astype(wide)
    mean = jnp.mean(g * n, axis=-1, keepdims=True)
    grads = {"x": (r * (g - n * mean)).astype(x.dtype)}
    rows = tuple(range(x.ndim - 1))
    if scale is not None:
        grads["scale"] = jnp.sum(outer * n, axis=rows).astype(scale.dtype)
    if epsilon is not None:
        total = -0.5 * x.shape[-1] * jnp.sum(mean * r * r)
        grads["epsilon"] = total.astype(epsilon.dtype)
    return grads


KERNEL = Kernel(
    name="memory_bounded",
    op="rms_norm",
    platforms=PLATFORMS,
    version=1,
    forward=forward,
    backward=backward,
    limits=Limits(supports),
    speed=Speed(pays_on_cpu, estimate=estimate),
    traits=Traits(memory_bounded=True, saves_out=False),
)
