"""Counts the work of a ragged dot of quantized matrices, with their stored bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rewriter.kernels.ragged import dot
from rewriter.ops.cost import Cost, Dtypes, Shapes


def cost(
    shapes: Shapes, dtypes: Dtypes, params: Mapping[str, Any], mode: str = "forward"
) -> Cost:
    """Returns operations and bytes, as for a ragged dot; scales are not counted.

    Args:
        shapes: Shapes by operand name.
        dtypes: Dtype names by operand name.
        params: The op's parameters.
        mode: ``forward``, ``vjp`` or ``forward_and_vjp``.

    Example:
        >>> shapes = {"lhs": (64, 8), "rhs": (1, 8, 4), "group_sizes": (1,)}
        >>> dtypes = {"lhs": "bfloat16", "rhs": "int8", "group_sizes": "int32"}
        >>> cost(shapes, dtypes, {"mode": "forward"})
        Cost(flops=4096.0, bytes=1572.0)
    """
    shapes = {n: s for n, s in shapes.items() if n != "rhs_scale"}
    assert dot.OP.cost is not None
    return dot.OP.cost(shapes, dtypes, params, mode)
