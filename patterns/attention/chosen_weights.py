"""Tells whether a choice behind the softmax makes the weights of hidden keys 0.

Such a weight is 0 also in a row that is NaN, and so is its cotangent where a hidden
value is NaN.
"""

from __future__ import annotations

from rewriter.patterns.attention.exponents import EXPONENTIALS
from rewriter.patterns.attention.softmax import Softmax


def are_chosen(softmax: Softmax) -> bool:
    """Whether a weight, or its exponential, is chosen over 0 by a mask."""
    find, graph = softmax.find, softmax.find.graph
    region = find.below(softmax.scores, softmax.value)
    nodes = [n for v in region if (n := graph.node_of(v)) is not None]
    made = frozenset(v for n in nodes if n.prim in EXPONENTIALS for v in n.outs)
    weights = find.below(made, softmax.value) if made else frozenset()
    return any(
        n.prim == "select_n"
        and len(n.ins) == 3
        and n.ins[0] not in region
        and any(find.number(i) == 0 for i in n.ins[1:])
        and any(i in weights for i in n.ins[1:])
        for n in nodes
    )
