"""Joins attention over keys in several arrays into attention over all of them.

    Σ_i w1(i) v1(i) / D + Σ_j w2(j) v2(j) / D,   D = Σ_i w1(i) + Σ_j w2(j)

is one quotient of two sums, over the first keys and then the second ones. This holds if
w1 and w2 are the same function of the arrays that they read. So attention over two
caches is attention over both, if it is merged by the largest scores and the sums of
weights of both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rewriter.algebra.normal_form import Algebra, Index, Monomial, OverBudget, Poly
from rewriter.find.reading import Joined, Operand, operand

ARRAYS = 5
"""The most arrays along the keys in one piece; all pairings are tried."""

Slot = tuple[str, int]
"""The role of an array's axis: an index of the result, the n-th contracted, the key."""


@dataclass
class Whole:
    """A form with all keys in one sum.

    Attributes:
        form: The form.
        joined: Its arrays that the program holds in pieces.
        values: The joined arrays that are weighed.
        some: Whether a key is kept in any piece, if pieces were joined.
    """

    form: Poly
    joined: dict[Any, Joined] = field(default_factory=dict)
    values: set[Any] = field(default_factory=set)
    some: int | None = None


@dataclass(frozen=True)
class _Piece:
    """The sum over one array of keys: its index, mask, weights and values."""

    key: int
    flag: int
    weights: Monomial
    values: Monomial


@dataclass
class _Use:
    """An array that is read along the keys: its key axis and the roles of its axes."""

    atom: int
    slots: tuple[Slot, ...]
    indices: tuple[int, ...]


def over_all_keys(alg: Algebra, form: Poly, values: set[Any]) -> Whole:
    """Merges the terms of a form into one sum over all keys, or returns it unchanged.

    Args:
        alg: Where the form is.
        form: The sum of weighed values, each over the sum of all weights.
        values: Names of arrays that are weighed.
    """
    found = Whole(form)
    while len(found.form) > 1:
        terms = list(found.form)
        names = values | found.values
        for one, other in itertools.permutations(terms, 2):
            if _join_two(alg, found, one, other, names):
                break
        else:
            return Whole(form)
    return found


def _join_two(
    alg: Algebra, found: Whole, one: Any, other: Any, values: set[Any]
) -> bool:
    """Replaces two terms of the form by one; False if they do not fit."""
    if found.form[one] != found.form[other] or one[0] != other[0]:
        return False
    parts = [_fraction(alg, mono) for _, mono in (one, other)]
    if None in parts or parts[0][1] != parts[1][1]:
        return False
    pieces = [_piece(alg, total, values) for total, _ in parts]
    if None in pieces:
        return False
    below = alg.thaw(alg.defs[parts[0][1]][1])
    for piece in pieces:
        weights = alg.sum_over({(piece.flag, piece.weights): 1.0}, [piece.key])
        less = alg.add(below, weights, -1.0)
        if len(less) >= len(below):
            return False  # these are not the weights that are added up
        below = less
    over = _over_all(alg, *pieces, len(found.joined))
    if over is None:
        return False
    key, flag, weights, weighed, joined, valued = over
    total = alg.sum_over(_masked(alg, alg.mul(weights, weighed), flag), [key])
    below = alg.add(below, alg.sum_over(_masked(alg, weights, flag), [key]))
    term = alg.mul(total, alg.power(below, -1))
    rest = {t: c for t, c in found.form.items() if t not in (one, other)}
    outer = {(one[0], ()): found.form[one]}
    found.form = alg.add(_rescaled(alg, rest, parts[0][1], below), alg.mul(outer, term))
    found.joined |= joined
    found.values |= valued
    seen = alg.either(*(p.flag for p in pieces))
    found.some = seen if found.some is None else alg.either(found.some, seen)
    return True


def _rescaled(alg: Algebra, p: Poly, old: int, below: Poly) -> Poly:
    """Rewrites terms over one total as terms over an equal total."""
    out: Poly = {}
    for (flag, mono), c in p.items():
        rest = tuple((a, e) for a, e in mono if a != old)
        term = alg.mul({(flag, rest): c}, alg.power(below, -1))
        out = alg.add(out, term)
    return out


