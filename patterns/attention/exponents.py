"""Finds the exponents of a softmax in the program, before anything cancels in them."""

from __future__ import annotations

from collections.abc import Iterator

from rewriter.algebra.normal_form import TRUE, Poly
from rewriter.patterns.attention.softmax import Softmax

EXPONENTIALS = frozenset({"exp", "exp2"})


def exponents_of(softmax: Softmax) -> Iterator[tuple[int, Poly]]:
    """(exponential, form of its exponent) of each one of scores in the region."""
    for value, forms in all_exponents_of(softmax):
        yield value, forms[0]


def all_exponents_of(softmax: Softmax) -> Iterator[tuple[int, list[Poly]]]:
    """(exponential, forms of its exponent); several if keys are in pieces."""
    ev, find = softmax.ev, softmax.find
    region = find.below(softmax.scores, softmax.value)
    forms: dict[int, list[Poly]] = {}
    for (value, _, _), form in ev.memo.items():
        if isinstance(form, dict):
            forms.setdefault(value, []).append(form)
    for value in forms:
        node = ev.g.node_of(value)
        if node is None or node.prim not in EXPONENTIALS or value not in region:
            continue
        if node.ins[0] in forms:
            yield value, forms[node.ins[0]]


def added_to_rows(softmax: Softmax) -> Poly:
    """Returns what the program adds to all scores of a row, or nothing.

    It cancels in the weights, and so it is not in their form. In floats it does not
    where it is large, and its gradient is a sum of roundings. Exponentials that differ
    in it have none: then the region is refused, since a value that feeds it is not
    read.
    """
    alg, found = softmax.alg, []
    for value, form in exponents_of(softmax):
        if alg.ids(form) <= softmax.ev.outer:
            continue  # of a row: a sink, or a factor between blocks
        if any(alg.kind(a) == "log" for _, mono in form for a, _ in mono):
            continue  # a logarithm of the sum is subtracted, and the addend with it
        node = softmax.ev.g.node_of(value)
        found.append(_of_rows(softmax, form) if node.prim == "exp" else {})
    if any(one != found[0] for one in found):
        return {}
    return found[0] if found else {}


def _of_rows(softmax: Softmax, form: Poly) -> Poly:
    """The terms of an exponent that are arrays without keys, apart from the scores.

    Keys for which the scores are not in the exponent are hidden, and the addend of such
    a key is as good as any.
    """
    alg, ev = softmax.alg, softmax.ev
    of_keys = {flag for flag, mono in form if not alg.term_ids(TRUE, mono) <= ev.outer}
    factors = {a for x in softmax.qk for a, _ in x.k}
    names = lambda leaves: {alg.defs[leaf][1] for leaf in leaves}
    others = names(leaf for a in factors for leaf in alg.leaves(a))
    for _, mono in form:  # a maximum of the scores and something else
        leaves = alg.poly_leaves({(TRUE, mono): 1.0})
        if not all(map(ev.is_side, softmax.values_of(leaves))):
            others |= names(leaves)
    found: Poly = {}
    for (flag, mono), c in form.items():
        leaves = alg.poly_leaves({(TRUE, mono): 1.0})
        if others & names(leaves):
            continue  # a part of a maximum, or of a mean of the scores
        if any(alg.kind(a) == "iota" for a, _ in mono):
            continue  # of a line along the keys, such as slope * (s - t)
        values = softmax.values_of(leaves)
        side = all(ev.is_side(value) and not ev.varies(value) for value in values)
        if not values or not side or not alg.term_ids(TRUE, mono) <= ev.outer:
            continue
        shown = TRUE if of_keys == {flag} else flag
        if alg.term_ids(shown, ()) <= ev.outer:
            found[shown, mono] = c
    return found
