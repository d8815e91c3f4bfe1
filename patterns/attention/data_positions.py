"""Reads keys and queries at positions that are data, such as those of packed documents.

Looks like  position(key) <= position(query), or the like from below. Either is an array
            of the program: positions given with the tokens, counted by a cumulative
            sum, or those of a cache's slots. Neither is made anew. They are only
            compared, so any integers are right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rewriter.algebra.canonicalize import of_dtype, within
from rewriter.algebra.emit import FAR
from rewriter.algebra.normal_form import TRUE, Algebra, Poly
from rewriter.find.reading import Operand
from rewriter.patterns.attention.axes import Axes
from rewriter.patterns.attention.by_cases import by_cases, chosen

INT32 = of_dtype("int32")


@dataclass(frozen=True)
class Places:
    """Positions of keys, and the first and the last one that each query sees.

    Attributes:
        keys: The positions.
        first: The first one; None if any may be.
        last: The last one.
    """

    keys: Poly
    first: Poly | None = None
    last: Poly | None = None

    def operands(self, alg: Algebra, axes: Axes) -> dict[str, Operand]:
        """The op's operands."""
        parts = ((self.keys, (axes.b, axes.s)),)
        found = {"kv_positions": Operand(parts, False, dtype="int32")}
        for name, form in (
            ("first_position", self.first),
            ("last_position", self.last),
        ):
            if form is not None:
                near = _limit(alg, self.keys, form, name == "first_position")
                parts = ((form, (axes.b, axes.t)),)
                found[name] = Operand(parts, False, dtype="int32", near=near or 0)
        return found


def with_place(
    alg: Algebra, axes: Axes, places: Places | None, part: int
) -> Places | None:
    """Returns positions with the bound that a condition is; None if it is none.

    It may be one in some cases alone, such as that of layers with a window. In others
    the bound is one that every key is within.
    """
    keys = None if places is None else places.keys
    first: list[tuple[int, Poly]] = []
    last: list[tuple[int, Poly]] = []
    for said, case in by_cases(alg, axes, part).items():
        if said == TRUE:
            continue
        read = _compared(alg, axes, said)
        if read is None:
            return None
        mine, theirs = read  # 0 <= mine + theirs
        minus = alg.scale(theirs, -1.0)
        if keys is None:
            keys = theirs if max(theirs.values()) > 0 else minus
        if keys == minus:
            last.append((case, mine))
        elif keys == theirs:
            first.append((case, alg.scale(mine, -1.0)))
        else:
            return None
    return None if keys is None else _joined(alg, places or Places(keys), first, last)


def _joined(
    alg: Algebra,
    places: Places,
    first: list[tuple[int, Poly]],
    last: list[tuple[int, Poly]],
) -> Places | None:
    """Positions with bounds by cases, beside those that there are; None for none."""
    for name, cases, end in zip(
        ("first", "last"), (first, last), alg.bounds(places.keys), strict=True
    ):
        if not cases:
            continue
        every = {} if any(case == TRUE for case, _ in cases) else _number(alg, end)
        if every is None:
            return None
        bound = chosen(alg, cases, every)
        known = getattr(places, name)
        if known is not None:
            bound = _stricter(alg, known, bound, name == "first")
        if _limit(alg, places.keys, bound, name == "first") is None:
            return None
        places = replace(places, **{name: bound})
    return places


def _stricter(alg: Algebra, one: Poly, other: Poly, first: bool) -> Poly:
    """The later one of two first positions, or the earlier one of two last ones."""
    sign = 1.0 if first else -1.0
    more = alg.relu(alg.scale(alg.add(other, one, -1.0), sign))
    return alg.add(one, more, sign)


def _number(alg: Algebra, x: float) -> Poly | None:
    """A bound of positions as a form; None if there is none."""
    return alg.const(int(x)) if math.isfinite(x) else None


def _compared(alg: Algebra, axes: Axes, part: int) -> tuple[Poly, Poly] | None:
    """(the query's side, the key's) of a comparison: their sum is at least 0."""
    support, table = alg.bools[part]
    d = alg.defs[support[0]] if len(support) == 1 else ("",)
    if d[0] != "ge" or not d[2]:
        return None
    p = alg.thaw(d[1])
    if table != 0b10:
        p = alg.add(alg.scale(p, -1.0), alg.const(-1))
    mine: Poly = {}
    theirs: Poly = {}
    for (flag, mono), c in p.items():
        if flag != TRUE or not float(c).is_integer():
            return None
        side = theirs if alg.term_ids(flag, mono) & set(axes.s) else mine
        side[flag, mono] = c
    q_ids, k_ids = alg.ids(mine), alg.ids(theirs)
    if not q_ids & set(axes.t) or not k_ids:
        return None
    if q_ids - {*axes.b, *axes.t} or k_ids - {*axes.b, *axes.s}:
        return None
    return mine, theirs


def _limit(alg: Algebra, keys: Poly, bound: Poly, first: bool) -> int | None:
    """The integer to which a bound may be clamped: 0 for none, None if it has none.

    It then is computed without wrapping around, and compares as before: no key is at a
    first position beyond int32, nor at a last one below it.
    """
    limits = {_limit_of(alg, keys, x, first) for _, x in alg.cases(bound)}
    return None if None in limits else max(x or 0 for x in limits)


def _limit_of(alg: Algebra, keys: Poly, bound: Poly, first: bool) -> int | None:
    """The integer to which the bound of one case may be clamped."""
    reach = alg.bounds(keys)
    if not within(reach, INT32):
        return None
    least, most = alg.bounds(bound)
    if INT32[0] <= least and most <= INT32[1]:
        return 0
    if within(reach, (-FAR, FAR)):
        return FAR
    _, rest = alg.split_constant(bound)
    none = reach[1] < INT32[1] if first else INT32[0] < reach[0]
    seen = most <= INT32[1] if first else INT32[0] <= least
    if (none or seen) and len(rest) == 1 and abs(next(iter(rest.values()))) == 1:
        return 1 << 31
    return None