def _fraction(alg: Algebra, mono: Monomial) -> tuple[int, int] | None:
    """(sum, total) of a term that is a sum over a total."""
    above = [a for a, e in mono if e == 1 and alg.kind(a) == "sum"]
    below = [a for a, e in mono if e == -1 and alg.kind(a) == "pow"]
    if len(mono) != 2 or len(above) != 1 or len(below) != 1:
        return None
    return above[0], below[0]


def _piece(alg: Algebra, total: int, values: set[Any]) -> _Piece | None:
    keys, flag, mono = alg.open_sum(total)
    exps = tuple(f for f in mono if alg.kind(f[0]) == "exp")
    rest = tuple(f for f in mono if alg.kind(f[0]) != "exp")
    weighed = all(
        alg.kind(a) == "leaf" and e == 1 and alg.defs[a][1] in values for a, e in rest
    )
    if len(keys) != 1 or not exps or not rest or not weighed:
        return None
    return _Piece(keys[0], flag, exps, rest)


def _over_all(alg: Algebra, one: _Piece, other: _Piece, count: int):
    """(key, mask, weights, values, joined arrays, weighed ones) of both pieces."""
    first, second = (_uses(alg, p) for p in (one, other))
    if not 0 < len(first) == len(second) <= ARRAYS:
        return None
    sizes = [alg.sizes[p.key] for p in (one, other)]
    key = alg.new_index(sum(sizes))
    names = {name: ("joined", count + k) for k, name in enumerate(first)}
    for order in itertools.permutations(second):
        pairs = list(zip(first, order, strict=True))
        axes = {a: _axes(a[1], b[1]) for a, b in pairs}
        if None in axes.values():
            continue
        slots = {b: (names[a], axes[a]) for a, b in pairs}
        theirs = _Renaming(alg, other, slots, alg.affine(key, 1, -sizes[0]), key)
        mine = _Renaming(alg, one, {a: (names[a], axes[a]) for a in first}, key, key)
        try:
            weights, weighed = mine.product(one.weights), mine.product(one.values)
            same = not alg.add(weights, theirs.product(other.weights), -1.0)
            if not same or alg.add(weighed, theirs.product(other.values), -1.0):
                continue
        except OverBudget:
            continue
        joined = {
            names[a]: _joined(alg, first[a], second[b], axes[a]) for a, b in pairs
        }
        mask = _mask(alg, one, other, key)
        if mask is None:
            name = ("joined", count + len(names))
            mask, joined[name] = _general_mask(alg, one, other, key, name)
        valued = {alg.defs[a][1] for p in weighed for a in alg.poly_leaves({p: 1.0})}
        return key, mask, weights, weighed, joined, valued
    return None


def _masked(alg: Algebra, p: Poly, flag: int) -> Poly:
    return {(alg.both(b, flag), mono): c for (b, mono), c in p.items()}


# ------------------------------------------------------- arrays along the keys
def _uses(alg: Algebra, piece: _Piece) -> dict[Any, _Use]:
    """Arrays that a piece reads along its keys, by name and axes."""
    found: dict[Any, _Use] = {}
    for atom, inner in _keyed(alg, (*piece.weights, *piece.values), piece.key, ()):
        use = _use(alg, atom, inner, piece.key)
        found.setdefault((alg.defs[atom][1], use.slots), use)
    return found


