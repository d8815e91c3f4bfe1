"""Counts the work of a loss over a vocabulary: its matrix products."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rewriter.ops.cost import Cost, Dtypes, Shapes, moved, of_mode


def cost(
    shapes: Shapes, dtypes: Dtypes, params: Mapping[str, Any], mode: str = "forward"
) -> Cost:
    """Returns operations and bytes of the loss.

    With m rows, k columns and v classes a forward is one product of ``2·m·k·v``
    operations. Gradients need the logits again, and two more: of x and of w.

    Example:
        >>> shapes = {"x": (2, 3), "w": (3, 5), "labels": (2,)}
        >>> cost(shapes, {"x": "float32", "w": "float32", "labels": "int32"}, {})
        Cost(flops=60.0, bytes=100.0)
    """
    (*rows, k), v = shapes["x"], shapes["w"][1]
    product = 2 * math.prod(rows) * k * v
    flops = of_mode(mode, product, 3 * product, 3 * product)
    dtype = params.get("out_dtype") or "float32"
    size = moved(shapes, dtypes, tuple(rows), dtype, mode)
    return Cost(float(flops), float(size))
