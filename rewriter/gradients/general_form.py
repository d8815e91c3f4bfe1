"""Prefers an op to a special form of it whose gradients are not found.

Attention with a function of its scores may also be attention with a bias. Where the
program computes gradients, a form is worth more only with these: a kernel for the
forward alone leaves the program all that it saved for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rewriter.find.match import Match
from rewriter.find.reading import leaves_of_operands
from rewriter.find.region import Regions
from rewriter.gradients.backward import Backward
from rewriter.gradients.search import Gradients, search_gradients

WHY = "gradients that the program computes are not found for it"


def with_general_forms(
    regions: Regions, found: Sequence[Match], gradients: Gradients
) -> Gradients:
    """Returns the gradients, for the general op where only those are found.

    Args:
        regions: The walks over the program's graph.
        found: All matches, also of both forms of one result.
        gradients: The gradients of the matches that are chosen.
    """
    general = {(m.op.name, m.value): m for m in found}
    instead = {
        k: other
        for k, m in enumerate(gradients.matches)
        if m.reading.taken is not None
        and (other := general.get((m.op.form_of, m.value))) is not None
        and not _has_gradients(m, gradients.backward[k])
    }
    if not instead:
        return gradients
    again = search_gradients(regions, tuple(instead.values()))
    matches, backward = list(gradients.matches), list(gradients.backward)
    why = list(gradients.why)
    for k, m, b, text in zip(
        instead, again.matches, again.backward, again.why, strict=True
    ):
        if _has_gradients(m, b):
            form = gradients.matches[k].op.name
            matches[k] = dataclasses.replace(m, not_chosen=((form, WHY),))
            backward[k], why[k] = b, text
    return dataclasses.replace(
        gradients, matches=tuple(matches), backward=tuple(backward), why=tuple(why)
    )


def _has_gradients(match: Match, backward: Backward | None) -> bool:
    """Whether gradients are found of one of the op's first two operands.

    Those of attention's values alone do not need the function.
    """
    if backward is None:
        return False
    here = dict(match.leaves)
    scored = leaves_of_operands(match.reading, match.op.names[:2])
    return any(here.get(name) in backward.grads for name in scored)
