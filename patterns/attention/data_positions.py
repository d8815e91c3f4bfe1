"""Reads keys and queries at positions that are data, such as those of packed documents.

Looks like  position(key) <= position(query), or the like from below. Either is an array
            of the program: positions given with the tokens, counted by a cumulative
            sum, or those of a cache's slots. Neither is made anew. They are only
            compared, so any integers are right.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rewriter.algebra.canonicalize import of_dtype, within
from rewriter.algebra.emit import FAR
from rewriter.algebra.normal_form import TRUE, Algebra, Poly
from rewriter.find.reading import Operand
from rewriter.patterns.attention.axes import Axes

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
        found = {"kv_positions": Operand(parts, dtype="int32")}
        for name, form in (
            ("first_position", self.first),
            ("last_position", self.last),
        ):
            if form is not None:
                near = _limit(alg, self.keys, form, name == "first_position")
                found[name] = Operand(
                    ((form, (axes.b, axes.t)),), dtype="int32", near=near or 0
                )
        return found


def with_place(
    alg: Algebra, axes: Axes, places: Places | None, part: int
) -> Places | None:
    """Returns positions with the bound that a condition is; None if it is none."""
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
    # 0 <= mine + theirs: theirs is the position, or what it is less than 0.
    minus = alg.scale(theirs, -1.0)
    if places is None:
        rising = max(theirs.values()) > 0
        places = Places(theirs if rising else minus)
    if places.keys == minus and places.last is None:
        found = replace(places, last=mine)
    elif places.keys == theirs and places.first is None:
        found = replace(places, first=alg.scale(mine, -1.0))
    else:
        return None
    first = places.last is not None or found.last is None
    new = found.first if first else found.last
    return None if _limit(alg, found.keys, new, first) is None else found


def _limit(alg: Algebra, keys: Poly, bound: Poly, first: bool) -> int | None:
    """The integer to which a bound may be clamped: 0 for none, None if it has none.

    It then is computed without wrapping around, and compares as before: no key is at a
    first position beyond int32, nor at a last one below it.
    """
    reach = alg.bounds(keys)
    if not within(reach, INT32):
        return None
    least, most = alg.bounds(bound)
    if INT32[0] <= least and most <= INT32[1]:
        return 0
    _, rest = alg.split_constant(bound)
    none = reach[1] < INT32[1] if first else INT32[0] < reach[0]
    seen = most <= INT32[1] if first else INT32[0] <= least
    if (none or seen) and len(rest) == 1 and abs(next(iter(rest.values()))) == 1:
        return 1 << 31
    return FAR if within(reach, (-FAR, FAR)) else None
