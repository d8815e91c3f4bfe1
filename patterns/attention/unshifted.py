"""Finds exponentials that are taken without the maximum of the scores.

``exp(x) / sum(exp(x))`` is a softmax of numbers. In floats it is NaN where a score's
exponential is infinite, or where all of a row vanish. The op's parameter `unshifted`
keeps that.
"""

from __future__ import annotations

from collections import Counter

from rewriter.algebra.normal_form import FALSE, TRUE, Poly
from rewriter.find.reading import Refused
from rewriter.patterns.attention.exponents import all_exponents_of
from rewriter.patterns.attention.hidden_scores import MODERATE
from rewriter.patterns.attention.softmax import Softmax
from rewriter.patterns.guarded_maxima import a_guard_enters_a_maximum
from rewriter.patterns.hidden_keys import hides_keys
from rewriter.patterns.shifts import (
    Member,
    Row,
    distinct,
    is_reached,
    shifted_by_maximum,
    vanishes,
)
from rewriter.support.assumptions import FINITE

BOUNDED = 80.0
"""Numbers up to here have exponentials far from the ends of float32."""

ADVICE = f"use jax.nn.softmax; or, if nothing overflows, assume=({FINITE!r},)"
OTHER = (
    "exponentials are shifted by something else than their maximum, and may overflow"
)
VANISH = (
    "the maximum that is subtracted is not that of the keys that a row sees, and "
    "exponentials may vanish"
)


def read_unshifted(softmax: Softmax) -> str | None:
    """Returns the dtype of exponentials without a maximum; None if none overflow.

    Raises:
        Refused: If they are shifted by something else than their row's maximum.
    """
    if FINITE in softmax.find.assumed:
        return None
    row = Row(softmax.ev, softmax.parts.sink)
    products = {n.outs[0] for n, _ in softmax.products}
    plain: set[str] = set()
    bases: list[Poly] = []
    among: list[Member] = []
    for value, forms in all_exponents_of(softmax):
        if vanishes(softmax.ev, softmax.ev.g.node_of(value)):
            continue
        found = [shifted_by_maximum(row, p) for p in distinct(row, forms)]
        if all(found):
            bases += [x.base for x in found]
            among += [m for x in found for m in x.among]
            if not _is_bounded(softmax, 2) and hides_keys(softmax.ev, value, products):
                raise _refused(VANISH)
        elif all(_is_unshifted(softmax, p) for p in forms):
            plain.add(str(softmax.ev.g.dtype(value)))
        else:
            raise _refused(OTHER)
    if not all(is_reached(row, m, bases) for m in among):
        raise _refused(VANISH)
    if not _is_bounded(softmax, 2) and _has_a_floor(softmax):
        raise _refused(VANISH)
    if not plain or _is_bounded(softmax):
        return None
    if softmax.parts.drop_flag != TRUE:
        raise _refused(
            "a jnp.where after the softmax may leave out weights that overflow"
        )
    if len(plain) > 1 or bases:
        raise _refused(
            "some exponentials are taken without their maximum, and may overflow"
        )
    return plain.pop()


def _has_a_floor(softmax: Softmax) -> bool:
    """Whether a number replaces the maximum of hidden keys, and may be the largest."""
    region = softmax.find.below(softmax.scores, softmax.value)
    nodes = (softmax.ev.g.node_of(v) for v in region)
    return a_guard_enters_a_maximum(softmax.ev, (n for n in nodes if n is not None))


def _refused(text: str) -> Refused:
    return Refused("rows", text, score=0.8, suggestion=ADVICE)


def _is_bounded(softmax: Softmax, times: int = 1) -> bool:
    """Whether a soft cap keeps some multiple of all scores small."""
    caps = [x.softcap for x in softmax.qk]
    return not softmax.bias and all(cap and times * cap <= BOUNDED for cap in caps)


def _is_unshifted(softmax: Softmax, form: Poly) -> bool:
    """Whether an exponent is the scores, and nothing that cancels in the weights."""
    capped = any(x.softcap for x in softmax.qk)
    shown = [flag for flag, mono in form if mono]
    shifted = any(
        softmax.alg.both(flag, other) != FALSE
        for (flag, mono), c in form.items()
        if not mono and (flag == TRUE or c > -MODERATE)  # others are fills
        for other in shown
    )
    return _is_all_counted(softmax, form) and (capped or not shifted)


def _is_all_counted(softmax: Softmax, form: Poly) -> bool:
    """Whether an exponent's terms are those of the weights, one by one.

    Terms are told apart by the values that they are made of. A fill that a mask chooses
    is a number in the exponent, and a factor of the mask in the weights.
    """
    alg = softmax.alg
    read = lambda p: frozenset(alg.defs[leaf][1] for leaf in alg.poly_leaves(p))
    terms = Counter(read({(TRUE, mono): 1.0}) for mono in {m for _, m in form if m})
    exps = (alg.defs[atom][1] for atom, _ in softmax.parts.exps)
    counted = Counter(read({(TRUE, mono): 1.0}) for mono in exps)
    masks = {read(alg.of_bool(flag)) for flag, mono in form if not mono}
    return terms <= counted and set(counted - terms) <= masks
