"""Reads which score a program's softmax gives the keys that a mask hides.

A mask with a finite fill puts a number in place of their scores, or adds one to them.
Rows whose other scores are as low as that weigh these keys. A kernel does so too where
it is told that number; there is one if all hidden keys have the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rewriter.algebra.normal_form import FALSE, TRUE, Poly
from rewriter.patterns.attention.chosen_weights import hides_again
from rewriter.patterns.attention.exponents import all_exponents_of
from rewriter.patterns.attention.softmax import Softmax

LEAST = -80.0
"""Numbers below it hide a key, as exponents."""

MODERATE = 1e3
"""Smaller fills leave masked keys a weight that scores often reach."""

NEAR = -1e6
"""Fills above it are near: scores may reach them, and kernels compare scores with
them. Kernels have the same number."""


@dataclass(frozen=True)
class HiddenScores:
    """What hidden keys score.

    Attributes:
        fill: A negative number.
        added: Whether it is added to their scores, and not chosen in their place.
    """

    fill: float
    added: bool


def hidden_scores(softmax: Softmax) -> HiddenScores | None:
    """Returns what hidden keys score; None if it is no single number, or not known.

    It is not known in loops over blocks of keys, which may skip hidden ones, and where
    weights of hidden keys are set to zero once more.
    """
    parts, found = softmax.parts, set()
    alone = parts.row_mask == parts.dropped_rows == TRUE and not parts.zero_rows
    if softmax.ev.loops.entered or not alone or hides_again(softmax):
        return None
    for value, forms in all_exponents_of(softmax):
        node = softmax.ev.g.node_of(value)
        unit = math.log(2) if node is not None and node.prim == "exp2" else 1.0
        for form in forms:
            if not softmax.alg.ids(form) <= softmax.ev.outer:
                found.add(_of_exponent(softmax, form, unit))
    return found.pop() if len(found) == 1 else None


def _of_exponent(softmax: Softmax, form: Poly, unit: float) -> HiddenScores | None:
    """What hidden keys score by the form of an exponent."""
    alg, fills, others = softmax.alg, [], []
    for (flag, mono), c in form.items():
        if not mono and c * unit <= LEAST:
            fills.append((flag, c * unit))
        elif flag != TRUE or not alg.term_ids(TRUE, mono) <= softmax.ev.outer:
            others.append(flag)
    numbers, hidden = {c for _, c in fills}, FALSE
    for flag, _ in fills:
        if flag == TRUE or alg.both(hidden, flag) != FALSE:
            return None
        hidden = alg.either(hidden, flag)
    if len(numbers) != 1 or not math.isfinite(fill := numbers.pop()):
        return None
    if all(alg.both(flag, hidden) == FALSE for flag in others):
        return HiddenScores(fill, added=False)
    if all(alg.both(flag, hidden) == hidden for flag in others):
        return HiddenScores(fill, added=True)
    return None
