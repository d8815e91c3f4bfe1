"""Reads a comparison of positions as a bound of the key's position.

Looks like  s <= t + c, s >= t - c and s < c + length. The bound may differ by
            conditions, such as a start that is moved inside an array.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rewriter.algebra.normal_form import TRUE, Algebra, OverBudget, Poly
from rewriter.find.reading import Group, size
from rewriter.patterns.attention.axes import Axes


@dataclass(frozen=True)
class Comparison:
    """The condition 0 <= query · t + key · s + constant + rest.

    Attributes:
        query: The factor of the query's position t.
        key: The factor of the key's position s, 1 or -1.
        constant: A number.
        rest: Terms without either position.
    """

    query: int
    key: int
    constant: int
    rest: Poly


def comparison(alg: Algebra, axes: Axes, atom: int, true: bool) -> Comparison | None:
    """Returns what an atom says of the key's position; ``None`` if it is not linear.

    Args:
        alg: Where the atom is.
        axes: The op's axes.
        atom: The atom.
        true: Whether it holds, or its opposite does.
    """
    d = alg.defs[atom]
    if d[0] != "ge" or not d[2]:
        return None
    p = alg.thaw(d[1])
    if not true:
        p = alg.add(alg.scale(p, -1.0), alg.const(-1))
    query, p = _position_factor(alg, p, axes.t)
    key, p = _position_factor(alg, p, axes.s)
    if not key and not query:
        key, p = _by_blocks(alg, p, axes.s)
    constant, rest = alg.split_constant(p)
    ids = alg.ids(rest)
    if ids & set(axes.s) or ids & set(axes.t) or abs(key) != 1:
        return None
    if not all(float(x).is_integer() for x in (query, constant, *rest.values())):
        return None
    return Comparison(int(query), int(key), int(constant), rest)


def _position_factor(alg: Algebra, p: Poly, axis: Group) -> tuple[float, Poly]:
    """(factor of the position along an axis, the rest) of a form.

    The position's digits are the axis' indices, the most significant first.
    """
    digits = [(TRUE, ((alg.atom("iota", i), 1),)) for i in axis]
    factor = p.get(digits[-1], 0.0) if digits else 0.0
    rest, weight = dict(p), factor
    inner: Any = 1  # the size of an index further right, which may be symbolic
    for i, digit in zip(reversed(axis), reversed(digits), strict=True):
        weight = weight * inner if isinstance(inner, int) else math.nan
        if rest.pop(digit, 0.0) != weight:
            return 0.0, p
        inner = alg.sizes[i]
    return factor, rest


def _by_blocks(alg: Algebra, p: Poly, axis: Group) -> tuple[float, Poly]:
    """(factor of the position along an axis, the rest), of a bound of whole blocks.

    Let s be ``n block + i``. Then ``block <= c`` exactly if ``s <= n c + n - 1``, and
    ``block >= c`` exactly if ``s >= n c``.
    """
    for k in range(len(axis) - 1, 0, -1):
        key, rest = _position_factor(alg, p, axis[:k])
        if abs(key) == 1:
            n = math.prod(alg.sizes[i] for i in axis[k:])
            return key, alg.add(alg.scale(rest, n), alg.const(n - 1 if key < 0 else 0))
    return 0.0, p


def bound_by_cases(alg: Algebra, axes: Axes, part: int) -> tuple[int, Poly] | None:
    """Returns the one bound that a mask is, by cases; ``None`` if it is something else.

    It comes with a side: -1 for an upper bound, s < bound; 1 for a lower one,
    -s < bound.
    """
    for side in (-1, 1):
        bounds = _bounds(alg, axes, part, side)
        try:
            bound = _in_each_case(alg, axes, part, side, bounds) if bounds else None
        except OverBudget:
            return None
        if bound is not None:
            return side, bound
    return None


def _bounds(
    alg: Algebra, axes: Axes, part: int, side: int
) -> dict[int, tuple[bool, Poly]] | None:
    """Literals of a mask that bound the key, with when they do and the bound.

    ``None`` if the key is in another literal, or if all is one literal.
    """
    support, _ = alg.bools[part]
    found: dict[int, tuple[bool, Poly]] = {}
    for atom in support:
        if not alg.free(atom) - set(axes.b):
            continue
        for true in (True, False):
            read = comparison(alg, axes, atom, true)
            if read is not None and (read.query, read.key) == (0, side):
                found[atom] = true, alg.add(read.rest, alg.const(read.constant + 1))
        if atom not in found or alg.ids(found[atom][1]) - set(axes.b):
            return None
    return found if len(support) > 1 else None


def _in_each_case(
    alg: Algebra,
    axes: Axes,
    part: int,
    side: int,
    bounds: Mapping[int, tuple[bool, Poly]],
) -> Poly | None:
    """The one bound that a mask is.

    In each case it is the greatest among the least of bounds that hold together.
    """
    last = size(alg, axes.s) - 1
    none, every = (0, last + 1) if side < 0 else (-last, 1)
    bound: Poly = {}
    for case, rows in _cases(alg, part, bounds).items():
        kept = [hold for hold, keep in rows if keep]
        ends = [
            least(alg, [bounds[atom][1] for atom in hold] or [alg.const(every)])
            for hold in kept
            if not any(other < hold for other in kept)
        ]
        here = _greatest(alg, ends or [alg.const(none)])
        for (flag, mono), c in here.items():
            bound = alg.add(bound, {(alg.both(flag, case), mono): c})
    inside = alg.add(bound, alg.const(-1))
    for i, weight in _digits(alg, axes.s):
        inside = alg.add(inside, alg.iota(i), side * weight)
    return bound if alg.compare("ge", inside, True) == part else None


def _cases(
    alg: Algebra, part: int, bounds: Mapping[int, tuple[bool, Poly]]
) -> dict[int, list[tuple[frozenset[int], bool]]]:
    """What holds together and whether the key is kept, by the other literals."""
    support, table = alg.bools[part]
    never = alg.impossible(support)
    cases: dict[int, list[tuple[frozenset[int], bool]]] = {}
    for row in range(1 << len(support)):
        if never >> row & 1:
            continue
        case, hold = TRUE, []
        for k, atom in enumerate(support):
            value = bool(row >> k & 1)
            if atom in bounds:
                hold += [atom] if value == bounds[atom][0] else []
            else:
                literal = alg.literal(atom)
                case = alg.both(case, literal if value else alg.negate(literal))
        found = frozenset(hold), bool(table >> row & 1)
        cases.setdefault(case, []).append(found)
    return cases


def _digits(alg: Algebra, axis: Group) -> list[tuple[int, int]]:
    """The indices of an axis, the least significant first, and their weights."""
    weights = itertools.accumulate(
        (alg.sizes[i] for i in reversed(axis)), operator.mul, initial=1
    )
    return list(zip(reversed(axis), weights, strict=False))


def least(alg: Algebra, forms: list[Poly]) -> Poly:
    """The least of some integers."""
    out, *others = forms
    for other in others:
        out = alg.add(out, alg.relu(alg.add(out, other, -1.0)), -1.0)
    return out


def _greatest(alg: Algebra, forms: list[Poly]) -> Poly:
    out, *others = forms
    for other in others:
        out = alg.add(out, alg.relu(alg.add(other, out, -1.0)))
    return out
