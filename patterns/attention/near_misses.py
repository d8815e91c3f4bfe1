"""Says what is unlike attention in weights that are made of exponentials."""

from __future__ import annotations

from collections.abc import Iterator

from rewriter.algebra.normal_form import Algebra, Monomial, Poly
from rewriter.find.reading import Refused


def undivided(alg: Algebra, mono: Monomial) -> Refused:
    """Returns why a weighed sum that no sum divides is no attention."""
    sums = [a for a, e in mono if e == 1 and alg.kind(a) == "sum"]
    if any(_mixes_heads(alg, a) for a in sums):
        text = "weights of several heads are mixed before values are weighed, as those "
        text += "of talking heads"
        return Refused("denominator", text, score=0.5)
    if any(any(_denominators(alg, alg.defs[a][3])) for a in sums):
        text = "the softmax is over one axis, and its weights are summed along another"
        return Refused("denominator", text, score=0.5)
    if any(e < -1 and alg.kind(a) in ("sum", "pow") for a, e in mono):
        text = "the weights are raised to a power after the softmax"
        return Refused("denominator", text, score=0.3)
    inside = (pair for a in sums for pair in alg.defs[a][3])
    if any(alg.kind(a) == "log" for a, _ in (*mono, *inside)):
        text = "the logarithm of the weights is taken: no attention weighs by it"
        return Refused("denominator", text, score=0.1)
    changed = next((a for total in sums for a in _changes(alg, total)), None)
    if changed is not None:
        text = f"the weights of a softmax go through {alg.defs[changed][1]} before "
        return Refused("denominator", text + "they weigh values", score=0.5)
    text = "the result is not divided by a sum of weights"
    return Refused("denominator", text, score=0.3)


def moves_weights(alg: Algebra, form: Poly) -> bool:
    """Whether all terms weigh one array by one softmax, which is cut along the keys.

    So are weights that are rolled, or joined in another order.
    """
    below = [{a for a, e in mono if e == -1} for _, mono in form]
    weighed = [
        {alg.defs[a][1] for a in _top_factors(alg, mono) if alg.kind(a) == "leaf"}
        for _, mono in form
    ]
    return bool(set.intersection(*below) and set.intersection(*weighed))


def _top_factors(alg: Algebra, mono: Monomial) -> Iterator[int]:
    """The factors of a term, and those of the sums among them."""
    for atom, power in mono:
        if power == 1:
            inside = alg.defs[atom][3] if alg.kind(atom) == "sum" else ((atom, 1),)
            yield from (a for a, _ in inside)


def other_weights(alg: Algebra, mono: Monomial, form: Poly) -> Refused:
    """Returns why a weighed sum that another sum divides is no attention."""
    above = [a for a, e in mono if e == 1 and alg.kind(a) == "sum"]
    below = [a for a, e in mono if e == -1]
    sums = [a for a in below if alg.kind(a) == "sum"]
    text, score = "the weights differ between numerator and denominator", 0.4
    if any(len(alg.defs[a][1]) > len(alg.defs[d][1]) for a in above for d in sums):
        text = "what the weights multiply is itself a sum, and no array with an entry "
        text, score = text + "for each key", 0.2
    elif not above:
        text = "exponentials are divided by another sum than their own, as in linear "
        text += "attention"
    elif any(any(_denominators(alg, alg.defs[a][3])) for a in above):
        text = "the weights are divided by more than one sum"
    elif any(_sums_rows_too(alg, a, d) for a in above for d in below):
        text = "the softmax is over more axes than the keys"
    return Refused("weights", text, difference=alg.show(form), score=score)


def refuse_weights_twice(alg: Algebra, factors: Monomial) -> None:
    """Refuses weights that a function of themselves multiplies.

    Raises:
        Refused: If a factor contains exponentials and their sum.
    """
    for atom, _ in factors:
        if alg.kind(atom) != "leaf" and _is_of_softmax(alg, atom):
            text = "the weights are multiplied by a function of the weights before "
            raise Refused(
                "weights",
                text + "they weigh values",
                difference=alg.show_atom(atom),
                score=0.5,
            )


