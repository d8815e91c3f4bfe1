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

Both means are those of a group, and follow from the sums for each channel. In float32
the mean of n, which rounding leaves, is taken off n.
"""

from __future__ import annotations

from collections.abc import Callable
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
def statistics(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance of each group, [..., 1, g, 1, 1].

    Args:
        x: [..., m, g, c, n].
    """
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    split = _block(y.shape)
    if split is None:
        mean = group_mean(y)
        return mean, group_mean(jnp.square(y - mean))
    axis, k = split
    at = y.ndim + axis
    blocks = y.reshape(*y.shape[:at], y.shape[at] // k, k, *y.shape[at + 1 :])
    first = jax.lax.slice_in_dim(blocks, 0, 1, axis=at + 1)
    left = blocks - first
    parts = left * (1.0 / k)  # so that no sum overflows whose mean does not
    off = jnp.sum(parts, at + 1)
    most = jnp.finfo(y.dtype).max  # infinity minus infinity would be NaN
    around = jnp.sum(left * parts, at + 1) - jnp.minimum(off * off, most)
    means = jnp.squeeze(first, at + 1) + off
    mean = group_mean(means)
    return mean, group_mean(around + jnp.square(means - mean))


def _block(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The axis of positions to cut, and the size of a block; None if neither fits."""
    for axis in (-4, -1):
        n = shape[axis]
        if isinstance(n, int):
            k = max((k for k in range(1, min(n, MOST) + 1) if n % k == 0), default=1)
            if k >= FEWEST:
                return axis, k
    return None


def sums(
    up: jax.Array, x: jax.Array, mean: jax.Array, centred: bool
) -> list[jax.Array]:
    """Returns sums over positions, [..., 1, g, c, 1].

    Args:
        up: [..., m, g, c, n], the result's cotangent.
        x: As up.
        mean: That of each group, [..., 1, g, 1, 1], in the dtype of the sums.
        centred: Whether to return the last sum.

    Returns:
        Those of up, of up · (x - mean), and of x - mean if `centred`.
    """
    up, left = up.astype(mean.dtype), x.astype(mean.dtype) - mean
    terms = [up, up * left, left][: 3 if centred else 2]
    return [jnp.sum(y, (-4, -1), keepdims=True) for y in terms]


# ------------------------------------------------------------------- both passes
def forward(
    statistics: Callable[[jax.Array], tuple[jax.Array, jax.Array]] = statistics,
    /,
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
    """Returns the result; with `residuals` each group's mean and inverse root.

    Operands are those of the op, and parameters are as in `reference`.

    Args:
        statistics: What computes mean and variance of x.
        residuals: Whether to return what the gradient needs.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    mean, square = statistics(x)
    square = square + jnp.asarray(eps, wide)
    if of_squares:
        square = square + (mean * mean - mean * mean)  # inf - inf, or 0
    if epsilon is not None:
        square = square + epsilon.astype(wide)
    inverse = jax.lax.rsqrt(square)
    factor = inverse if scale is None else inverse * scale.astype(wide)[..., None]
    y = (x.astype(wide) - mean) * factor
    if bias is not None:
        y = y + bias.astype(wide)[..., None]
    out = y.astype(out_dtype or x.dtype)
    return (out, tuple(map(_flat, (mean, inverse)))) if residuals else out


def _flat(y: jax.Array) -> jax.Array:
    """The numbers of groups, [..., g]."""
    return y[..., 0, :, 0, 0]


def backward(
    sums: Callable[..., list[jax.Array]] = sums,
    /,
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
    """Returns the cotangents of every operand.

    Operands are those of the op, and parameters are as in `reference`.

    Args:
        sums: What computes the sums over positions.
        out: Not needed.
        residuals: What `forward` returned.
        cotangent: As the result.
    """
    del out, eps, out_dtype, of_squares
    mean, r = (y[..., None, :, None, None] for y in residuals)
    wide, size = r.dtype, count(x.shape)
    centred = x.dtype.itemsize > 2  # in 16 bits this correction is below rounding
    ups, products, *rest = sums(cotangent, x, mean, centred)
    products = products * r
    left = 0.0
    if rest:
        left = _over_channels(rest[0]) * r / size  # the mean of n
        products = products - ups * left
    s = jnp.ones((), wide) if scale is None else scale.astype(wide)[..., None]
    level, along = (_over_channels(y * s) / size for y in (ups, products))
    n = (x.astype(wide) - mean) * r
    g = cotangent.astype(wide) * s
    grads = {"x": (r * (g - level - (n - left) * along)).astype(x.dtype)}
    samples = tuple(range(x.ndim - 3))
    if scale is not None:
        grads["scale"] = jnp.sum(products[..., 0], samples).astype(scale.dtype)
    if bias is not None:
        grads["bias"] = jnp.sum(ups[..., 0], samples).astype(bias.dtype)
    if epsilon is not None:
        total = -0.5 * size * jnp.sum(along * r * r)
        grads["epsilon"] = total.astype(epsilon.dtype)
    return grads


def _over_channels(y: jax.Array) -> jax.Array:
    """The sum over the channels of each group, [..., 1, g, 1, 1]."""
    return jnp.sum(y, -2, keepdims=True)


def pays(spec: Spec, platform: str) -> Verdict:
    """Returns no: XLA's own fusions were as fast, on a CPU and on a Hopper GPU."""
    del spec
    return no("platform", f"XLA is as fast on {platform}")


def saves(spec: Spec) -> list[Any]:
    """Returns shapes and dtypes of the mean and the inverse root of each group."""
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
    speed=Speed(pays, estimate=estimate),
    traits=Traits(memory_bounded=True, saves_out=False, saves=saves, flat=True),
)
