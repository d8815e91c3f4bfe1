"""Tells whether a choice behind the softmax makes the weights of hidden keys 0.

Such a weight is 0 also in a row that is NaN, and so is its cotangent where a hidden
value is NaN.
"""

from __future__ import annotations

from collections.abc import Set

from rewriter.patterns.attention.exponents import EXPONENTIALS
from rewriter.patterns.attention.softmax import Softmax
from rewriter.program.graph import Node


def are_chosen(softmax: Softmax) -> bool:
    """Whether a weight, or its exponential, is chosen over 0 by a mask."""
    region, nodes, weights = _weights_of(softmax)
    return any(_chooses(softmax, n, region, weights) for n in nodes)


def hides_again(softmax: Softmax) -> bool:
    """Whether weights are chosen, or multiplied by what may be a mask."""
    region, nodes, weights = _weights_of(softmax)
    return any(
        _chooses(softmax, n, region, weights) or _multiplies(softmax, n, weights)
        for n in nodes
    )


def _weights_of(softmax: Softmax) -> tuple[Set[int], list[Node], Set[int]]:
    """The values behind the scores, their equations, and those behind exponentials."""
    find, graph = softmax.find, softmax.find.graph
    region = find.below(softmax.scores, softmax.value)
    nodes = [n for v in region if (n := graph.node_of(v)) is not None]
    made = frozenset(v for n in nodes if n.prim in EXPONENTIALS for v in n.outs)
    return region, nodes, find.below(made, softmax.value) if made else frozenset()


def _chooses(softmax: Softmax, n: Node, region: Set[int], weights: Set[int]) -> bool:
    """Whether an equation chooses weights over 0."""
    return (
        n.prim == "select_n"
        and len(n.ins) == 3
        and n.ins[0] not in region
        and any(softmax.find.number(i) == 0 for i in n.ins[1:])
        and any(i in weights for i in n.ins[1:])
    )


def _multiplies(softmax: Softmax, n: Node, weights: Set[int]) -> bool:
    """Whether an equation multiplies weights by an array from elsewhere."""
    mine = [i in weights for i in n.ins]
    others = [i for i, own in zip(n.ins, mine, strict=True) if not own]
    product = n.prim == "mul" and any(mine)
    return product and any(softmax.find.number(i) is None for i in others)
