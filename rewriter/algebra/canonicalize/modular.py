"""Reads integer sums whose partial sums may wrap around, while the total does not.

Sums and products of machine integers are those of whole numbers modulo 2^n. So a sum
that is less than 2^n away from nothing is exact, whatever its steps are: `(end + i) -
(end - age)` is `i + age`, for any run-time `end`.
"""

from __future__ import annotations

from typing import Any

from rewriter.algebra.canonicalize.dtypes import kind_of
from rewriter.algebra.canonicalize.exact_values import is_position
from rewriter.algebra.canonicalize.intervals import held_by, within
from rewriter.algebra.canonicalize.primitives import LAYOUT_PRIMITIVES
from rewriter.algebra.normal_form import EXACT, Index, Poly
from rewriter.program.graph import Node

STEPS = frozenset({"add", "sub", "neg"})
"""Equations that are the same modulo 2^n."""


def exact_sum(ev: Any, value: int, args: tuple[Index, ...]) -> Poly | None:
    """Returns the whole numbers that an integer is a sum of.

    Args:
        ev: The evaluator.
        value: An integer of the program.
        args: Its arguments.

    Returns:
        The sum, with positions in it; None if it may not be what the machine computes.
    """
    dtype = ev.g.dtype(value)
    if kind_of(dtype) != "i":
        return None
    form = _sum(ev, value, args)
    if form is None or not is_position(ev.alg, form):
        return None
    return form if within(ev.alg.bounds(form), held_by(dtype)) else None


def _step(ev: Any, value: int) -> Node | None:
    """The equation of a step, also of one that is opaque by itself."""
    node = ev.g.node_of(value)
    known = value in ev.given_names or value in ev.given or value in ev.g.constants
    if known or node is None or node.prim not in LAYOUT_PRIMITIVES | STEPS:
        return None
    return node if ev.has_operands(node) else None


def _sum(ev: Any, value: int, args: tuple[Index, ...]) -> Poly | None:
    """The sum modulo 2^n; what is no sum is as the machine computes it.

    None if its numbers are too large to be added exactly here.
    """
    found = _added(ev, value, args)
    if found is None or any(abs(c) >= EXACT for c in found.values()):
        return None
    return found


def _added(ev: Any, value: int, args: tuple[Index, ...]) -> Poly | None:
    """The same, of numbers of any size."""
    alg, node = ev.alg, _step(ev, value)
    if node is None:
        return ev.poly(value, args)
    moved = ev.moved(node, value, args)
    if moved is not None and moved[0] is not None:
        return _sum(ev, *moved)
    if node.prim not in STEPS:
        return ev.poly(value, args)
    forms = [_sum(ev, i, ev.aligned(i, args)) for i in node.ins]
    if None in forms:
        return None
    if node.prim == "neg":
        return alg.scale(forms[0], -1.0)
    return alg.add(*forms, -1.0 if node.prim == "sub" else 1.0)
