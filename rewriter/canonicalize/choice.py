"""Choices between two forms by a boolean function."""

from __future__ import annotations

from rewriter.normal_form import (
    FALSE,
    Algebra,
    Poly,
)


def choose(alg: Algebra, flag: int, if_true: Poly, if_false: Poly) -> Poly:
    """if_true where flag holds, else if_false."""
    return alg.add(
        _masked(alg, if_true, flag), _masked(alg, if_false, alg.negate(flag))
    )


def _masked(alg: Algebra, p: Poly, flag: int) -> Poly:
    out: Poly = {}
    for (b, mono), c in p.items():
        both = alg.both(b, flag)
        if both != FALSE:
            out = alg.add(out, {(both, mono): c})
    return out


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
