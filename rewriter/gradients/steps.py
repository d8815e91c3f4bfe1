"""Gradients that the program computes others of the same match from."""

from __future__ import annotations

from rewriter.algebra.canonicalize.primitives import LAYOUT_PRIMITIVES
from rewriter.find.match import Match
from rewriter.gradients.backward import Backward
from rewriter.program.graph import Graph

LINEAR = LAYOUT_PRIMITIVES | {"add", "add_any", "neg", "reduce_sum"}
"""Equations that move and add gradients."""

STEPS = "a gradient that is found is a step towards others, which are not found"


def are_steps(graph: Graph, match: Match, backward: Backward) -> bool:
    """Whether the program multiplies gradients by values inside of their own match.

    Then it computes further gradients by those found. The cotangent of
    ``1 + sum(exp(s))`` is less the gradient of what a row's scores have in common. That
    is a sum of terms that cancel, and less exact.

    Args:
        graph: The program.
        match: A match.
        backward: Some of its gradients, as found.
    """
    below, seen = [*backward.results], set(backward.results)
    while below:
        for node in graph.users(below.pop()):
            if not match.inner.isdisjoint(node.ins):
                return True
            new = set(node.outs) - seen if node.prim in LINEAR else set()
            seen |= new
            below += new
    return False
