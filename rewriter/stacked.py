"""A graph in, the values that are one layer of an array stacked over layers.

A model that iterates over stacked weights takes one of them out per layer. That
one is the operand: its gradient is a value of the program, while the gradient of
the whole array is only complete when all layers have added theirs.
"""

from __future__ import annotations

from collections.abc import Iterator

from rewriter.canonicalize import TRANSPARENT
from rewriter.graph import Graph, Node

_AROUND = TRANSPARENT | {"convert_element_type"}


def layers(graph: Graph) -> Iterator[int]:
    """Values that are one index of the leading axis of an input.

    Args:
        graph: The program; what its loops are given, and constants, are inputs too.
    """
    for node in graph.nodes:
        if node.prim == "unstack":
            if int(node.params["axis"]) == 0 and _given(graph, node.ins[0]):
                yield from node.outs
        elif node.prim in ("squeeze", "reshape"):
            part = graph.node_of(node.ins[0])
            if part is not None and _is_one(graph, part, node):
                yield node.outs[0]


def _is_one(graph: Graph, part: Node, node: Node) -> bool:
    """Whether an equation drops the leading axis of one index of an input."""
    if part.prim not in ("slice", "dynamic_slice", "split"):
        return False
    if part.prim == "dynamic_slice" and graph.scalar(part.ins[1]) is None:
        return False
    whole, rest = graph.shape(part.ins[0]), graph.shape(node.outs[0])
    one = graph.shape(node.ins[0])
    return (
        len(whole) > 1
        and one == (1, *whole[1:])
        and rest == whole[1:]
        and whole[0] != 1
        and _given(graph, part.ins[0])
    )


def _given(graph: Graph, value: int) -> bool:
    """Whether no equation makes a value, but for casts."""
    node = graph.node_of(value)
    while node is not None and node.prim in _AROUND:
        node = graph.node_of(node.ins[0])
    return node is None
