"""Group norms that read x once for their statistics, and keep two numbers per group.

Numbers of x are taken in blocks of positions. In each block and channel, the first one
is subtracted before the sums of the others and of their squares are taken, in one pass.
The blocks' means and squares are then put together exactly as Chan, Golub and LeVeque
do ("Updating formulae", 1979, eq. 2.1). So no digits are lost where the mean is large,
and a block of k numbers loses at most a factor k. A program that subtracts the square
of the mean from the mean of squares loses them all, and one that subtracts the mean
first reads x once more.

The gradient reads x and the cotangent g₀ once for the sums over positions, and once
more for x's cotangent. With n = (x − mean)·r, r = (var + eps)^-½, and g = g₀·scale:

    dscale = Σ g₀·n,   dbias = Σ g₀,   dx = r · (g − mean(g) − n · mean(g·n)),
    depsilon = −½ Σ g·n·r²

Both means are those of a group, and follow from the sums for each channel. The mean of
n, which rounding leaves, times mean(g·n) is taken off as well.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rewriter.kernels.group_norm.estimate import estimate
from rewriter.kernels.group_norm.reference import count, group_mean
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

FEWEST, MOST = 8, 128
"""Positions of a block: as few as take little memory, as many as lose few digits."""


def supports(spec: Spec) -> Verdict:
    """Takes real floating channels; scale and bias for each group and channel."""
    dtype, shape = jnp.dtype(spec.dtype("x")), spec.shape("x")
    if not jnp.issubdtype(dtype, jnp.floating):
        return no("dtype", f"x is {dtype}, expected a real floating dtype")
    for name in ("scale", "bias"):
        if spec.has(name) and spec.shape(name) != shape[-3:-1]:
            text = f"{name} is {spec.shape(name)}, expected {shape[-3:-1]}"
            return no("shape", text)
    return YES


# -------------------------------------------------------------------- statistics
def statistics(y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance of each group, [..., 1, g, 1, 1].

    Args:
        y: [..., m, g, c, n], in the dtype of the sums.
    """
    split = _block(y.shape)
    if split is None:
        mean = group_mean(y)
        return mean, group_mean(jnp.square(y - mean))
    axis, k = split
    at = y.ndim + axis
    blocks = y.reshape(*y.shape[:at], y.shape[at] // k, k, *y.shape[at + 1 :])
    first = jax.lax.slice_in_dim(blocks, 0, 1, axis=at + 1)
    rest = blocks - first
    total = jnp.sum(rest, at + 1)
    squares = jnp.sum(rest * rest, at + 1) - total * (total / k)
    means = jnp.squeeze(first, at + 1) + total / k
    mean = group_mean(means)
    return mean, group_mean(squares / k + jnp.square(means - mean))


def _block(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The axis of positions to cut, and the size of a block; None if neither fits."""
    for axis in (-4, -1):
        n = shape[axis]
        if isinstance(n, int):
            k = max((k for k in range(1, min(n, MOST) + 1) if n % k == 0), default=1)
            if k >= FEWEST:
                return axis, k
    return None


# ------------------------------------------------------------------- both passes
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
    """Returns the result; with `residuals` each group's mean and inverse root."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = x.astype(wide)
    mean, square = statistics(y)
    square = square + jnp.asarray(eps, wide)
    if of_squares:
        square = square + (mean * mean - mean * mean)  # inf - inf, or 0
    if epsilon is not None:
        square = square + epsilon.astype(wide)
    inverse = jax.lax.rsqrt(square)
    y = (y - mean) * inverse
    if scale is not None:
        y = y * scale.astype(wide)[..., None]
    if bias is not None:
        y = y + bias.astype(wide)[..., None]
    out = y.astype(out_dtype or x.dtype)
    return (out, tuple(map(_flat, (mean, inverse)))) if residuals else out


def _flat(y: jax.Array) -> jax.Array:
    """The numbers of groups, [..., g]."""
    return y[..., 0, :, 0, 0]


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
    mean, r = (y[..., None, :, None, None] for y in residuals)
    wide = r.dtype
    n = (x.astype(wide) - mean) * r
    g = up = cotangent.astype(wide)
    ups, products = _over_positions(up), _over_positions(up * n)
    weighted = ups, products
    if scale is not None:
        s = scale.astype(wide)[..., None]
        g, weighted = up * s, (ups * s, products * s)
    size = count(x.shape)
    level, along = (jnp.sum(y, -2, keepdims=True) / size for y in weighted)
    if x.dtype.itemsize > 2:  # in 16 bits this correction is below rounding
        level = level - along * (jnp.sum(_over_positions(n), -2, keepdims=True) / size)
    grads = {"x": (r * (g - level - n * along)).astype(x.dtype)}
    samples = tuple(range(x.ndim - 3))
    if scale is not None:
        grads["scale"] = jnp.sum(products[..., 0], samples).astype(scale.dtype)
    if bias is not None:
        grads["bias"] = jnp.sum(ups[..., 0], samples).astype(bias.dtype)
    if epsilon is not None:
        total = -0.5 * size * jnp.sum(along * r * r)
        grads["epsilon"] = total.astype(epsilon.dtype)
    return grads


def _over_positions(y: jax.Array) -> jax.Array:
    """The sum over positions, [..., 1, g, c, 1]."""
    return jnp.sum(y, (-4, -1), keepdims=True)


def _saves(spec: Spec) -> list[Any]:
    wide = jnp.promote_types(spec.dtype("x"), jnp.float32)
    *lead, _, groups, _, _ = spec.shape("x")
    return [((*lead, groups), wide)] * 2


KERNEL = Kernel(
    "memory_bounded",
    "group_norm",
    PLATFORMS,
    1,
    forward=forward,
    backward=backward,
    limits=Limits(supports),
    speed=Speed(pays_on_cpu, estimate=estimate),
    traits=Traits(memory_bounded=True, saves_out=False, saves=_saves, flat=True),
)
