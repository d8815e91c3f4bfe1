"""Splits a condition by flags that are the same for all positions.

Looks like  where(flag, local, causal) in a loop over layers, where the flag says which
            layers are local. Each case is then a condition on positions, as if the
            layer were written alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from rewriter.algebra.normal_form import FALSE, TRUE, Algebra, Poly
from rewriter.patterns.attention.axes import Axes

MOST = 3
"""The most flags that a condition is split by."""

Cases = dict[int, int]
"""By what a condition says of positions, the flags with which it says so."""


def by_cases(alg: Algebra, axes: Axes, part: int) -> Cases:
    """Returns what a condition says by cases; a single one if no flag is in it."""
    support, _ = alg.bools[part]
    flags = [a for a in support if not alg.free(a) - set(axes.b)]
    positions = [a for a in support if a not in flags]
    if not flags or len(flags) > MOST:
        return {part: TRUE}
    found: Cases = {}
    for values in itertools.product((True, False), repeat=len(flags)):
        case = TRUE
        for flag, value in zip(flags, values, strict=True):
            literal = alg.literal(flag)
            case = alg.both(case, literal if value else alg.negate(literal))
        if case != FALSE:
            said = alg.project(alg.both(part, case), positions)
            found[said] = alg.either(found.get(said, FALSE), case)
    return found


def chosen(alg: Algebra, cases: Iterable[tuple[int, Poly]], otherwise: Poly) -> Poly:
    """Returns the form that is each case's own, and another one in no case."""
    out: Poly = {}
    none = TRUE
    for case, form in cases:
        out = alg.add(out, alg.mul(form, alg.of_bool(case)))
        none = alg.both(none, alg.negate(case))
    return alg.add(out, alg.mul(otherwise, alg.of_bool(none)))


def by_positions(alg: Algebra, axes: Axes, b: int) -> list[int]:
    """Splits a condition into one for each comparison of positions, all with its flags.

    Flags are the same for all positions, such as those of a layer. The condition alone,
    if it is more than these together.
    """
    support, _ = alg.bools[b]
    flags = [a for a in support if not alg.free(a) - set(axes.b)]
    if not flags:
        return [b]
    found = [alg.project(b, [*flags, a]) for a in support if a not in flags]
    whole = TRUE
    for part in found:
        whole = alg.both(whole, part)
    return found if whole == b and TRUE not in found else [b]