def _keyed(
    alg: Algebra, mono: Monomial, key: int, inner: tuple[int, ...]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(leaf with the key, contracted indices around it) in a product, at any depth."""
    for a, _ in mono:
        if key not in alg.free(a):
            continue
        kind = alg.kind(a)
        if kind == "leaf":
            yield a, inner
        elif kind == "exp":
            yield from _keyed(alg, alg.defs[a][1], key, inner)
        elif kind == "sum":
            fresh, _, body = alg.open_sum(a)
            yield from _keyed(alg, body, key, (*inner, *fresh))


def _use(alg: Algebra, atom: int, inner: tuple[int, ...], key: int) -> _Use:
    ids = dict.fromkeys(i for a in alg.defs[atom][2] for i in _in_order(a))
    names = {i: ("contracted", k) for k, i in enumerate(inner)} | {key: ("key", 0)}
    slots = tuple(names.get(i, ("result", i)) for i in ids)
    return _Use(atom, slots, tuple(ids))


def _in_order(a: Index) -> list[int]:
    """The indices in an index argument, in order of occurrence."""
    if isinstance(a, int):
        return [a]
    if not isinstance(a, tuple) or a[0] == "k":
        return []
    found = _in_order(a[1])
    return found + _in_order(a[2]) if a[0] == "cat" else found


def _axes(one: Sequence[Slot], other: Sequence[Slot]) -> Sequence[Slot] | None:
    """The axes of two arrays that are joined; None if they do not fit.

    One of them may lack axes of the result, as learned keys do that all rows of a batch
    share.
    """
    more, less = (one, other) if len(one) >= len(other) else (other, one)
    lacking = set(more) - set(less)
    fits = set(less) <= set(more) and all(role == "result" for role, _ in lacking)
    return more if fits else None


def _at(use: _Use) -> dict[Slot, int]:
    return dict(zip(use.slots, use.indices, strict=True))


def _joined(alg: Algebra, one: _Use, other: _Use, axes: Sequence[Slot]) -> Joined:
    """Two arrays as one; axes that only one of them has are repeated in the other."""
    pieces = []
    for use in (one, other):
        at = _at(use)
        groups = ((at.get(slot, slot[1]),) for slot in axes)
        pieces.append(operand(alg.of_atom(use.atom), *groups))
    return Joined(tuple(pieces), axes.index(("key", 0)))


class _Renaming:
    """A piece's weights and values over the keys of all pieces."""

    def __init__(
        self,
        alg: Algebra,
        piece: _Piece,
        slots: Mapping[Any, tuple[Any, Sequence[Slot]]],
        position: Index,
        key: int,
    ):
        self.alg, self.piece, self.slots = alg, piece, slots
        self.position, self.key = position, key

    def product(self, mono: Monomial, inner: tuple[int, ...] = ()) -> Poly:
        """The form of a product.

        Raises:
            OverBudget: If the key is used in another way.
        """
        out = self.alg.const(1.0)
        for a, e in mono:
            out = self.alg.mul(out, self.alg.power(self._atom(a, inner), e))
        return out

    def _atom(self, atom: int, inner: tuple[int, ...]) -> Poly:
        alg = self.alg
        if self.piece.key not in alg.free(atom):
            return alg.of_atom(atom)
        kind = alg.kind(atom)
        if kind == "leaf":
            return alg.of_atom(self._leaf(atom, inner))
        if kind == "iota":
            at = {self.piece.key: self.position}
            return alg.subst(alg.of_atom(atom), at)
        if kind == "exp":
            return alg.exp(self.product(alg.defs[atom][1], inner))
        if kind == "sum":
            fresh, flag, body = alg.open_sum(atom)
            if self.piece.key not in alg.term_ids(flag, ()):
                form = self.product(body, (*inner, *fresh))
                return alg.sum_over(_masked(alg, form, flag), fresh)
        text = "keys come from several arrays, and one of them is used in another way"
        raise OverBudget(text)

    def _leaf(self, atom: int, inner: tuple[int, ...]) -> int:
        use = _use(self.alg, atom, inner, self.piece.key)
        name, slots = self.slots[self.alg.defs[atom][1], use.slots]
        at = _at(use) | {("key", 0): self.key}
        return self.alg.atom("leaf", name, tuple(at.get(s, s[1]) for s in slots))


# ---------------------------------------------------------------------- masks
def _mask(alg: Algebra, one: _Piece, other: _Piece, key: int) -> int | None:
    """The mask over all keys, if one piece's mask continues in the other."""
    before = alg.sizes[one.key]
    behind = alg.affine(other.key, 1, before)
    for mask in (
        alg.subst_bool(other.flag, {other.key: alg.affine(key, 1, -before)}),
        alg.subst_bool(one.flag, {one.key: key}),
    ):
        if (
            alg.subst_bool(mask, {key: one.key}) == one.flag
            and alg.subst_bool(mask, {key: behind}) == other.flag
        ):
            return mask
    return None


def _general_mask(
    alg: Algebra, one: _Piece, other: _Piece, key: int, name: Any
) -> tuple[int, Joined]:
    """The mask over all keys as an array."""
    ids = set().union(*(alg.term_ids(p.flag, ()) - {p.key} for p in (one, other)))
    rows = sorted(ids)
    pieces = tuple(
        Operand((({}, (*((i,) for i in rows), (p.key,))),), True, p.flag)
        for p in (one, other)
    )
    mask = alg.literal(alg.atom("leaf", name, (*rows, key)))
    return mask, Joined(pieces, len(rows))