def through_a_function(alg: Algebra, atom: int) -> Refused:
    """Returns why exponents of a function of scores are no attention's."""
    text = "the scores go through a function that this op does not have"
    if _is_of_softmax(alg, alg.defs[atom][1][0][0]):
        text = "the scores go through a softmax of their own before the softmax of the "
        text += "weights"
    elif not _has_products(alg, atom):
        text = "the scores are no product of queries and keys, but a function of sums "
        text += "of a number for each, as in additive attention"
    return Refused("scores", text, difference=alg.show_atom(atom), score=0.6)


def divided_again(alg: Algebra, atom: int) -> bool:
    """Whether a denominator adds up weights that a sum divides already."""
    if alg.kind(atom) == "pow":
        terms = (mono for _, mono in alg.thaw(alg.defs[atom][1]))
        return any(divided_again(alg, a) for mono in terms for a, _ in mono)
    return alg.kind(atom) == "sum" and any(_denominators(alg, alg.defs[atom][3]))


def _changes(alg: Algebra, total: int) -> Iterator[int]:
    """Functions without a formula that a sum applies to quotients of exponentials."""
    for atom, _ in alg.defs[total][3]:
        if alg.kind(atom) == "fn" and _is_of_softmax(alg, atom):
            yield atom


def _has_products(alg: Algebra, atom: int) -> bool:
    """Whether something inside an exponential depends on query and key at once."""
    every = _free(alg, atom)
    inside = [a for a in _all_inside(alg, atom) if alg.kind(a) in ("leaf", "sum")]
    return any(_free(alg, a) >= every for a in inside)


def _is_of_softmax(alg: Algebra, atom: int) -> bool:
    """Whether exponentials and a sum that divides them are inside an atom."""
    sums = [a for a in _all_inside(alg, atom) if alg.kind(a) == "sum"]
    return any(alg.kind(x) == "exp" for a in sums for x, _ in alg.defs[a][3])


def _all_inside(alg: Algebra, atom: int) -> set[int]:
    """An atom and all that it is made of."""
    stack, seen = [atom], set[int]()
    while stack:
        atom = stack.pop()
        if atom not in seen:
            seen.add(atom)
            stack += alg.children(atom)
    return seen


def _denominators(alg: Algebra, mono: Monomial) -> Iterator[int]:
    """Sums of exponentials that a term is divided by."""
    for atom, power in mono:
        if power != -1 or alg.kind(atom) not in ("sum", "pow"):
            continue
        inside = alg.defs[atom][3] if alg.kind(atom) == "sum" else ()
        if any(alg.kind(a) == "exp" for a, _ in inside):
            yield atom


def _mixes_heads(alg: Algebra, total: int) -> bool:
    """Whether a sum multiplies softmaxes by a matrix that has no other axis of theirs.

    Queries and keys are then both left.
    """
    _, summed, _, body = alg.defs[total]
    if not any(_denominators(alg, body)):
        return False
    weights = frozenset().union(
        *(_free(alg, a) for a, _ in body if alg.kind(a) == "exp")
    )
    others = [_free(alg, a) for a, _ in body if alg.kind(a) == "leaf"]
    left = weights - set(summed)
    return len(left) > 1 and all(left.isdisjoint(ids) for ids in others)


def _free(alg: Algebra, atom: int) -> frozenset[int]:
    return alg.ids(alg.of_atom(atom))


def _sums_rows_too(alg: Algebra, total: int, denominator: int) -> bool:
    """Whether a denominator adds up weights of several rows."""
    weights = [a for a, _ in alg.defs[total][3] if alg.kind(a) == "exp"]
    rows = frozenset().union(*(_free(alg, a) for a in weights)) & _free(alg, total)
    return bool(rows - _free(alg, denominator))
