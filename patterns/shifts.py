"""Proves that exponents are shifted by the maximum of their own row.

A softmax is ``exp(x - m)`` over its sum. In real numbers any ``m`` does. In floats the
exponentials overflow where ``m`` is too small, and all vanish where it is too large.
Neither happens if two things hold:

- ``m`` is not below any ``x`` that is shifted by it;
- ``m`` is one of the ``x`` that the row's sum counts.

Both are read off the equations of ``m``: maxima over axes, maxima of two values, and
the largest score so far in a loop over blocks of keys.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from rewriter.algebra.canonicalize import (
    LAYOUT_PRIMITIVES,
    Evaluator,
    NeedSplit,
    pieces,
)
from rewriter.algebra.normal_form import TRUE, Algebra, Index, Poly
from rewriter.program.counted_loops import LOOPS
from rewriter.program.graph import Node
from rewriter.program.skipped_steps import branch_results

FAR = 1e4
"""A fill below minus this is taken to be smaller than all scores."""

DEPTH = 24
ORDERS = 24
SAME = frozenset({"stop_gradient", "copy", "convert_element_type", "reduce_precision"})
MAXIMA = SAME | {"reduce_max", "max", "pmax", "cond", "select_n"} | LOOPS


@dataclass(frozen=True, eq=False)
class Row:
    """The rows whose exponentials are added up.

    Attributes:
        ev: What made the forms; it knows the indices of rows.
        sink: What is added to the sum besides.
    """

    ev: Evaluator
    sink: Poly = field(default_factory=dict)

    @property
    def alg(self) -> Algebra:
        """Where the forms are."""
        return self.ev.alg


@dataclass(frozen=True)
class Member:
    """A value at all positions of some indices.

    Attributes:
        form: The value.
        over: The indices.
        made_of: The value is one of these, where it is a maximum.
    """

    form: Poly
    over: frozenset[int] = frozenset()
    made_of: tuple[Member, ...] | None = field(default=None, compare=False)

    def changed(
        self,
        of: Callable[[Poly], Poly] = lambda form: form,
        *,
        over: Iterable[int] = (),
    ) -> Member:
        """Returns the member with other forms, at more indices."""
        inner = self.made_of
        if inner is not None:
            inner = tuple(m.changed(of, over=over) for m in inner)
        return Member(of(self.form), self.over.union(over), inner)


@dataclass(frozen=True)
class Largest:
    """What is known of a value that is made of maxima.

    Attributes:
        above: It is not below any of these.
        among: It is one of these.
        elementwise: Whether no maximum is taken over keys, or over blocks of them.
    """

    above: tuple[Member, ...]
    among: tuple[Member, ...]
    elementwise: bool = True

    def changed(
        self,
        of: Callable[[Poly], Poly] = lambda form: form,
        *,
        over: Iterable[int] = (),
    ) -> Largest:
        """Returns what is known of a value that is changed as these are."""
        change = lambda members: tuple(m.changed(of, over=over) for m in members)
        return replace(self, above=change(self.above), among=change(self.among))


@dataclass(frozen=True)
class Shifted:
    """What an exponent shifts, and the maximum that it subtracts.

    Attributes:
        base: The exponent without what is subtracted.
        among: What the maximum is one of.
    """

    base: Poly
    among: tuple[Member, ...] = ()


def shifted_by_maximum(row: Row, form: Poly) -> Shifted | None:
    """Takes an exponent apart that subtracts a number not below what is left.

    Returns:
        None if it subtracts nothing, or something that may be smaller.
    """
    alg = row.alg
    for shift in _shifts(row, form):
        base = alg.add(form, shift)
        if _is_sink(row, base):
            return Shifted(base)
        try:
            with row.ev.proving():
                found = _largest(row, shift)
        except NeedSplit:  # of pieces that are not taken apart
            continue
        among = _other_members(row, shift, base)
        if among is None and any(_covers(alg, m, base) for m in found.above):
            among = found.among
        elif among is None:
            parts = _parts_of(row, base, found.above)
            if not parts:
                continue
            among = (
                *_without(found.among, parts),
                Member(base, alg.ids(base) - row.ev.outer),
            )
        rest = shifted_by_maximum(row, base)  # it may be subtracted twice
        if rest is None:
            return Shifted(base, among)
        more = alg.difference(rest.base, base)
        among = tuple(
            m.changed(lambda form, more=more: alg.add(form, more)) for m in among
        )
        return Shifted(rest.base, among + rest.among)
    return None


def is_reached(row: Row, member: Member, bases: Iterable[Poly]) -> bool:
    """Whether a row's sum counts what a maximum may be, or all that it is made of.

    Args:
        row: The row.
        member: What the maximum may be.
        bases: What is exponentiated, without what is subtracted.
    """
    alg, form, bases = row.alg, member.form, list(bases)
    constant = alg.as_constant(form)
    if constant is not None and constant <= -FAR:
        return True
    rows, outer = alg.ids(form) & row.ev.outer, row.ev.outer
    for base in bases:  # not those of another row
        if alg.ids(base) & outer == rows and _equal(
            alg, form, base, alg.ids(form) - outer
        ):
            return True
        if not alg.difference(form, alg.log(_summed(row, base))):
            return True
    if _is_sink(row, form):
        return True
    inner = member.made_of
    return inner is not None and all(is_reached(row, m, bases) for m in inner)


def vanishes(ev: Evaluator, exponential: Node) -> bool:
    """Whether an exponential is one of a fill, as before the first block of keys."""
    node = ev.g.node_of(exponential.ins[0])
    first = None if node is None or node.prim != "sub" else ev.number(node.ins[0])
    return first is not None and first <= -FAR


# -------------------------------------------------------------- what is subtracted
def _shifts(row: Row, form: Poly) -> Iterator[Poly]:
    """What may be subtracted in an exponent: each maximum or logarithm in it."""
    alg = row.alg
    for (flag, mono), c in form.items():
        if c >= 0 or not mono:
            continue
        own = {(flag, mono): -c}
        inner = [a for a, e in mono if e == 1 and alg.kind(a) == "relu"]
        if inner and len(mono) == 1 and flag == TRUE:  # max(a, b) = b + relu(a - b)
            terms = alg.thaw(alg.defs[inner[0]][1]).items()
            below = {t: x * c for t, x in terms if x < 0}
            if any(_maximum_in(row, {t: 1.0}) for t, _ in terms):
                yield alg.add(own, below)
        elif any(alg.kind(a) == "log" for a, _ in mono) or _maximum_in(row, own):
            yield own


def _maximum_in(row: Row, form: Poly) -> bool:
    """Whether a form has a factor that is made of maxima of scores."""
    alg = row.alg
    return any(
        _is_made_of_maxima(row, a) or alg.kind(a) == "relu"
        for _, mono in form
        for a, e in mono
        if e == 1
    )


def _is_made_of_maxima(row: Row, atom: int) -> bool:
    """Whether a leaf is a maximum that is computed from the scores."""
    alg, ev = row.alg, row.ev
    if alg.kind(atom) != "leaf":
        return False
    value = alg.defs[atom][1]
    if not isinstance(value, int) or ev.is_side(value):
        return False
    node = ev.g.node_of(value)
    while node is not None and node.prim in LAYOUT_PRIMITIVES:
        value = node.ins[0]
        node = ev.g.node_of(value)
    return value in ev.loops.carries if node is None else node.prim in MAXIMA


# ------------------------------------------------------------------ what maxima are of
def _largest(row: Row, form: Poly, seen: frozenset[int] = frozenset()) -> Largest:
    """What is known of a form: of its maximum, or of itself if it has none."""
    alg = row.alg
    for (flag, mono), c in form.items():
        if flag != TRUE or c <= 0 or len(seen) > DEPTH:
            continue
        if c == 1 and len(mono) == 1 and alg.kind(mono[0][0]) == "relu":
            rest = alg.add(form, {(flag, mono): c}, -1.0)
            other = alg.add(rest, alg.thaw(alg.defs[mono[0][0]][1]))
            either = (_largest(row, p, seen) for p in (rest, other))
            return _named(form, _both(*either))
        for atom, e in mono if len(form) == 1 else ():
            others = {(TRUE, tuple(f for f in mono if f[0] != atom)): c}
            if e == 1 and _is_made_of_maxima(row, atom) and alg.positive(others):
                return _times(alg, _of_leaf(row, atom, seen), others)
    itself = (Member(form),)
    return Largest(itself, itself)


def _times(alg: Algebra, found: Largest, factor: Poly) -> Largest:
    """A value times a positive factor."""
    return found.changed(lambda form: alg.mul(form, factor))


def _both(a: Largest, b: Largest) -> Largest:
    """The larger of two values."""
    elementwise = a.elementwise and b.elementwise
    return Largest(a.above + b.above, a.among + b.among, elementwise)


def _named(form: Poly, found: Largest) -> Largest:
    """The same of a value that has a form: it is not below itself.

    A function of single scores, such as a rectifier, may be what a row exponentiates.
    """
    itself = (Member(form, made_of=found.among),)
    among = itself if found.elementwise else found.among
    return Largest((Member(form), *found.above), among, found.elementwise)


def _either(a: Largest, b: Largest) -> Largest:
    """One of two values."""
    common = tuple(m for m in a.above if m in b.above)
    return Largest(common, a.among + b.among, a.elementwise and b.elementwise)


def _of_leaf(row: Row, atom: int, seen: frozenset[int]) -> Largest:
    """What is known of a value that is made of maxima."""
    ev, alg = row.ev, row.alg
    _, value, args = alg.defs[atom]
    own = args[: len(ev.g.shape(value))]
    itself = alg.of_atom(atom)
    if atom in seen:
        return _named(itself, Largest((), (), elementwise=False))
    seen |= {atom}
    node = ev.g.node_of(value)
    go_on = lambda v: _largest(row, ev.poly(v, ev.aligned(v, own)), seen)
    if node is None:
        loop, k = ev.loops.carries[value]
        found = _either(go_on(loop.first[k]), go_on(loop.after[k]))
        found = replace(found, elementwise=False)
    elif node.prim in SAME or node.prim == "pmax":
        found = go_on(node.ins[node.outs.index(value)])  # of equal parts of all devices
    elif node.prim in LAYOUT_PRIMITIVES:
        source, at = ev.moved(node, value, own) or (None, ())
        form = itself if source is None else ev.poly(source, at)
        found = _largest(row, form, seen)
    elif node.prim == "reduce_max":
        found = _of_axes(row, atom, seen)
    elif node.prim == "max":
        found = _both(*map(go_on, node.ins))
    elif node.prim in ("cond", "select_n"):
        arms = node.ins[1:]
        if node.prim == "cond":
            arms = branch_results(ev.g, node, value)
        found = go_on(arms[0])
        for arm in arms[1:]:
            found = _either(found, go_on(arm))
    else:
        return Largest((Member(itself),), (Member(itself),))
    return _named(itself, found)


def _of_axes(row: Row, atom: int, seen: frozenset[int]) -> Largest:
    """What is known of the maximum over some axes."""
    ev, alg = row.ev, row.alg
    _, value, args = alg.defs[atom]
    node = ev.g.node_of(value)
    at, bound = ev.before_reduction(node, args[: len(ev.g.shape(value))])
    return _over_positions(row, node.ins[0], at, frozenset(bound), seen)


def _over_positions(
    row: Row,
    value: int,
    at: tuple[Index, ...],
    over: frozenset[int],
    seen: frozenset[int],
) -> Largest:
    """What is known of the maximum of a value over some indices, piece by piece."""
    ev = row.ev
    try:
        found = _largest(row, ev.poly(value, at), seen)
    except NeedSplit as need:
        if need.index not in over:
            raise
        rest = over - {need.index}
        each = (
            _over_positions(
                row, value, ev.cut(at, {need.index: i}), rest | {piece} - {None}, seen
            )
            for piece, i in pieces(row.alg, need)
        )
        return functools.reduce(_both, each)
    return _over(found, over)


def _over(found: Largest, over: frozenset[int]) -> Largest:
    """The maximum of a value over some indices."""
    return replace(found.changed(over=over), elementwise=False)


# ------------------------------------------------------------------------- equality
def _without(members: Iterable[Member], parts: list[Member]) -> tuple[Member, ...]:
    """Members, and what they are made of, without some."""
    return tuple(
        m if m.made_of is None else replace(m, made_of=_without(m.made_of, parts))
        for m in members
        if m not in parts
    )


def _covers(alg: Algebra, member: Member, form: Poly) -> bool:
    """Whether a form is a member at some position."""
    over = sorted(member.over & alg.ids(member.form))
    places = [[j for j in alg.ids(form) if alg.sizes[i] == alg.sizes[j]] for i in over]
    return any(
        not alg.difference(alg.subst(member.form, to) if to else member.form, form)
        for at in itertools.islice(itertools.product(*places), ORDERS)
        for to in [dict(zip(over, at, strict=True))]
    )


def _parts_of(row: Row, form: Poly, members: Iterable[Member]) -> list[Member]:
    """Members that together are a form at all of its keys: slices, or a reshape."""
    alg, members = row.alg, list(members)
    for key in alg.ids(form) - row.ev.outer:
        found, start = [], 0
        for _ in members:
            for m in members:
                for i in m.over & alg.ids(m.form):
                    place = alg.affine(i, 1, start)
                    if not alg.difference(alg.subst(form, {key: place}), m.form):
                        found.append(m)
                        start += alg.sizes[i]
            if start == alg.sizes[key]:
                return found
        for m in members:
            for a, b in itertools.permutations(m.over & alg.ids(m.form), 2):
                if alg.sizes[a] * alg.sizes[b] == alg.sizes[key]:
                    place = alg.cat(a, b, alg.sizes[b])
                    if not alg.difference(alg.subst(form, {key: place}), m.form):
                        return [m]
    return []


def _equal(alg: Algebra, a: Poly, b: Poly, free: Iterable[int]) -> bool:
    """Whether two forms are one, if some indices of the first are renamed."""
    ours, theirs = alg.ids(a), alg.ids(b)
    old, new = sorted((ours & set(free)) - theirs), sorted(theirs - ours)
    for order in itertools.islice(itertools.permutations(new), ORDERS):
        to = dict(zip(old, order, strict=False))
        alike = len(old) == len(new) and all(
            alg.sizes[i] == alg.sizes[j] for i, j in to.items()
        )
        if alike and not alg.difference(alg.subst(a, to) if to else a, b):
            return True
    return False


def distinct(row: Row, forms: Iterable[Poly]) -> list[Poly]:
    """Forms without those that differ in the name of the key alone."""
    alg, found = row.alg, []
    for form in forms:
        free = alg.ids(form) - row.ev.outer
        if not any(_equal(alg, form, other, free) for other in found):
            found.append(form)
    return found


def _is_sink(row: Row, form: Poly) -> bool:
    """Whether the exponential of a form is added to the sum of weights."""
    terms = row.alg.exp(form).items() if row.sink else ()
    return any(_is_sink_term(row, t, c) for t, c in terms)


def _is_sink_term(row: Row, term: Any, c: float) -> bool:
    sink = row.sink
    return bool(sink) and term in sink and abs(sink[term] - c) <= 1e-6 * abs(c)


def _other_members(row: Row, shift: Poly, base: Poly) -> tuple[Member, ...] | None:
    """What else is in a shift that is the logarithm of a sum with a base in it.

    Returns:
        None if it is no such logarithm.
    """
    alg = row.alg
    if len(shift) != 1:
        return None
    (((flag, mono), c),) = shift.items()
    if flag != TRUE or c != 1 or len(mono) != 1 or alg.kind(mono[0][0]) != "log":
        return None
    inner, own = alg.thaw(alg.defs[mono[0][0]][1]), _summed(row, base)
    if not all(inner.get(t) == c > 0 for t, c in own.items()):
        return None
    rest = [{t: c} for t, c in inner.items() if t not in own]
    return tuple(Member(alg.log(term)) for term in rest)


def _summed(row: Row, base: Poly) -> Poly:
    """The sum over the keys of the exponentials of a base."""
    alg = row.alg
    return alg.sum_over(alg.exp(base), alg.ids(base) - row.ev.outer)
