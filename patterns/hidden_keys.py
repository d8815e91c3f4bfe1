"""Finds keys that are hidden behind an exponential, before the sum of weights.

The maximum that is subtracted may then be that of a key that the row does not see, and
all exponentials that count may vanish.
"""

from __future__ import annotations

import functools
from collections.abc import Set

from rewriter.algebra.canonicalize import Evaluator, is_local
from rewriter.algebra.normal_form import FALSE, Algebra, Poly
from rewriter.program.graph import Node


def hides_keys(
    ev: Evaluator, exponential: int, products: Set[int] = frozenset()
) -> bool:
    """Whether keys are hidden between an exponential and the sum of weights.

    Args:
        ev: What made the forms.
        exponential: The exponential.
        products: Contractions of the weights that are no sums of them.
    """
    read = {value for value, _, _ in ev.memo}
    queue: list[tuple[int, bool]] = [(exponential, False)]
    seen = set(queue)
    while queue:
        value, hidden = queue.pop()
        for node in ev.g.users(value):
            after = [v for v in node.outs if v in read and v not in products]
            if after and hidden and _adds_up(node):
                return True
            for v in after if not _adds_up(node) else ():
                one = (v, hidden or _hides(ev, value, v))
                if one not in seen:
                    seen.add(one)
                    queue.append(one)
    return False


def _adds_up(node: Node) -> bool:
    """Whether an equation adds up numbers along an axis."""
    sums = node.prim == "dot_general" and not is_local(node)
    return sums or node.prim == "reduce_sum"


def _hides(ev: Evaluator, before: int, after: int) -> bool:
    """Whether an equation makes numbers of some keys zero."""
    alg, memo = ev.alg, ev.memo
    for (value, args, mode), form in memo.items():
        old = memo.get((before, args, mode)) if value == after else None
        if not isinstance(old, dict) or not isinstance(form, dict):
            continue
        was, now = _shown(alg, old), _shown(alg, form)
        if not alg.implies(was, now):
            new = [a for a in alg.bools[now][0] if a not in alg.bools[was][0]]
            ids = alg.ids(alg.of_bool(alg.project(now, new)))
            return not new or not ids <= ev.outer  # else of whole rows
    return False


def _shown(alg: Algebra, form: Poly) -> int:
    """Where a form is not zero."""
    return functools.reduce(alg.either, (flag for flag, _ in form), FALSE)
