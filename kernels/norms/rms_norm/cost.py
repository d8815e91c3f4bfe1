"""Counts the work of an RMS norm: a few operations per number, and the bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rewriter.ops.cost import Cost, Dtypes, Shapes, moved, of_mode


def cost(
    shapes: Shapes, dtypes: Dtypes, params: Mapping[str, Any], mode: str = "forward"
) -> Cost:
    """Returns operations and bytes of an RMS norm.

    A forward is three operations a number: square, sum, times the root; a scale is one
    more. Gradients are eight: square, sum and times the root again; times the
    cotangent, sum, times that mean, subtract, times the root; a scale is three more,
    two of them its own gradient. Operations once per row are not counted.

    Args:
        shapes: Shapes by operand name.
        dtypes: Dtype names by operand name.
        params: The op's parameters.
        mode: ``forward``, ``vjp`` or ``forward_and_vjp``.

    Example:
        >>> shapes = {"x": (2, 8), "scale": (8,)}
        >>> cost(shapes, dict.fromkeys(shapes, "float32"), {})
        Cost(flops=64.0, bytes=160.0)
    """
    numbers, scaled = math.prod(shapes["x"]), "scale" in shapes
    flops = numbers * of_mode(mode, 3 + scaled, 8 + 3 * scaled, 8 + 4 * scaled)
    dtype = params.get("out_dtype") or dtypes["x"]
    return Cost(float(flops), float(moved(shapes, dtypes, shapes["x"], dtype, mode)))
