"""Leaves a site to XLA where its result is only rounded to few bits.

    y = norm x;  s = max(abs(y)) / 127;  q = int8(round(y / s));  … read q and s

A kernel writes y, which XLA then reads twice. XLA itself never writes y: it computes
it again in each of the two passes, and writes numbers of 8 bits. It does not do so with
a product. RMS norms of 8192 rows with such a rounding took on an H200, in µs
(``tests/bench/results/rounded_norms_h200.json``)::

    columns     XLA     with the norm's kernel
    4096         69     101
    8192        141     197
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from rewriter.choose.choice import AS_WRITTEN, Choice
from rewriter.ops.device import Device
from rewriter.ops.score import ELEMENTWISE
from rewriter.ops.stored import FEW_BITS
from rewriter.program.graph import Graph, Node
from rewriter.site.facts import Facts
from rewriter.site.implementation import XLA

WHY = "only numbers of few bits are kept of its result: XLA never writes the others"

LAYOUT = frozenset({"broadcast_in_dim", "expand_dims", "reshape", "squeeze"})
PRODUCTS = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated"})

REACH = 40
"""The most equations behind a result that are looked at."""


def unless_rounded(
    graph: Graph, facts: Facts, choice: Choice, target: Device
) -> Choice:
    """Returns the choice; XLA where a GPU's kernel would write what is only rounded.

    Args:
        graph: The program.
        facts: The match. Gradients read its result too: it stays a site with them.
        choice: What was chosen for it.
        target: Where the program will run.
    """
    free = choice.kernel != XLA and choice.origin != "forced"
    if not free or target.platform != "cuda" or facts.differentiated:
        return choice
    match = facts.match
    if any(_is_product(graph, value) for value in match.inner):
        return choice
    if not is_rounded(graph, match.value, match.inner):
        return choice
    refused = (choice.kernel, WHY), *choice.not_chosen
    return Choice(AS_WRITTEN, choice.origin, refused)


def _is_product(graph: Graph, value: int) -> bool:
    node = graph.node_of(value)
    return node is not None and node.prim in PRODUCTS


def is_rounded(graph: Graph, value: int, inner: frozenset[int]) -> bool:
    """Returns whether a result is rounded to few bits, and read for nothing else.

    Sums and maxima of it are smaller, and may be read for anything.

    Args:
        graph: The program.
        value: The result.
        inner: The values of its own region.
    """
    size = math.prod(graph.shape(value))
    todo, seen, rounded = [value], {value}, False
    while todo:
        if len(seen) > REACH:
            return False
        one = todo.pop()
        if one in graph.results:
            return False
        for node in graph.users(one):
            if node.outs[0] in inner or node.outs[0] in seen:
                continue
            seen.add(node.outs[0])
            if _rounds(graph, node):
                rounded = True
            elif _is_reduction(graph, node, size):
                continue
            elif node.prim in ELEMENTWISE | LAYOUT:
                todo.append(node.outs[0])
            else:
                return False
    return rounded


def _rounds(graph: Graph, node: Node) -> bool:
    """Whether an equation casts floats to few bits."""
    if node.prim != "convert_element_type":
        return False
    wide = jnp.issubdtype(graph.dtype(node.ins[0]), jnp.floating)
    return wide and str(graph.dtype(node.outs[0])) in FEW_BITS


def _is_reduction(graph: Graph, node: Node, size: int) -> bool:
    """Whether an equation makes a smaller array of a result of some size."""
    smaller = math.prod(graph.shape(node.outs[0])) * 8 <= size
    return node.prim.startswith("reduce_") and smaller
