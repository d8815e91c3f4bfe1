"""Names elementwise equations without a rule as functions of the forms they read.

Equal functions of equal forms are equal. So it is where two programs are compared.
"""

from __future__ import annotations

from typing import Any

from rewriter.algebra.canonicalize.primitives import FULL
from rewriter.algebra.normal_form import Index
from rewriter.ops.score import ELEMENTWISE

CONGRUENT = ELEMENTWISE - {
    "stop_gradient", "max", "min", "clamp", "select_n", "convert_element_type", "copy",
}  # fmt: skip
"""Primitives whose equations may be functions of forms; the others have rules."""


def congruent_atom(ev: Any, value: int, args: tuple[Index, ...]) -> int | None:
    """Returns the atom of a value as a function of forms; None if it has a rule."""
    node = ev.g.node_of(value)
    if node is None or node.prim not in CONGRUENT or value in ev.g.constants:
        return None
    params = (f"{k}={v}" for k, v in sorted(node.params.items()) if v is not None)
    name = " ".join((node.prim, *params))
    forms = map(ev.alg.freeze, ev.operands(node, args, FULL))
    return ev.alg.atom("fn", name, *forms)
