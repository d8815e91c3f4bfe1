"""Counts the work of a gated linear unit: its matrix products."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rewriter.ops.cost import Cost, Dtypes, Shapes, moved, of_mode


def cost(
    shapes: Shapes, dtypes: Dtypes, params: Mapping[str, Any], mode: str = "forward"
) -> Cost:
    """Returns operations and bytes of a gated linear unit.

    With m rows, k columns and f hidden ones a forward is two products of ``2·m·k·f``
    operations. Gradients need both again, and four more: of x and of the weights, in
    each branch. With the result they need no more than that.

    Arguments are those of `Op.cost`.

    Example:
        >>> shapes = {"x": (2, 3), "w_gate": (3, 5), "w_up": (3, 5)}
        >>> dtypes = dict.fromkeys(shapes, "bfloat16")
        >>> cost(shapes, dtypes, {})
        Cost(flops=120.0, bytes=92.0)
    """
    (*rows, k), f = shapes["x"], shapes["w_gate"][1]
    product = 2 * math.prod(rows) * k * f
    flops = of_mode(mode, 2 * product, 6 * product, 6 * product)
    dtype = params.get("out_dtype") or dtypes["x"]
    size = moved(shapes, dtypes, (*rows, f), dtype, mode)
    return Cost(float(flops), float(size))
