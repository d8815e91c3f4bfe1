"""Reads two labels of each row, and the share of the target that the second has.

    (1 - q) (l - y[a]) + q (l - y[b])    →    l - y[a],  with b and q beside it

A target that mixes two one-hot rows has this form, as of mixup and cutmix. So has a sum
of two losses of the same logits, weighted by numbers or by an array of rows.

Forms of one-hot rows are split where both may be hot: a term may hold for the classes
that are a and not b. So it is asked what all terms together give at each of the three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rewriter.algebra.normal_form import TRUE, Algebra, Monomial, Poly
from rewriter.find.reading import Refused

Pick = tuple[tuple[tuple[Poly, str], ...], int]
"""Labels, with what picks that are no class, and at which of them a term holds: a table
with a bit for each set of labels that are the class, as of the algebra's booleans."""

UNEVEN = "the shares of two labels in the target do not add up to a known number"


@dataclass(frozen=True)
class TwoLabels:
    """A loss of two labels.

    Attributes:
        form: The form of the loss in which the first has the whole target.
        other: The form of the second label.
        share: The form of its share.
        mixed: Whether terms pick by both labels, as where one-hot rows were mixed.
    """

    form: Poly
    other: Poly
    share: Poly
    mixed: bool


@dataclass
class _Picked:
    """Terms that pick the same logits by some labels.

    Attributes:
        terms: (the term without what it picks, the keys of labels, the table).
        plain: By the key of a label, the atom that picks by it alone.
    """

    terms: list[tuple[Poly, tuple[Any, ...], int]]
    plain: dict[Any, int]

    def at(self, alg: Algebra, *hot: Any) -> Poly:
        """What the terms add up to at a class that is these labels."""
        found: Poly = {}
        for rest, keys, table in self.terms:
            if table >> sum((key in hot) << i for i, key in enumerate(keys)) & 1:
                found = alg.add(found, rest)
        return found


def two_labels(
    alg: Algebra, form: Poly, pick_of: Callable[[int], Pick | None]
) -> TwoLabels | None:
    """The loss of two labels that a form is, or None if it has not two.

    Args:
        alg: Where it is.
        form: The form.
        pick_of: Gives the labels by which an atom picks, if it does.

    Raises:
        Refused: If the shares do not add up.
    """
    labels: dict[Any, Poly] = {}
    picked: dict[Any, _Picked] = {}
    left: Poly = {}
    for (flag, mono), c in form.items():
        found = [(a, p) for a, e in mono if e == 1 and (p := pick_of(a)) is not None]
        if len(found) != 1:
            left = alg.add(left, {(flag, mono): c})
            continue
        ((atom, (own, table)),) = found
        keys = tuple((tuple(sorted(p.items())), outside) for p, outside in own)
        labels |= dict(zip(keys, (p for p, _ in own), strict=True))
        group = picked.setdefault(_what(alg, atom), _Picked([], {}))
        rest = {(flag, tuple(f for f in mono if f[0] != atom)): c}
        group.terms.append((rest, keys, table))
        if len(keys) == 1:
            group.plain[keys[0]] = atom
    if len(labels) != 2:
        return None
    groups = list(picked.values())
    first = _first(labels, groups)
    (second,) = set(labels) - {first}
    shares = []
    for group in groups:
        whole, share = _shared(alg, group, first, second)
        left = alg.add(left, alg.mul(whole, alg.of_atom(group.plain[first])))
        shares.append(share)
    if any(alg.difference(s, shares[0]) for s in shares):
        raise Refused("labels", UNEVEN, score=0.5, difference=alg.show(form))
    mixed = any(len(keys) > 1 for group in groups for _, keys, _ in group.terms)
    return TwoLabels(left, labels[second], shares[0], mixed)


def _first(labels: Sequence[Any], groups: Sequence[_Picked]) -> Any:
    """The first label that picks alone, of everything that is picked.

    Raises:
        Refused: If there is none.
    """
    for label in labels:
        if all(label in group.plain for group in groups):
            return label
    raise Refused("labels", "entries are picked by a mask", score=0.4)


def _shared(alg: Algebra, group: _Picked, first: Any, second: Any) -> tuple[Poly, Poly]:
    """What both labels pick together, and the second's share of it.

    Raises:
        Refused: If a class that is both has not the sum, or the share is no form.
    """
    own, other = group.at(alg, first), group.at(alg, second)
    whole = alg.add(own, other)
    if group.at(alg, first, second) != whole or group.at(alg):
        raise Refused("labels", "entries are picked by a mask", score=0.4)
    return whole, _divided(alg, other, whole)


def _what(alg: Algebra, atom: int) -> Any:
    """What an atom picks, apart from the label by which it does."""
    d = alg.defs[atom]
    return (d[0], d[1]) if d[0] == "fn" else (d[0], d[1], d[3])


def _divided(alg: Algebra, part: Poly, whole: Poly) -> Poly:
    """A form divided by another one of a single term.

    Raises:
        Refused: If the other one has more terms, or does not divide it.
    """
    if len(whole) != 1:
        raise Refused("labels", UNEVEN, score=0.5, difference=alg.show(whole))
    (((flag, factors), number),) = whole.items()
    found: Poly = {}
    for (own, mono), c in part.items():
        if own != flag or not set(factors) <= set(mono):
            raise Refused("labels", UNEVEN, score=0.5, difference=alg.show(part))
        found[TRUE, _without(mono, factors)] = c / number
    return found


def _without(mono: Monomial, factors: Monomial) -> Monomial:
    return tuple(f for f in mono if f not in factors)
