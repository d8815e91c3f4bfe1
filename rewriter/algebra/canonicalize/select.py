"""Choices between two forms by a boolean function."""

from __future__ import annotations

from rewriter.algebra.normal_form import FALSE, TRUE, Algebra, Poly
from rewriter.algebra.normal_form.forms import ODD


def choose(alg: Algebra, flag: int, if_true: Poly, if_false: Poly) -> Poly:
    """if_true where flag holds, else if_false."""
    if_true = _known_sign(alg, if_true, flag)
    if_false = _known_sign(alg, if_false, alg.negate(flag))
    return alg.add(
        _masked(alg, if_true, flag), _masked(alg, if_false, alg.negate(flag))
    )


def reached(alg: Algebra, p: Poly, flag: int) -> Poly:
    """A form where flag holds: terms that are always or never there are known."""
    if all(b == TRUE for b, _ in p):
        return p
    out: Poly = {}
    for (b, mono), c in p.items():
        both = alg.both(b, flag)
        if both != FALSE:
            out = alg.add(out, {(TRUE if both == flag else b, mono): c})
    return out


def _masked(alg: Algebra, p: Poly, flag: int) -> Poly:
    out: Poly = {}
    for (b, mono), c in p.items():
        both = alg.both(b, flag)
        if both != FALSE:
            out = alg.add(out, {(both, mono): c})
    return out


def _known_sign(alg: Algebra, p: Poly, flag: int) -> Poly:
    """A form where flag holds, such as q >= 0: there max(q, 0) is q."""
    support, table = alg.bools[flag]
    if len(support) != 1 or alg.defs[support[0]][0] != "ge":
        return p
    known = alg.thaw(alg.defs[support[0]][1])
    if table != 0b10:
        known = alg.scale(known, -1.0)  # less than zero
    return _without_maxima(alg, p, known)


def _without_maxima(alg: Algebra, p: Poly, known: Poly) -> Poly:
    """Simplifies a form, knowing that another one is not negative."""
    out: Poly = {}
    for (b, mono), c in p.items():
        term: Poly = {(b, ()): c}
        for a, e in mono:
            factor = _without_maximum(alg, a, known)
            same = factor is None
            power = alg.of_atom(a, e) if same else alg.power(factor, e)
            term = alg.mul(term, power)
        out = alg.add(out, term)
    return out


def _without_maximum(alg: Algebra, atom: int, known: Poly) -> Poly | None:
    """Simplifies max(q, 0), or a function of it, if a multiple of q is not negative."""
    kind, content = alg.defs[atom][:2]
    if kind == "exp" and len(content) == 1 and content[0][1] == 1:
        inner = _without_maximum(alg, content[0][0], known)
        return None if inner is None else alg.exp(inner)
    if kind == "fn" and content in ODD:
        inner = alg.thaw(alg.defs[atom][2])
        return alg.odd(content, _without_maxima(alg, inner, known))
    if kind != "relu":
        return None
    q = alg.thaw(content)
    for sign in (1.0, -1.0):
        if _is_multiple(alg, q, known, sign):
            return q if sign > 0 else {}
    return None


def _is_multiple(alg: Algebra, p: Poly, q: Poly, sign: float) -> bool:
    """Whether p is q times a number of that sign."""
    term = next(iter(q), None)
    if term not in p or len(p) != len(q):
        return False
    k = p[term] / q[term]
    return k * sign > 0 and not alg.add(p, q, -k)


def ramp(alg: Algebra, flag: int, if_true: Poly, if_false: Poly) -> Poly | None:
    """select(p >= 0, b + k p, b) = b + k max(p, 0), also with > and exchanged arms."""
    support, table = alg.bools[flag]
    if len(support) != 1 or alg.defs[support[0]][0] != "ge":
        return None
    p = alg.thaw(alg.defs[support[0]][1])
    hold, other = (if_true, if_false) if table == 0b10 else (if_false, if_true)
    diff = alg.add(hold, other, -1.0)
    if not diff or len(diff) != len(p):
        return None
    term = next(iter(p))
    if term not in diff:
        return None
    k = diff[term] / p[term]
    if alg.add(diff, p, -k):
        return None
    return alg.add(other, alg.relu(p), k)
