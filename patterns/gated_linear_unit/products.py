"""Finds the products below an equation, where a gate may meet its branch."""

from __future__ import annotations

from rewriter.find.finder import Finder
from rewriter.program.graph import Node
from rewriter.program.walk import values_below

MOST = 16
"""The most products below one equation to examine."""


def products(find: Finder, anchor: Node) -> list[Node]:
    """Products below an equation, the forward's before those of gradients."""
    goes_on = lambda n: find.local(n) and n.prim not in ("reduce_sum", "reduce_max")
    found = [
        node
        for value in values_below(find.graph, anchor.outs[:1], goes_on, 40)
        if (node := find.graph.node_of(value)).prim == "mul"
        and node.ins[0] != node.ins[1]
    ]
    return sorted(found, key=lambda node: node.outs)[:MOST]
