"""Choices among a few numbers, each computed by the machine's rounding rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rewriter.algebra.canonicalize.constants import cast, folded, in_dtype
from rewriter.algebra.normal_form import FALSE, TRUE, Algebra, Poly
from rewriter.program.graph import Graph, Node

CASES = 8
"""The most combinations of conditions to enumerate."""


def in_each_case(
    alg: Algebra, graph: Graph, node: Node, forms: Sequence[Poly]
) -> Poly | None:
    """Applies an equation to choices among numbers; the result is such a choice too.

    Args:
        alg: Where the forms are.
        graph: The program.
        node: The equation.
        forms: The forms of its operands.

    Returns:
        The choice; None if an operand is no such choice, if there are too many cases,
        or if the machine's result in one is unknown.
    """
    if any(mono for p in forms for _, mono in p) or not any(
        flag != TRUE for p in forms for flag, _ in p
    ):
        return None
    if not alg.blurred.isdisjoint(c for p in forms for c in p.values()):
        return None
    cells = [TRUE]
    for flag in {flag for p in forms for flag, _ in p} - {TRUE}:
        halves = ((c, side) for c in cells for side in (flag, alg.negate(flag)))
        cells = [x for c, side in halves if (x := alg.both(c, side)) != FALSE]
        if len(cells) > CASES:
            return None
    out: Poly = {}
    for cell in cells:
        number = _in_case(alg, graph, node, forms, cell)
        if number is None:
            return None
        if number:
            out = alg.add(out, {(cell, ()): number})
    return out


def cast_choice(alg: Algebra, p: Poly, old: Any, new: Any) -> Poly | None:
    """A choice among numbers in another dtype; None if a form is no such choice."""
    if any(mono for _, mono in p) or all(flag == TRUE for flag, _ in p):
        return None
    if not alg.blurred.isdisjoint(p.values()):
        return None
    out: Poly = {}
    for term, c in p.items():
        number = cast(in_dtype(c, old), new)
        if number is None or math.isnan(float(number)):
            return None
        if float(number):
            out[term] = float(number)
    return out


def _in_case(
    alg: Algebra, graph: Graph, node: Node, forms: Sequence[Poly], cell: int
) -> float | None:
    values = []
    for source, p in zip(node.ins, forms, strict=True):
        here = [c for (flag, _), c in p.items() if alg.implies(cell, flag)]
        if len(here) > 1:
            return None
        values.append(in_dtype(here[0] if here else 0.0, graph.dtype(source)))
        if here and float(values[-1]) != here[0]:
            return None
    found = folded(node.prim, values, node.params, graph.dtype(node.outs[0]))
    return None if found is None or math.isnan(float(found)) else float(found)


def from_the_end(
    graph: Graph, node: Node, number: Callable[[int], float | None]
) -> tuple[int, float] | None:
    """(i, n) of an equation `where(i < 0, i + n, i)`, as JAX writes for indices.

    Args:
        graph: The program.
        node: The equation.
        number: Returns the number that a value holds at every position, or None.

    Returns:
        The value and the number; None for other equations.
    """
    if node.prim != "select_n" or len(node.ins) != 3:
        return None
    which, plain, moved = node.ins
    test, sum_ = graph.node_of(which), graph.node_of(moved)
    if test is None or sum_ is None or (test.prim, sum_.prim) != ("lt", "add"):
        return None
    size = number(sum_.ins[1])
    if test.ins[0] != plain or sum_.ins[0] != plain or number(test.ins[1]) != 0:
        return None
    if size is None or size < 0 or not np.issubdtype(graph.dtype(plain), np.integer):
        return None
    return plain, size
