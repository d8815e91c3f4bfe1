"""Splits a boolean function into conditions that all hold: its conjuncts."""

from __future__ import annotations

import itertools

from rewriter.algebra.normal_form import TRUE, Algebra


def conjuncts(alg: Algebra, b: int) -> list[int]:
    """Conjuncts of a boolean function, as fine as they go."""
    out = []
    for a in alg.bools[b][0]:
        if a not in alg.bools[b][0]:
            continue
        mine = alg.project(b, [a])
        others = [x for x in alg.bools[b][0] if x != a]
        rest = alg.project(b, others)
        if mine != TRUE and alg.both(mine, rest) == b:
            out.append(mine)
            b = rest
    pairs = itertools.combinations(alg.bools[b][0], 2)
    for pair in list(pairs) if len(alg.bools[b][0]) > 2 else []:
        mine = alg.project(b, pair)
        others = [x for x in alg.bools[b][0] if x not in pair]
        rest = alg.project(b, others)
        if mine != TRUE and alg.both(mine, rest) == b:
            out.append(mine)
            b = rest
    if b != TRUE:
        out.append(b)
    return out
