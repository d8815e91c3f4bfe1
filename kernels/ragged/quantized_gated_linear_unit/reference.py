"""The gated linear unit of experts with dequantized matrices: 8 bits, times scales."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rewriter.kernels.ragged import gated_linear_unit as plain
from rewriter.kernels.ragged.quantized_dot.reference import dequantized, quantized
from rewriter.ops.cost import Cost, Dtypes, Shapes

if TYPE_CHECKING:
    from jax import Array

SCALES = {"w": "w_scale", "w_up": "w_up_scale"}
"""The scale of each operand of matrices."""


def reference(**given: Any) -> Array:
    """Returns ``act(x·w[group]) · (x·w_up[group])`` of matrices that are dequantized.

    Args:
        **given: As for `rewriter.kernels.ragged.gated_linear_unit`'s reference, with
            matrices of int8, float8_e4m3fn or float8_e5m2, and ``w_scale`` and
            ``w_up_scale``, [g, columns], a factor for each of their columns; ones by
            default.

    Returns:
        [m, f].
    """
    return plain.OP.reference(**ordinary(given))


def general(**given: Any) -> Array:
    """Computes `reference` in a form that supports every transformation.

    Args:
        **given: As for `reference`.
    """
    assert plain.OP.general is not None
    return plain.OP.general(**ordinary(given))


def ordinary(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns operands and parameters of the unit with dequantized matrices."""
    made = {n: x for n, x in given.items() if n not in SCALES.values()}
    for name, scale in SCALES.items():
        if given.get(name) is not None:
            of = given[name], given.get(scale), "forward"
            made[name] = dequantized(given["x"], *of)
    return made


def cost(
    shapes: Shapes, dtypes: Dtypes, params: Mapping[str, Any], mode: str = "forward"
) -> Cost:
    """Returns operations and bytes, as for the unit; scales are not counted.

    Args:
        shapes: Shapes by operand name.
        dtypes: Dtype names by operand name.
        params: The op's parameters.
        mode: ``forward``, ``vjp`` or ``forward_and_vjp``.
    """
    shapes = {n: s for n, s in shapes.items() if n not in SCALES.values()}
    assert plain.OP.cost is not None
    return plain.OP.cost(shapes, dtypes, params, mode)


def distributions(operands: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Returns the ways to draw group sizes, by name, as for a ragged dot."""
    assert plain.OP.distributions is not None
    draws = plain.OP.distributions(operands)
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
    assert plain.OP.sample is not None
    return _drawn(plain.OP.sample, key, operands, params)


def _drawn(
    draw: Callable[..., Any],
    key: Array,
    operands: Mapping[str, Any],
    params: Mapping[str, Any],
) -> dict[str, Array]:
    """Draws operands as for the unit; scales bring matrices to the size of rows."""
    wide = {
        n: jax.ShapeDtypeStruct(x.shape, jnp.dtype("bfloat16")) if n in SCALES else x
        for n, x in operands.items() if n not in SCALES.values()
    }  # fmt: skip
    made = dict(draw(key, wide, params))
    for name, scale in SCALES.items():
        if name in operands:
            spread = operands[name].shape[1] ** -0.5
            made[name] = quantized(made[name] / spread, operands[name].dtype)
            if scale in operands:
                x = operands[scale]
                made[scale] = jnp.full(x.shape, spread / 40, x.dtype)
    return made
