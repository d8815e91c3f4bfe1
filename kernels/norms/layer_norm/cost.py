"""Counts the work of a layer norm: a few operations per number, and the bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rewriter.ops.cost import Cost, Dtypes, Shapes, moved, of_mode


def cost(
    shapes: Shapes, dtypes: Dtypes, params: Mapping[str, Any], mode: str = "forward"
) -> Cost:
    """Returns operations and bytes of a layer norm.

    A forward is five operations a number: sum, subtract, square, sum, times the root;
    scale and bias are one more each. Gradients are twelve: the same five; the
    cotangent's sum, its product with the normalized number, the sum of that, times the
    mean, subtract twice, times the root; a scale is three more, two of them its own
    gradient, and a bias one. Operations once per row are not counted.

    Args:
        shapes: Shapes by operand name.
        dtypes: Dtype names by operand name.
        params: The op's parameters.
        mode: ``forward``, ``vjp`` or ``forward_and_vjp``.

    Example:
        >>> shapes = {"x": (2, 8), "scale": (8,), "bias": (8,)}
        >>> cost(shapes, dict.fromkeys(shapes, "float32"), {})
        Cost(flops=112.0, bytes=192.0)
    """
    numbers = math.prod(shapes["x"])
    scale, bias = "scale" in shapes, "bias" in shapes
    vjp = 12 + 3 * scale + bias
    flops = numbers * of_mode(mode, 5 + scale + bias, vjp, vjp + scale + bias)
    dtype = params.get("out_dtype") or dtypes["x"]
    return Cost(float(flops), float(moved(shapes, dtypes, shapes["x"], dtype, mode)))
