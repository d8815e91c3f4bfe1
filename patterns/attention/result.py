"""The first and last step of each reading of attention: its form, and its checks."""

from __future__ import annotations

from rewriter.algebra.normal_form import Index, Poly
from rewriter.find.finder import Finder, RegionEvaluator
from rewriter.find.reading import Reading, Refused, leaves_of, split_digits


def result_form(ev: RegionEvaluator, value: int) -> tuple[Poly, tuple[Index, ...]]:
    """Returns a result's normal form and its index arguments.

    Axes that the program splits or joins are taken apart, so that each argument is an
    index or a digit of one. The evaluator is told which indices are the result's own.

    Raises:
        OverBudget: If the form grows too large.
    """
    whole = ev.indices(value)
    form, args = split_digits(ev.alg, ev.poly(value, whole), whole)
    ev.outer = frozenset().union(*map(ev.alg.index_ids, (*whole, *args)))
    return form, args


def require_readable(find: Finder, ev: RegionEvaluator, reading: Reading) -> None:
    """Checks that what a reading reads can be had outside, and is proved.

    Raises:
        Refused: If a value inside one step of a loop is read, or if a step of the
            normal form has no proof.
    """
    if any(ev.varies(leaf) for leaf in leaves_of(reading)):
        raise Refused("loop", "a value inside one step of a loop is read", score=0.4)
    find.require_proved(ev)
