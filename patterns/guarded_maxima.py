"""Finds numbers that replace an infinite maximum and then enter a larger maximum.

``m = where(isfinite(m), m, 0)`` changes nothing where ``exp(x - m)`` subtracts it: rows
with an infinite maximum are handled elsewhere. Parts of a row are merged by the larger
of their maxima. There the 0 of a part whose keys are all hidden counts as a score. All
exponentials vanish if the others are far below it.
"""

from __future__ import annotations

from collections.abc import Iterable

from rewriter.algebra.canonicalize import LAYOUT_PRIMITIVES, TRANSPARENT, Evaluator
from rewriter.patterns.shifts import FAR
from rewriter.program.graph import Node

MAXIMA = frozenset({"max", "reduce_max", "pmax", "argmax"})
KEPT = (
    LAYOUT_PRIMITIVES
    | TRANSPARENT
    | {"stop_gradient", "convert_element_type", "reduce_precision", "concatenate"}
)
"""Primitives that keep each number, but for rounding."""

DEPTH = 24


def a_guard_enters_a_maximum(ev: Evaluator, nodes: Iterable[Node]) -> bool:
    """Whether one of some equations replaces a maximum, and a larger one is of it.

    Args:
        ev: What evaluates the region.
        nodes: Equations of the region.
    """
    carried = {v for loop, _ in ev.loops.carries.values() for v in loop.after}
    return any(_is_guard(ev, n) and _enters(ev, n.outs[0], carried) for n in nodes)


def _is_guard(ev: Evaluator, node: Node) -> bool:
    """Whether an equation chooses between a maximum and a number near the scores."""
    if node.prim != "select_n" or len(node.ins) != 3:
        return False
    arms = [(i, ev.number(i)) for i in node.ins[1:]]
    numbers = [c for _, c in arms if c is not None]
    others = [i for i, c in arms if c is None]
    near = len(numbers) == 1 and numbers[0] > -FAR
    return near and len(others) == 1 and _is_maximum(ev, others[0])


def _is_maximum(ev: Evaluator, value: int) -> bool:
    """Whether a value is a maximum in another layout or rounding."""
    for _ in range(DEPTH):
        node = ev.g.node_of(value)
        if node is None:
            return value in ev.loops.carries
        if node.prim in MAXIMA:
            return True
        if node.prim not in KEPT:
            return False
        value = node.ins[0]
    return False


def _enters(ev: Evaluator, value: int, carried: set[int]) -> bool:
    """Whether a maximum is taken of a value, here or in a loop's next step."""
    queue, seen = [value], {value}
    while queue:
        value = queue.pop()
        if value in carried:
            return True
        for node in ev.g.users(value):
            if node.prim in MAXIMA:
                return True
            if node.prim in KEPT:
                queue += [v for v in node.outs if v not in seen]
                seen |= {*node.outs}
    return False
