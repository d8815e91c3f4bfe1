"""Counts the work of a cross-entropy: it is bound by memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rewriter.ops.cost import Cost, Dtypes, Shapes, moved, of_mode


def cost(
    shapes: Shapes, dtypes: Dtypes, params: Mapping[str, Any], mode: str = "forward"
) -> Cost:
    """Returns operations and bytes: about four operations for each logit and pass.

    Example:
        >>> shapes = {"logits": (2, 8), "labels": (2,)}
        >>> cost(shapes, {"logits": "float32", "labels": "int32"}, {})
        Cost(flops=64.0, bytes=80.0)
    """
    one = 4 * math.prod(shapes["logits"])
    flops = of_mode(mode, one, one, 2 * one)
    dtype = params.get("out_dtype") or "float32"
    size = moved(shapes, dtypes, shapes["labels"], dtype, mode)
    return Cost(float(flops), float(size))
