"""Masks of positions: windows, lengths, prefixes, segments; the rest is an array."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rewriter.algebra.normal_form import FALSE, TRUE, Algebra, Poly
from rewriter.find.reading import (
    Operand,
    Refused,
    flag_operand,
    position_operand,
    size,
)
from rewriter.find.recomputable import is_allowed
from rewriter.patterns.attention.axes import Axes
from rewriter.patterns.attention.bounds import bound_by_cases, comparison, least
from rewriter.patterns.attention.by_cases import by_cases, by_positions, chosen
from rewriter.patterns.attention.conjuncts import conjuncts
from rewriter.patterns.attention.data_positions import Places, with_place
from rewriter.patterns.attention.softmax import Softmax


@dataclass(frozen=True)
class Masks:
    """A mask as the op's operands and parameters.

    Attributes:
        operands: Name to operand.
        params: The window and its shift, if there is one.
        segments: The numbers that a query and a key have in common, if any.
        offset: What the queries' positions begin at.
    """

    operands: Mapping[str, Operand]
    params: Mapping[str, Any]
    segments: tuple[Poly, Poly] | None
    offset: Poly


@dataclass(frozen=True)
class Bound:
    """A bound of the key's position: s <= t + constant + rest, or the like from below.

    Attributes:
        constant: A number.
        rest: What else is added.
        part: The condition.
    """

    constant: int
    rest: Poly
    part: int


@dataclass(frozen=True)
class Conditions:
    """A mask's conjuncts, by what they say of a key's position s and a query's t.

    Attributes:
        right: Bounds s <= t + constant + rest.
        left: Bounds s >= t - constant + rest.
        lengths: Bounds s < length.
        firsts: Lower bounds by cases.
        whole_rows: Conditions on all keys of a sequence.
        segments: Numbers of a query and of a key that are equal.
        prefix: Keys below it are seen by all queries.
        places: Positions that are data, with bounds by query.
        general: All else.
    """

    right: tuple[Bound, ...] = ()
    left: tuple[Bound, ...] = ()
    lengths: tuple[Poly, ...] = ()
    firsts: tuple[Bound, ...] = ()
    whole_rows: int = TRUE
    segments: tuple[Poly, Poly] | None = None
    prefix: Poly | None = None
    places: Places | None = None
    general: int = TRUE


def read_masks(softmax: Softmax, axes: Axes) -> Masks:
    """Returns the op's masks.

    Raises:
        Refused: If every key is masked.
    """
    alg, kept = softmax.alg, softmax.seen_keys
    if kept == FALSE:
        raise Refused("mask", "every key is masked", score=0.5)
    if softmax.mask_as_array:
        said = Conditions(general=kept)
        return Masks(_operands(softmax, axes, said, {}), {}, None, {})
    said = _sorted(alg, axes, conjuncts(alg, kept))
    if not _is_at_hand(softmax, axes, said.general) and _is_at_hand(
        softmax, axes, kept
    ):
        said = Conditions(general=kept)  # parts of a mask need not be the program's
    if said.segments is None:
        said = _paired(alg, axes, said)
    offset, said = _with_one_offset(alg, axes, said)
    params, offset = _window(alg, said, offset)
    return Masks(_operands(softmax, axes, said, offset), params, said.segments, offset)


def _is_at_hand(softmax: Softmax, axes: Axes, flag: int) -> bool:
    """Whether a mask is made of the program's booleans, or of small integers."""
    alg, ids = softmax.alg, itertools.chain(*axes.of_scores)
    own = softmax.find.own_flag(softmax.ev, flag, ids)
    return all(is_allowed(alg, a) for a in alg.bools[own][0])


# ------------------------------------------------- conjuncts by what they say
def _sorted(alg: Algebra, axes: Axes, parts: list[int]) -> Conditions:
    """Sorts conjuncts; each goes to the first kind that reads it."""
    said = Conditions()
    for part in parts:
        more = _read(alg, axes, said, part)
        said = _general(alg, axes, said, part) if more is None else more
    if said.lengths and not said.left and len(said.firsts) == 1:
        return replace(said, left=said.firsts)
    for first in said.firsts:  # more than what a window and an offset say
        said = _general(alg, axes, said, first.part)
    return said


def _read(alg: Algebra, axes: Axes, said: Conditions, part: int) -> Conditions | None:
    """Reads a condition as one of the kinds, or as several that all are; else None."""
    for kind in KINDS:
        found = kind(alg, axes, said, part)
        if found is not None:
            return found
    finer = by_positions(alg, axes, part)
    more: Conditions | None = said
    for piece in finer if len(finer) > 1 else ():
        more = None if more is None else _read(alg, axes, more, piece)
    return more if len(finer) > 1 else None


