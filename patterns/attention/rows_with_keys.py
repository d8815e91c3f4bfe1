"""Proves that every query sees a key: the key at its own position, or the first one.

A block of queries in a loop sees itself at its own place among all keys. There the
segments of the queries are a slice of the segments of the keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rewriter.algebra.canonicalize import Evaluator, values_named
from rewriter.algebra.normal_form import TRUE, Index, OverBudget, Poly
from rewriter.find.reading import Group, size
from rewriter.patterns.attention.axes import Axes
from rewriter.patterns.attention.masks import Masks
from rewriter.patterns.attention.softmax import Softmax

OF_POSITIONS = frozenset({"offset", "q_segments", "kv_segments"})


def is_never_empty(softmax: Softmax, axes: Axes, masks: Masks) -> bool:
    """Whether every query sees itself or the first key."""
    alg = softmax.alg
    t, s = size(alg, axes.t), size(alg, axes.s)
    left, right = masks.params.get("window", (None, None))
    shift = masks.params.get("shift", 0)
    names = set(masks.operands)
    if _each_sees_itself(softmax, axes, masks):
        return True
    if left is None and "kv_lengths" in names:
        ((length, _),) = masks.operands["kv_lengths"].parts
        names -= {"kv_lengths"} if _least(softmax, length) >= 1 else set()
    if left is None and "offset" in names and _is_positive(softmax, masks.offset):
        names -= {"offset"}  # a later query sees the first key all the more
    if names - {"prefix"} or (left or 0) + (right or 0) < 0:
        return False
    first_sees = right is None or shift + right >= 0
    last_sees = left is None or t + shift <= s + left
    return first_sees and last_sees


# --------------------------------------------------------------- its own position
def _each_sees_itself(softmax: Softmax, axes: Axes, masks: Masks) -> bool:
    """Whether every query sees the key at its own position."""
    alg = softmax.alg
    if [alg.sizes[i] for i in axes.t] == [alg.sizes[i] for i in axes.s]:
        to = dict(zip(axes.s, axes.t, strict=True))
        if alg.subst_bool(softmax.seen_keys, to) == TRUE:
            return True
    if set(masks.operands) - OF_POSITIONS or not _holds_own_position(masks):
        return False
    try:
        return _has_own_position(softmax, axes, masks)
    except OverBudget:
        return False


def _holds_own_position(masks: Masks) -> bool:
    """Whether a window holds the position of the query itself."""
    left, right = masks.params.get("window", (None, None))
    shift = masks.params.get("shift", 0)
    return (left is None or shift <= left) and (right is None or -shift <= right)


def _has_own_position(softmax: Softmax, axes: Axes, masks: Masks) -> bool:
    """Whether each query has a position among the keys, with its own segment.

    Raises:
        OverBudget: If the program around does not say so.
    """
    alg = softmax.alg
    around = softmax.find.evaluator_around(softmax.value)
    offset = _by_the_program(softmax, around, masks.offset)
    t = _position(softmax, axes.t)
    if masks.segments is None:
        alg.stepped(offset, t, size(alg, axes.t), size(alg, axes.s))
        return True
    mine, theirs = (_by_the_program(softmax, around, form) for form in masks.segments)
    at = _same_place(softmax, axes, mine, theirs)
    if "window" in masks.params:
        apart = alg.add(alg.add(alg.iota(at), alg.iota(t), -1.0), offset, -1.0)
        if alg.as_constant(apart) != 0:
            return False
    return alg.difference(alg.subst(theirs, _digits(softmax, axes.s, at)), mine) == {}


def _by_the_program(softmax: Softmax, around: Evaluator, form: Poly) -> Poly:
    """A sum of arrays and numbers by what the loops around it say of them."""
    alg, out = softmax.alg, {}
    for (flag, mono), c in form.items():
        term = {(flag, ()): c}
        for atom, e in mono:
            known = alg.of_atom(atom, e)
            if e == 1 and alg.kind(atom) == "leaf":
                _, name, args = alg.defs[atom]
                (value,) = values_named(name)
                known = around.poly(value, args[: len(softmax.find.graph.shape(value))])
            term = alg.mul(term, known)
        out = alg.add(out, term)
    return out


def _position(softmax: Softmax, axis: Group) -> Index:
    """The position along an axis of several indices."""
    at: Index = None
    for i in axis:
        at = softmax.alg.cat(at, i, softmax.alg.sizes[i])
    return at


def _same_place(softmax: Softmax, axes: Axes, mine: Poly, theirs: Poly) -> Index:
    """Where keys are in an array that queries read too: the position that these read.

    Raises:
        OverBudget: If the arrays are not one.
    """
    alg, s = softmax.alg, softmax.alg.iota(_position(softmax, axes.s))
    (own, whole) = ([a for _, mono in form for a, _ in mono] for form in (mine, theirs))
    if [[alg.kind(a) for a in atoms] for atoms in (own, whole)] != [["leaf"]] * 2:
        raise OverBudget("segments that are not one array")
    (_, name, places), (_, other, positions) = alg.defs[own[0]], alg.defs[whole[0]]
    at = [k for k, x in enumerate(positions) if alg.difference(alg.iota(x), s) == {}]
    if name != other or len(at) != 1:
        raise OverBudget("segments that are not one array")
    return places[at[0]]


def _digits(softmax: Softmax, axis: Group, at: Index) -> Mapping[int, Index]:
    """The indices of an axis at a position."""
    alg, found = softmax.alg, {}
    for k, i in enumerate(reversed(axis)):
        last = k == len(axis) - 1
        found[i] = at if last else alg.mod(at, alg.sizes[i])
        at = at if last else alg.div(at, alg.sizes[i])
    return found


# --------------------------------------------------------------------- the first
def _is_positive(softmax: Softmax, offset: Poly) -> bool:
    """Whether what the queries' positions begin at is not below zero."""
    return _least(softmax, offset) >= 0


def _least(softmax: Softmax, form: Poly) -> float:
    """A lower bound of a sum of numbers and of integers such as loop counters."""
    alg, least = softmax.alg, 0.0
    for (flag, mono), c in form.items():
        leaf = alg.defs[mono[0][0]] if len(mono) == 1 else ("",)
        if flag == TRUE and not mono:
            least += c
        elif flag == TRUE and leaf[0] == "leaf" and mono[0][1] == 1 and c > 0:
            known, _ = alg.leaf_range.get(leaf[1], (-math.inf, 0))
            own = -math.inf if leaf[2] else softmax.find.least(leaf[1])
            least += c * max(known, own)
        else:
            return -math.inf
    return least
