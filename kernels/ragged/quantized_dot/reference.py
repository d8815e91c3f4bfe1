"""Ragged dot of dequantized matrices: 8 bits, times a scale for each column."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rewriter.kernels.ragged import dot

if TYPE_CHECKING:
    from jax import Array

DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")
"""Dtypes of stored matrices: 16-bit floats hold their numbers exactly."""


def reference(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    rhs_scale: Array | None = None,
    *,
    mode: str = "forward",
    out_dtype: str | None = None,
    precision: str | None = None,
    product: Callable[..., Array] = dot.OP.reference,
) -> Array:
    """Returns each row times its group's matrix, which is dequantized first.

    Operands are documented where the op is declared.

    Args:
        mode: "forward", or "transposed": rhs's last axis is summed.
        out_dtype: The result's dtype, lhs's by default.
        precision: As in `jax.lax.dot`.
        product: A ragged dot, as `rewriter.kernels.ragged.dot.reference.reference`.

    Returns:
        [m, n].
    """
    return product(
        lhs, dequantized(lhs, rhs, rhs_scale, mode), group_sizes, mode=mode,
        out_dtype=out_dtype or str(lhs.dtype), precision=precision,
    )  # fmt: skip


def general(*given: Any, **more: Any) -> Array:
    """Computes `reference` in a form that supports every transformation.

    Args:
        *given: As for `reference`.
        **more: As for `reference`.
    """
    return reference(*given, **more, product=dot.OP.general)


def dequantized(lhs: Array, rhs: Array, rhs_scale: Array | None, mode: str) -> Array:
    """Returns the matrices in lhs's dtype, multiplied in float32 and rounded once."""
    if rhs_scale is None:
        return rhs.astype(lhs.dtype)
    wide = jnp.promote_types(rhs_scale.dtype, jnp.float32)
    scale = rhs_scale.astype(wide)
    scale = scale[:, :, None] if mode == "transposed" else scale[:, None, :]
    return (rhs.astype(wide) * scale).astype(lhs.dtype)


def distributions(operands: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Returns the ways to draw group sizes, by name, as for a ragged dot."""
    assert dot.OP.distributions is not None
    draws = dot.OP.distributions(operands)
    return {name: functools.partial(_drawn, draw) for name, draw in draws.items()}


def sample(
    key: Array, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, Array]:
    """Returns normal rows, matrices that use their range, and group sizes.

    Args:
        key: A PRNG key.
        operands: Shapes and dtypes by operand name.
        params: The op's parameters.
    """
    return _drawn(dot.OP.sample, key, operands, params)


def _drawn(
    draw: Callable[..., Any],
    key: Array,
    operands: Mapping[str, Any],
    params: Mapping[str, Any],
) -> dict[str, Array]:
    rest, of_scale = jax.random.split(key)
    wide = jax.ShapeDtypeStruct(operands["rhs"].shape, jnp.dtype("bfloat16"))
    made = dict(draw(rest, {**operands, "rhs": wide}, params))
    made["rhs"] = quantized(made["rhs"], operands["rhs"].dtype)
    if "rhs_scale" in operands:
        x = operands["rhs_scale"]
        scale = jax.random.uniform(of_scale, x.shape, minval=0.5, maxval=1.5)
        made["rhs_scale"] = (0.01 * scale).astype(x.dtype)
    return made


def quantized(x: Array, dtype: Any) -> Array:
    """Returns normal numbers in 8 bits: a deviation is a third of int8's range."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.clip(jnp.round(40 * x.astype(jnp.float32)), -127, 127).astype(dtype)
    return x.astype(dtype)
