"""Finds the products below an equation, where a gate may meet its branch."""

from __future__ import annotations

from rewriter.find.finder import Finder
from rewriter.program.graph import Node

MOST = 16
"""The most products below one equation to examine."""


def products(find: Finder, anchor: Node) -> list[Node]:
    """Products below an equation, the forward's before those of gradients."""
    g, seen, queue, out = find.graph, {anchor.outs[0]}, [anchor.outs[0]], []
    while queue and len(seen) < 40:
        for node in g.users(queue.pop(0)):
            if node.prim == "mul" and node.ins[0] != node.ins[1]:
                out.append(node)
            if find.local(node) and node.prim not in ("reduce_sum", "reduce_max"):
                for result in node.outs:
                    if result not in seen:
                        seen.add(result)
                        queue.append(result)
    return sorted(out, key=lambda node: node.outs)[:MOST]
