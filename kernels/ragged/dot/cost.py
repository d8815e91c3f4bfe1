"""Counts the work of a ragged dot: one product of each row with its group's matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rewriter.ops.cost import Cost, Dtypes, Shapes, moved, of_mode


def cost(
    shapes: Shapes, dtypes: Dtypes, params: Mapping[str, Any], mode: str = "forward"
) -> Cost:
    """Returns operations and bytes of a ragged dot.

    A forward is ``2·m·k·n`` operations, whatever the groups; the gradients of both
    operands are as many each. Group sizes are unknown, so every row is counted. The
    number of matrices read is the expected number of groups with rows if rows choose
    groups evenly at random, ``g·(1 - (1 - 1/g)^m)``.

    Arguments are those of `Op.cost`.

    Example:
        >>> shapes = {"lhs": (64, 8), "rhs": (2, 8, 4), "group_sizes": (2,)}
        >>> dtypes = {"lhs": "float32", "rhs": "float32", "group_sizes": "int32"}
        >>> cost(shapes, dtypes, {"mode": "forward"})
        Cost(flops=4096.0, bytes=3336.0)
    """
    (m, k), (g,) = shapes["lhs"], shapes["group_sizes"]
    kind = params.get("mode", "forward")
    n = shapes["rhs"][{"forward": 2, "transposed": 1, "contracting": 1}[kind]]
    product = 2 * m * k * n
    dtype = params.get("out_dtype") or dtypes["lhs"]
    result, read = (m, n), {"rhs": 1 - (1 - 1 / g) ** m if g else 1.0}
    if kind == "contracting":
        result, read = (g, k, n), {}
    size = moved(shapes, dtypes, result, dtype, mode, read)
    return Cost(float(of_mode(mode, product, 2 * product)), float(size))
