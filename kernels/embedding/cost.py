"""Counts the work of sums of rows by their ids: it is bound by memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rewriter.ops.cost import Cost, Dtypes, Shapes, moved, of_mode


def cost(
    shapes: Shapes, dtypes: Dtypes, params: Mapping[str, Any], mode: str = "forward"
) -> Cost:
    """Returns operations and bytes: one addition for each number of the rows.

    Example:
        >>> shapes = {"rows": (8, 4), "ids": (8,)}
        >>> dtypes = {"rows": "float32", "ids": "int32"}
        >>> cost(shapes, dtypes, {"size": 2})
        Cost(flops=32.0, bytes=192.0)
    """
    *lead, _, d = shapes["rows"]
    one = math.prod(shapes["rows"])
    out = (*lead, params["size"], d)
    size = moved(shapes, dtypes, out, dtypes["rows"], mode)
    return Cost(float(of_mode(mode, one, 0, one)), float(size))
