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


def of_lookup(
    shapes: Shapes, dtypes: Dtypes, params: Mapping[str, Any], mode: str = "forward"
) -> Cost:
    """Returns the work of a lookup: rows are read and written; gradients are sums.

    Example:
        >>> shapes = {"table": (2, 4), "ids": (8,)}
        >>> of_lookup(shapes, {"table": "float32", "ids": "int32"}, {})
        Cost(flops=0.0, bytes=288.0)
    """
    *lead, v, d = shapes["table"]
    ids = shapes.get("ids", (*lead, params.get("count", 0)))
    rows = {"rows": (*ids, d), **{n: s for n, s in shapes.items() if n == "ids"}}
    kinds = {**dtypes, "rows": dtypes["table"]}
    taken = moved(rows, kinds, rows["rows"], dtypes["table"], "forward")
    sums = cost(rows, kinds, {"size": v})
    size = of_mode(mode, taken, sums.bytes)
    return Cost(float(of_mode(mode, 0, sums.flops)), float(size))
