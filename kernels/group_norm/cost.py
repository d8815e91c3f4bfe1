"""Counts the work of a group norm: that of a layer norm of as many numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rewriter.kernels.norms.cost import cost as of_rows
from rewriter.ops.cost import Cost, Dtypes, Shapes


def cost(
    shapes: Shapes, dtypes: Dtypes, params: Mapping[str, Any], mode: str = "forward"
) -> Cost:
    """Returns operations and bytes of a group norm.

    Args:
        shapes: Shapes by operand name.
        dtypes: Dtype names by operand name.
        params: The op's parameters.
        mode: ``forward``, ``vjp`` or ``forward_and_vjp``.

    Example:
        >>> shapes = {"x": (2, 9, 4, 8, 1), "scale": (4, 8)}
        >>> cost(shapes, dict.fromkeys(shapes, "float32"), {})
        Cost(flops=3456.0, bytes=4736.0)
    """
    return of_rows(shapes, dtypes, params, mode, centred=True)
