"""Leaves a site's result to XLA where its operand was just written to a GPU's cache.

    h = x + a @ w;  y = norm h

A kernel of rows is faster than XLA where rows come from memory. Where the equations in
front have just written them and the cache holds them, XLA is as fast or faster. Behind
an add and a product, layer norms of 12 to 32 MiB took 1.01 to 1.07 of XLA's time on an
H200, though 0.78 to 0.93 alone (``tests/bench/results/norms_in_programs_h200.json``).
"""

from __future__ import annotations

from rewriter.choose.choice import AS_WRITTEN, Choice
from rewriter.ops.device import Device
from rewriter.ops.kernel import Kernel
from rewriter.program.graph import Graph
from rewriter.site.facts import Facts

CACHED = 32 << 20
"""The bytes of rows that the cache holds."""

WHY = "its operand was just written and is in the cache, where XLA is as fast"


def unless_cached(graph: Graph, facts: Facts, choice: Choice, target: Device) -> Choice:
    """Returns the choice; XLA where a kernel of rows would read what is in the cache.

    Args:
        graph: The program.
        facts: The match. With gradients kernels gain more than that.
        choice: What was chosen for it.
        target: Where the program will run.
    """
    if target.platform != "cuda" or facts.differentiated:
        return choice
    kernel = next(
        (k for k in facts.match.pattern.kernels if k.name == choice.kernel), None
    )
    of_rows = kernel is not None and kernel.traits.adds_to
    if not of_rows or choice.origin != "estimated":
        return choice
    if not is_cached(graph, facts, kernel):
        return choice
    refused = (choice.kernel, WHY), *choice.not_chosen
    return Choice(AS_WRITTEN, choice.origin, refused)


def is_cached(graph: Graph, facts: Facts, kernel: Kernel) -> bool:
    """Returns whether the rows that a kernel reads were just written, and are few."""
    spec, name = facts.match.spec, kernel.traits.adds_to
    if spec.symbolic or spec.nbytes(name) > CACHED:
        return False
    values = [v for _, v in facts.match.leaves if graph.shape(v) == spec.shape(name)]
    return any(graph.node_of(value) is not None for value in values)
