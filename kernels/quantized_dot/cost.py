"""Counts the work of a quantized dot: one product."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rewriter.ops.cost import Cost, Dtypes, Shapes, moved, of_mode


def cost(
    shapes: Shapes, dtypes: Dtypes, params: Mapping[str, Any], mode: str = "forward"
) -> Cost:
    """Returns operations and bytes of rows times a matrix.

    With m rows, a forward is ``2·m·k·n`` operations; the gradient of the rows is as
    many. Stored numbers have no gradient.

    Arguments are those of `Op.cost`.

    Example:
        >>> shapes = {"x": (2, 3), "w": (3, 5)}
        >>> dtypes = {"x": "bfloat16", "w": "int8"}
        >>> cost(shapes, dtypes, {"mode": "forward"})
        Cost(flops=60.0, bytes=47.0)
    """
    *rows, k = shapes["x"]
    n = shapes["w"][0 if params["mode"] == "transposed" else 1]
    flops = 2 * math.prod(rows) * k * n
    dtype = params.get("sums") or dtypes["x"]
    size = moved(shapes, dtypes, (*rows, n), dtype, mode)
    return Cost(float(of_mode(mode, flops, flops)), float(size))
