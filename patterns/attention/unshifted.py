"""Finds exponentials that are taken without the maximum of the scores.

``exp(x) / sum(exp(x))`` is a softmax of numbers. In floats it is NaN where a score's
exponential is infinite, or where all of a row vanish. The op's parameter `unshifted`
keeps that.
"""

from __future__ import annotations

from rewriter.algebra.canonicalize import values_named
from rewriter.algebra.normal_form import FALSE, TRUE, Monomial, Poly
from rewriter.find.reading import Refused
from rewriter.patterns.attention.exponents import exponents_of
from rewriter.patterns.attention.rows import MODERATE
from rewriter.patterns.attention.softmax import Softmax
from rewriter.program.counted_loops import LOOPS
from rewriter.support.assumptions import FINITE

MAXIMA = frozenset({"reduce_max", "max", "cummax"})
BOUNDED = 80.0
"""Numbers up to here have exponentials far from the ends of float32."""

WALK = 300
ADVICE = f"use jax.nn.softmax; or, if nothing overflows, assume=({FINITE!r},)"


def read_unshifted(softmax: Softmax) -> str | None:
    """Returns the dtype of exponentials without a maximum; None if none overflow.

    Raises:
        Refused: If they are shifted by something else.
    """
    found = {
        str(softmax.ev.g.dtype(value))
        for value, form in exponents_of(softmax)
        if not _has_a_maximum(softmax, form)
    }
    if not found or FINITE in softmax.find.assumed or _is_bounded(softmax):
        return None
    if softmax.parts.drop_flag != TRUE:
        raise Refused(
            "rows",
            "a jnp.where after the softmax may leave out weights that overflow",
            score=0.8,
            suggestion=ADVICE,
        )
    plain = all(_is_unshifted(softmax, form) for _, form in exponents_of(softmax))
    if len(found) > 1 or not plain:
        raise Refused(
            "rows",
            "exponentials are shifted by something else than their maximum, and may "
            "overflow",
            score=0.8,
            suggestion=ADVICE,
        )
    return found.pop()


def _has_a_maximum(softmax: Softmax, form: Poly) -> bool:
    """Whether a row's maximum, or a logarithm of a sum, is subtracted."""
    alg, ev = softmax.alg, softmax.ev
    row = {i for i in alg.ids(form) & ev.outer if alg.sizes[i] != 1}
    for flag, mono in form:
        if not row <= alg.term_ids(flag, mono):
            continue  # the maximum of several rows: all exponentials of one may vanish
        if any(alg.kind(a) == "log" for a, _ in mono):
            return True
        for leaf in set().union(*(alg.leaves(a) for a, _ in mono)):
            values = values_named(alg.defs[leaf][1])
            if any(not ev.is_side(v) and _is_maximum(softmax, v) for v in values):
                return True
    return False


def _is_maximum(softmax: Softmax, value: int) -> bool:
    """Whether a value of the scores is computed from a maximum, perhaps by a loop."""
    graph, seen, queue = softmax.ev.g, {value}, [value]
    while queue and len(seen) < WALK:
        current = queue.pop(0)
        node = graph.node_of(current)
        if node is None or node.prim in MAXIMA | LOOPS:
            return True
        if current not in softmax.scores:
            new = [v for v in node.ins if v not in seen and not softmax.ev.is_side(v)]
            seen.update(new)
            queue += new
    return False


def _is_bounded(softmax: Softmax) -> bool:
    """Whether a soft cap keeps all exponents small."""
    caps = [x.softcap for x in softmax.qk]
    return not softmax.bias and all(cap and cap <= BOUNDED for cap in caps)


def _is_unshifted(softmax: Softmax, form: Poly) -> bool:
    """Whether an exponent is the scores, and nothing that cancels in the weights."""
    capped = any(x.softcap for x in softmax.qk)
    terms: set[Monomial] = {mono for _, mono in form if mono}
    shown = [flag for flag, mono in form if mono]
    shifted = any(
        softmax.alg.both(flag, other) != FALSE
        for (flag, mono), c in form.items()
        if not mono and (flag == TRUE or c > -MODERATE)  # others are fills
        for other in shown
    )
    return len(terms) == len(softmax.parts.exps) and (capped or not shifted)
