"""Facts about sums of exponentials."""

from __future__ import annotations

from rewriter.algebra.canonicalize.evaluator import Evaluator
from rewriter.algebra.canonicalize.primitives import TRANSPARENT
from rewriter.algebra.normal_form import TRUE, Index, Poly


def at_least_one(ev: Evaluator, p: Poly) -> bool:
    """Whether a form is Σ exp(x) / exp(max x): the largest term of it is one.

    It needs a term: the caller must handle rows without keys.
    """
    if not ev.filled_rows or len(p) != 1:
        return False
    (((flag, mono), c),) = p.items()
    if flag != TRUE or c != 1 or len(mono) != 2:
        return False
    for (total, e), (peak, x) in (mono, mono[::-1]):
        if (e, x) != (1, -1) or ev.alg.kind(peak) != "exp":
            continue
        inner = ev.alg.defs[peak][1]
        if len(inner) == 1 and inner[0][1] == 1 and ev.alg.kind(inner[0][0]) == "leaf":
            _, name, args = ev.alg.defs[inner[0][0]]
            return _sum_below(ev, name, args) == ev.alg.of_atom(total)
    return False


def _sum_below(ev: Evaluator, value: int, args: tuple[Index, ...]) -> Poly | None:
    """Σ exp(x) for a value that is the maximum of x, or None."""
    node = ev.g.node_of(value)
    while node is not None and node.prim in TRANSPARENT | {"stop_gradient"}:
        value = node.ins[0]
        node = ev.g.node_of(value)
    if node is None or node.prim != "reduce_max":
        return None
    at, bound = ev.before_reduction(node, args)
    form = ev.poly(node.ins[0], at)
    return ev.alg.sum_over(ev.alg.exp(form), bound)
