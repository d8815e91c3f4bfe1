"""Counts the work of the gated linear unit of experts: that of its ragged dots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rewriter.ops.cost import Cost, Dtypes, Shapes, moved, of_mode


def cost(
    shapes: Shapes, dtypes: Dtypes, params: Mapping[str, Any], mode: str = "forward"
) -> Cost:
    """Returns operations and bytes of a gated linear unit of experts.

    With m rows, k columns and f hidden ones a forward is two products of ``2·m·k·f``
    operations, whatever the groups. Gradients of x and of the matrices are as many
    each. Where only gradients are computed, both branches are computed again. Every row
    is counted. The number of matrices read is the expected number of groups with rows,
    as for a ragged dot.

    Arguments are those of `Op.cost`.

    Example:
        >>> shapes = {"x": (64, 8), "w": (2, 8, 8), "group_sizes": (2,)}
        >>> dtypes = dict.fromkeys(shapes, "float32") | {"group_sizes": "int32"}
        >>> cost(shapes, dtypes, {"halves": "gate_up"})
        Cost(flops=8192.0, bytes=3592.0)
    """
    (m, k), (g,) = shapes["x"], shapes["group_sizes"]
    f = shapes["w"][2] // (2 if params.get("halves") else 1)
    product = 2 * m * k * f
    flops = of_mode(mode, 2 * product, 6 * product, 6 * product)
    share = 1 - (1 - 1 / g) ** m if g else 1.0
    dtype = params.get("out_dtype") or dtypes["x"]
    read = dict.fromkeys(("w", "w_up"), share)
    size = moved(shapes, dtypes, (m, f), dtype, mode, read)
    return Cost(float(flops), float(size))
