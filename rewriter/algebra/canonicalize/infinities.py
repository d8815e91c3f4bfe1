"""Tells where a form may be infinite: by its own fill, or inside an array."""

from __future__ import annotations

from rewriter.algebra.canonicalize.evaluator import Evaluator
from rewriter.algebra.canonicalize.primitives import STRUCTURAL
from rewriter.algebra.normal_form import FALSE, Algebra, Poly


def where_infinite(alg: Algebra, p: Poly, edges: tuple[float, ...]) -> int:
    """Where a form's fills make it infinite."""
    out = FALSE
    for (flag, mono), c in p.items():
        if c in edges and not mono:
            out = alg.either(out, flag)
    return out


def may_be_infinite(ev: Evaluator, p: Poly) -> bool:
    """Whether a form may be infinite other than by its own fills.

    Products count as finite, and so does the maximum of a row with a key. An added
    array may hold infinities, as masks do.
    """
    for _, mono in p:
        kinds = {ev.alg.kind(a) for a, _ in mono}
        if "log" in kinds:
            return True
        if len(mono) == 1 and kinds == {"leaf"} and not _is_maximum(ev, mono[0][0]):
            return True
    return False


def is_row_maximum(ev: Evaluator, p: Poly) -> bool:
    """Whether a form is only the maximum of a row, which shifts its exponents.

    A guard that tests whether the maximum is finite changes nothing: if it is infinite
    or NaN, the row's weights are NaN either way. Rows without keys are handled
    elsewhere.
    """
    if len(p) != 1:
        return False
    ((_, mono),) = p
    return (
        len(mono) == 1
        and ev.alg.kind(mono[0][0]) == "leaf"
        and _is_maximum(ev, mono[0][0])
    )


def log_may_be_infinite(alg: Algebra, atom: int) -> bool:
    """Whether an atom is a logarithm, except of exponentials as in log(1 + exp(x)).

    Emitted code computes the latter without the exponentials.
    """
    if alg.kind(atom) != "log":
        return False
    return alg.exponents(alg.thaw(alg.defs[atom][1])) is None


def _is_maximum(ev: Evaluator, atom: int) -> bool:
    """Whether a leaf is the maximum of a row, perhaps guarded."""
    name = ev.alg.defs[atom][1]
    if ev.private and not (isinstance(name, tuple) and name[0] == "own"):
        return False
    value = name[1] if isinstance(name, tuple) else name
    level = {value}
    for _ in range(8):
        nodes = [n for n in map(ev.g.node_of, level) if n is not None]
        if any(n.prim == "reduce_max" for n in nodes):
            return True
        level = {i for n in nodes if n.prim not in STRUCTURAL for i in n.ins}
    return False
