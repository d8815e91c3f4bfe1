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


def with_flag(alg: Algebra, b: int) -> list[int]:
    """Splits a condition into two that share a literal, such as a layer's flag.

    Each of them has one literal more. The condition alone, if there are none.
    """
    support, _ = alg.bools[b]
    for pair in itertools.permutations(support, 2) if len(support) > 2 else ():
        mine = alg.project(b, pair)
        rest = alg.project(b, [x for x in support if x != pair[1]])
        if TRUE not in (mine, rest) and alg.both(mine, rest) == b:
            return [mine, rest]
    return [b]