def _bound(alg: Algebra, axes: Axes, said: Conditions, part: int) -> Conditions | None:
    """Reads a comparison of the key's position with the query's or a length."""
    support, table = alg.bools[part]
    if len(support) != 1:
        return None
    read = comparison(alg, axes, support[0], table == 0b10)
    if read is None or set(alg.ids(read.rest)) - set(axes.b):
        return None
    below = Bound(read.constant, alg.scale(read.rest, -1.0), part)
    match read.query, read.key:
        case 1, -1:  # s <= t + c + rest
            above = Bound(read.constant, read.rest, part)
            return replace(said, right=(*said.right, above))
        case -1, 1:  # s >= t - c - rest
            return replace(said, left=(*said.left, below))
        case 0, -1:  # s < c + 1 + rest
            length = alg.add(read.rest, alg.const(read.constant + 1))
            return replace(said, lengths=(*said.lengths, length))
        case 0, 1 if not axes.t and read.rest:
            return replace(said, left=(*said.left, below))
    return None


def _segments(
    alg: Algebra, axes: Axes, said: Conditions, part: int
) -> Conditions | None:
    """Reads an equality of a number of the query and one of the key.

    In cases without one, such as that of layers that see all keys, both are 0.
    """
    if said.segments is not None:
        return None
    cases = []
    for equal, case in by_cases(alg, axes, part).items():
        if equal != TRUE:
            sides = _equal(alg, axes, equal)
            if sides is None:
                return None
            cases.append((case, sides))
    if not cases:
        return None
    of_queries, of_keys = (
        chosen(alg, [(case, sides[i]) for case, sides in cases], {}) for i in (0, 1)
    )
    return replace(said, segments=(of_queries, of_keys))


def _equal(alg: Algebra, axes: Axes, part: int) -> tuple[Poly, Poly] | None:
    """(a number of the query, one of the key) that a condition says are equal."""
    support, table = alg.bools[part]
    d = alg.defs[support[0]] if len(support) == 1 else ("",)
    if d[0] != "eq" or table != 0b10 or not d[2]:
        return None
    mine: Poly = {}
    theirs: Poly = {}
    for (flag, mono), c in alg.thaw(d[1]).items():
        if alg.term_ids(flag, mono) & set(axes.s):
            theirs[flag, mono] = -c
        else:
            mine[flag, mono] = c
    q_ids, k_ids = alg.ids(mine), alg.ids(theirs)
    if not theirs or not mine:
        return None
    if q_ids - set(axes.b) - set(axes.t) or k_ids - set(axes.b) - set(axes.s):
        return None
    return mine, theirs


def _bound_by_cases(
    alg: Algebra, axes: Axes, said: Conditions, part: int
) -> Conditions | None:
    """Reads a bound that depends on conditions, such as a start moved inside."""
    side, bound = bound_by_cases(alg, axes, part) or (0, {})
    if side < 0:
        return replace(said, lengths=(*said.lengths, bound))
    if side > 0 and not axes.t:
        first = Bound(0, alg.add(alg.const(1), bound, -1.0), part)
        return replace(said, firsts=(*said.firsts, first))
    return None


def _of_rows(
    alg: Algebra, axes: Axes, said: Conditions, part: int
) -> Conditions | None:
    """Reads a condition on all keys of a sequence."""
    if any(alg.free(a) - set(axes.b) for a in alg.bools[part][0]):
        return None
    return replace(said, whole_rows=alg.both(said.whole_rows, part))


def _prefix(alg: Algebra, axes: Axes, said: Conditions, part: int) -> Conditions | None:
    """Reads (s <= t + c + offset) or (s < prefix), the latter in some sequences.

    Sequences that see all keys have a prefix of all keys.
    """
    support, _ = alg.bools[part]
    of_rows = [a for a in support if not alg.free(a) - set(axes.b)]
    sides = [a for a in support if a not in of_rows]
    if len(sides) not in (1, 2) or said.prefix is not None or said.right or said.left:
        return None
    read = [
        (_literal(alg, atom, true), found)
        for atom in sides
        for true in (True, False)
        if (found := comparison(alg, axes, atom, true)) is not None
        and not alg.ids(found.rest) - set(axes.b)
    ]
    causal = [x for x in read if (x[1].query, x[1].key) == (1, -1)]
    prefix = [x for x in read if (x[1].query, x[1].key) == (0, -1)]
    if len(causal) != 1 or len(prefix) != len(sides) - 1:
        return None
    sees, window = causal[0]
    early, end = TRUE, alg.const(size(alg, axes.s))
    if prefix:
        early, first = prefix[0]
        end = alg.add(first.rest, alg.const(first.constant + 1))
    rows = alg.project(alg.both(part, alg.negate(sees)), of_rows)
    if alg.either(sees, alg.both(early, rows)) != part:
        return None
    return replace(
        said,
        right=(Bound(window.constant, window.rest, part),),
        prefix=alg.mul(end, alg.of_bool(rows)),
    )


