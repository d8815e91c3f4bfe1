"""Tells which equations give or read complex numbers.

Such equations are leaves, since forms are of real numbers. Complex numbers have other
laws. For them |z|² is not z². The real part of a product is not the product of the
real parts.
"""

from __future__ import annotations

from rewriter.algebra.canonicalize.dtypes import kind_of
from rewriter.program.counted_loops import LOOPS
from rewriter.program.graph import Graph, Node


def has_complex_numbers(graph: Graph, node: Node, value: int) -> bool:
    """Whether a value is complex, or is computed from complex numbers.

    Of a loop, or of a `cond`, only the result counts. The equations in its body are
    asked on their own.
    """
    if node.prim in LOOPS or node.prim == "cond":
        return kind_of(graph.dtype(value)) == "c"
    return any(kind_of(graph.dtype(v)) == "c" for v in (value, *node.ins))
