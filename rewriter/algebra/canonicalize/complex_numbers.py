"""Tells which equations give or read complex numbers.

Forms are of real numbers, and the laws of real numbers are not those of complex ones:
|z|² is not z², and the real part of a product is not the product of real parts. So
these equations are leaves.
"""

from __future__ import annotations

from rewriter.algebra.canonicalize.dtypes import kind_of
from rewriter.program.counted_loops import LOOPS
from rewriter.program.graph import Graph, Node


def has_complex_numbers(graph: Graph, node: Node, value: int) -> bool:
    """Whether a value is complex, or is computed from complex numbers.

    A loop or choice that reads complex numbers is none, as long as this result is real:
    the equations in its body are asked on their own.
    """
    if node.prim in LOOPS or node.prim == "cond":
        return kind_of(graph.dtype(value)) == "c"
    return any(kind_of(graph.dtype(v)) == "c" for v in (value, *node.ins))