def _literal(alg: Algebra, atom: int, true: bool) -> int:
    literal = alg.literal(atom)
    return literal if true else alg.negate(literal)


def _places(alg: Algebra, axes: Axes, said: Conditions, part: int) -> Conditions | None:
    """Reads a comparison of positions that are data."""
    found = with_place(alg, axes, said.places, part)
    return None if found is None else replace(said, places=found)


def _general(alg: Algebra, axes: Axes, said: Conditions, part: int) -> Conditions:
    """Takes any condition."""
    return replace(said, general=alg.both(said.general, part))


KINDS = (_bound, _segments, _bound_by_cases, _of_rows, _prefix, _places)
"""What a condition may be, in the order in which they are tried."""


def _paired(alg: Algebra, axes: Axes, said: Conditions) -> Conditions:
    """Reads (query kept) and (key kept) as segments: 1 and 1, else 0 and 2."""
    sides, rest = {axes.t: TRUE, axes.s: TRUE}, TRUE
    for part in conjuncts(alg, said.general):
        free = frozenset().union(*map(alg.free, alg.bools[part][0]))
        for side in sides:
            if free & set(side) and free <= {*axes.b, *side}:
                sides[side] = alg.both(sides[side], part)
                break
        else:
            rest = alg.both(rest, part)
    if TRUE in sides.values():
        return said
    mine, theirs = (alg.of_bool(flag) for flag in sides.values())
    segments = mine, alg.add(alg.const(2), theirs, -1.0)
    return replace(said, segments=segments, general=rest)


# -------------------------------------------------- conditions as the op's own
def _with_one_offset(
    alg: Algebra, axes: Axes, said: Conditions
) -> tuple[Poly, Conditions]:
    """(the offset of all bounds, the conditions).

    Other bounds, such as a window whose length is a value, become those of each query.
    What is neither becomes general.
    """
    bounds = [*said.right, *said.left]
    offsets = sorted({alg.freeze(x.rest) for x in bounds}, key=len)
    if not offsets:
        return {}, said
    right, left = (
        tuple(x for x in side if alg.freeze(x.rest) == offsets[0])
        for side in (said.right, said.left)
    )
    said = replace(said, right=right, left=left)
    for x in bounds:
        if alg.freeze(x.rest) != offsets[0]:
            more = _places(alg, axes, said, x.part)
            said = more or _general(alg, axes, said, x.part)
    return alg.thaw(offsets[0]), said


def _window(
    alg: Algebra, said: Conditions, offset: Poly
) -> tuple[dict[str, Any], Poly]:
    """(the window and its shift, the offset) that all bounds together are."""
    right = min((x.constant for x in said.right), default=None)
    left = min((x.constant for x in said.left), default=None)
    shift = right if right is not None and (left is None or right < 0) else 0
    if right is None and left is not None and left < 0:  # each key from there on
        offset, left = alg.add(offset, alg.const(-left)), 0
    if right is None and left is None:
        return {}, offset
    reach = (
        None if left is None else left + shift,
        None if right is None else right - shift,
    )
    return {"window": reach, **({"shift": shift} if shift else {})}, offset


def _operands(
    softmax: Softmax, axes: Axes, said: Conditions, offset: Poly
) -> dict[str, Operand]:
    """The arrays of masks: positions, lengths, segments, and what is left."""
    alg, find, ev = softmax.alg, softmax.find, softmax.ev
    found: dict[str, Operand] = {}
    general = said.general
    if offset:
        found["offset"] = position_operand(offset, axes.b)
    if said.lengths:
        length = least(alg, list(said.lengths))
        length = alg.mul(length, alg.of_bool(said.whole_rows))
        found["kv_lengths"] = position_operand(length, axes.b)
    else:
        general = alg.both(general, said.whole_rows)
    if said.segments is not None:
        sides = zip(("q", "kv"), said.segments, (axes.t, axes.s), strict=True)
        for name, form, axis in sides:
            own = find.own_form(ev, form, [*axes.b, *axis])
            found[f"{name}_segments"] = Operand(((own, (axes.b, axis)),), dtype="int32")
    if said.prefix is not None:
        found["prefix"] = position_operand(said.prefix, axes.b)
    if said.places is not None:
        found |= said.places.operands(alg, axes)
    if general != TRUE:
        own = find.own_flag(ev, general, itertools.chain(*axes.of_scores))
        found["mask"] = flag_operand(own, *axes.of_scores)
    return found
