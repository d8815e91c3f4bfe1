"""Counts the work of a norm: a few operations per number, and the bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rewriter.ops.cost import Cost, Dtypes, Shapes, moved, of_mode


def cost(
    shapes: Shapes,
    dtypes: Dtypes,
    params: Mapping[str, Any],
    mode: str = "forward",
    *,
    centred: bool,
) -> Cost:
    """Returns operations and bytes of a norm.

    A forward is three operations a number: square, sum, times the root. Centred rows
    are two more: sum, subtract. Scale and bias are one more each. Gradients are eight:
    square, sum and times the root again; times the cotangent, sum, times that mean,
    subtract, times the root. Centred rows are four more: both of the forward; the
    cotangent's sum, and subtract. A scale is three more, two of them its own gradient,
    and a bias one. Operations once per row are not counted.

    Args:
        shapes: Shapes by operand name.
        dtypes: Dtype names by operand name.
        params: The op's parameters.
        mode: ``forward``, ``vjp`` or ``forward_and_vjp``.
        centred: As for the reference.

    Example:
        >>> shapes = {"x": (2, 8), "scale": (8,)}
        >>> dtypes = dict.fromkeys(shapes, "float32")
        >>> cost(shapes, dtypes, {}, centred=False)
        Cost(flops=64.0, bytes=160.0)
        >>> cost(shapes, dtypes, {}, centred=True)
        Cost(flops=96.0, bytes=160.0)
    """
    numbers = math.prod(shapes["x"])
    scale, bias = "scale" in shapes, "bias" in shapes
    once, vjp = scale + bias, 8 + 4 * centred + 3 * scale + bias
    flops = numbers * of_mode(mode, 3 + 2 * centred + once, vjp, vjp + once)
    dtype = params.get("out_dtype") or dtypes["x"]
    return Cost(float(flops), float(moved(shapes, dtypes, shapes["x"], dtype, mode)))
