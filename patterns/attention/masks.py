"""Masks of positions: windows, lengths, prefixes, segments; the rest is an array."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping

from rewriter.algebra.normal_form import FALSE, TRUE, Algebra, OverBudget, Poly
from rewriter.find.emitted_anew import is_allowed
from rewriter.find.reading import (
    Group,
    Operand,
    Refused,
    flag_operand,
    position_operand,
    size,
)


class Masks:
    """Sorts the conjuncts of a mask into parameters and operands."""

    def _masks(self) -> None:
        rest = self.alg.both(self.parts.keep, self.parts.row_mask)
        if rest == FALSE:
            raise Refused("mask", "every key is masked", score=0.5)
        self._sorted(conjuncts(self.alg, rest))
        if not self._is_had(self.general) and self._is_had(rest):
            self._sorted([])  # parts of a mask need not be the program's
            self.general = rest
        if self.segments is None:
            self._paired()
        self._window()

    def _paired(self) -> None:
        """Reads (query kept) and (key kept) as segments: 1 and 1, else 0 and 2."""
        alg, sides, rest = self.alg, {self.t: TRUE, self.s: TRUE}, TRUE
        for part in conjuncts(alg, self.general):
            free = frozenset().union(*map(alg.free, alg.bools[part][0]))
            for side in sides:
                if free & set(side) and free <= {*self.b, *side}:
                    sides[side] = alg.both(sides[side], part)
                    break
            else:
                rest = alg.both(rest, part)
        if TRUE in sides.values():
            return
        mine, theirs = (alg.of_bool(flag) for flag in sides.values())
        self.segments = mine, alg.add(alg.const(2), theirs, -1.0)
        self.general = rest

    def _is_had(self, flag: int) -> bool:
        """Whether a mask is made of the program's booleans, or of small integers."""
        alg, axes = self.alg, (self.b, self.n, self.t, self.s)
        own = self.find.own_flag(self.ev, flag, itertools.chain(*axes))
        return all(is_allowed(alg, a) for a in alg.bools[own][0])

    def _sorted(self, parts: list[int]) -> None:
        """Sorts conjuncts into bounds, lengths, segments, a prefix and the rest."""
        alg = self.alg
        self.general = TRUE
        self.right: list[tuple[int, Poly, int]] = []  # constant, rest, the part
        self.left: list[tuple[int, Poly, int]] = []
        self.lengths: list[tuple[int, Poly]] = []
        self.firsts: list[tuple[int, Poly, int]] = []  # lower bounds by cases
        self.whole_rows = TRUE  # conditions on all keys of a sequence
        self.segments: tuple[Poly, Poly] | None = None
        self.prefix: Poly | None = None
        for part in parts:
            if self._structured(part) or self._by_cases(part):
                continue
            if not any(alg.free(a) - set(self.b) for a in alg.bools[part][0]):
                self.whole_rows = alg.both(self.whole_rows, part)
                continue
            if not self._prefixed(part):
                self.general = alg.both(self.general, part)
        if self.lengths and not self.left and len(self.firsts) == 1:
            self.left = self.firsts
        else:  # more than what a window and an offset say
            for _, _, part in self.firsts:
                self.general = alg.both(self.general, part)

    def _structured(self, part: int) -> bool:
        support, table = self.alg.bools[part]
        if len(support) != 1:
            return False
        return self._bound(support[0], table == 0b10, part) or self._segment(
            support[0], table == 0b10
        )

    def _bound(self, atom: int, true: bool, part: int) -> bool:
        """Reads a comparison of the key's position with the query's or a length."""
        found = self._linear(atom, true)
        if found is None:
            return False
        alpha, beta, c, other = found
        if set(self.alg.ids(other)) - set(self.b):
            return False
        if beta == -1 and alpha == 1:  # s <= t + c + other
            self.right.append((c, other, part))
        elif beta == 1 and alpha == -1:  # s >= t - c - other
            self.left.append((c, self.alg.scale(other, -1.0), part))
        elif beta == -1 and alpha == 0:  # s < c + 1 + other
            self.lengths.append((c + 1, other))
        elif beta == 1 and alpha == 0 and not self.t and other:
            self.left.append((c, self.alg.scale(other, -1.0), part))
        else:
            return False
        return True

    def _by_cases(self, part: int) -> bool:
        """Reads a bound that depends on conditions, such as a start moved inside."""
        for side in (-1, 1):  # an upper bound, a lower one
            bounds = self._bounds(part, side)
            try:
                bound = self._in_each_case(part, side, bounds) if bounds else None
            except OverBudget:
                return False
            if bound is not None and side < 0:
                self.lengths.append((0, bound))
            elif bound is not None and not self.t:
                first = self.alg.add(self.alg.const(1), bound, -1.0)
                self.firsts.append((0, first, part))
            else:
                continue
            return True
        return False

    def _bounds(self, part: int, side: int) -> dict[int, tuple[bool, Poly]] | None:
        """Literals of a mask that bound the key, with when they do and the bound.

        Upper bounds are s < bound, lower ones -s < bound. None if the key is in
        another literal, or if all is one literal.
        """
        alg = self.alg
        support, _ = alg.bools[part]
        found: dict[int, tuple[bool, Poly]] = {}
        for atom in support:
            if not alg.free(atom) - set(self.b):
                continue
            for true in (True, False):
                read = self._linear(atom, true)
                if read is not None and read[:2] == (0, side):
                    found[atom] = true, alg.add(read[3], alg.const(read[2] + 1))
            if atom not in found or alg.ids(found[atom][1]) - set(self.b):
                return None
        return found if len(support) > 1 else None

    def _in_each_case(
        self, part: int, side: int, bounds: dict[int, tuple[bool, Poly]]
    ) -> Poly | None:
        """The one bound that a mask is; None if it is something else.

        In each case it is the greatest among the least of bounds that hold together.
        """
        alg, last = self.alg, size(self.alg, self.s) - 1
        none, every = (0, last + 1) if side < 0 else (-last, 1)
        bound: Poly = {}
        for case, rows in self._cases(part, bounds).items():
            kept = [hold for hold, keep in rows if keep]
            ends = [
                _least(alg, [bounds[atom][1] for atom in hold] or [alg.const(every)])
                for hold in kept
                if not any(other < hold for other in kept)
            ]
            here = _greatest(alg, ends or [alg.const(none)])
            for (flag, mono), c in here.items():
                bound = alg.add(bound, {(alg.both(flag, case), mono): c})
        inside = alg.add(bound, alg.const(-1))
        for i, weight in self._digits(self.s):
            inside = alg.add(inside, alg.iota(i), side * weight)
        return bound if alg.compare("ge", inside, True) == part else None

    def _cases(self, part: int, bounds: Mapping[int, tuple[bool, Poly]]):
        """What holds together and whether the key is kept, by the other literals."""
        alg = self.alg
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

    def _digits(self, axis: Group) -> list[tuple[int, int]]:
        """The indices of an axis, the least significant first, and their weights."""
        weights = itertools.accumulate(
            (self.alg.sizes[i] for i in reversed(axis)), operator.mul, initial=1
        )
        return list(zip(reversed(axis), weights, strict=False))

    def _linear(self, atom: int, true: bool):
        """(query coefficient, key coefficient, constant, rest) of a comparison."""
        alg = self.alg
        d = alg.defs[atom]
        if d[0] != "ge" or not d[2]:
            return None
        p = alg.thaw(d[1])
        if not true:
            p = alg.add(alg.scale(p, -1.0), alg.const(-1))
        alpha, p = self._along(p, self.t)
        beta, p = self._along(p, self.s)
        c, other = alg.split_constant(p)
        ids = alg.ids(other)
        if ids & set(self.s) or ids & set(self.t) or abs(beta) != 1:
            return None
        if not all(float(x).is_integer() for x in (alpha, c, *other.values())):
            return None
        return int(alpha), int(beta), int(c), other

    def _along(self, p: Poly, axis: Group) -> tuple[float, Poly]:
        """(factor of the position along an axis, the rest) of a form.

        The position's digits are the axis' indices, the most significant first.
        """
        digits = [(TRUE, ((self.alg.atom("iota", i), 1),)) for i in axis]
        factor = p.get(digits[-1], 0.0) if digits else 0.0
        rest, weight = dict(p), factor
        for i, digit in zip(reversed(axis), reversed(digits), strict=True):
            if rest.pop(digit, 0.0) != weight:
                return 0.0, p
            weight *= self.alg.sizes[i]
        return factor, rest

    def _segment(self, atom: int, true: bool) -> bool:
        """Reads an equality of a number of the query and one of the key."""
        alg = self.alg
        d = alg.defs[atom]
        if d[0] != "eq" or not true or not d[2] or self.segments is not None:
            return False
        p = alg.thaw(d[1])
        mine: Poly = {}
        theirs: Poly = {}
        for (flag, mono), c in p.items():
            ids = alg.term_ids(flag, mono)
            if ids & set(self.s):
                theirs[flag, mono] = -c
            else:
                mine[flag, mono] = c
        q_ids, k_ids = alg.ids(mine), alg.ids(theirs)
        if not theirs or not mine:
            return False
        if q_ids - set(self.b) - set(self.t) or k_ids - set(self.b) - set(self.s):
            return False
        self.segments = (mine, theirs)
        return True

    def _prefixed(self, part: int) -> bool:
        """Reads (s <= t + c) or (s < prefix)."""
        alg = self.alg
        support, _table = alg.bools[part]
        if len(support) != 2 or self.prefix is not None:
            return False
        readings = []
        for _k, atom in enumerate(support):
            for true in (True, False):
                lit = alg.literal(atom) if true else alg.negate(alg.literal(atom))
                if alg.implies(lit, part):
                    readings.append((atom, true))
        if len(readings) != 2:
            return False
        union = FALSE
        for atom, true in readings:
            lit = alg.literal(atom)
            union = alg.either(union, lit if true else alg.negate(lit))
        if union != part:
            return False
        linear = [self._linear(a, true) for a, true in readings]
        if any(x is None for x in linear):
            return False
        causal = [x for x in linear if x[:2] == (1, -1) and not x[3]]
        prefix = [x for x in linear if x[:2] == (0, -1)]
        if len(causal) != 1 or len(prefix) != 1 or self.right or self.left:
            return False
        if alg.ids(prefix[0][3]) - set(self.b):
            return False
        self.right.append((causal[0][2], {}, part))
        self.prefix = alg.add(prefix[0][3], alg.const(prefix[0][2] + 1))
        return True

    def _window(self) -> None:
        """Joins the bounds into a window, a shift and lengths."""
        alg = self.alg
        bounds = [*self.right, *self.left]
        offsets = sorted({alg.freeze(other) for _, other, _ in bounds}, key=len)
        offset = alg.thaw(offsets[0]) if offsets else {}
        self.offset = alg.freeze(offset)
        for _, other, part in bounds:  # one offset is an operand, others a mask
            if alg.freeze(other) != offsets[0]:
                self.general = alg.both(self.general, part)
        right, left = (
            min((c for c, o, _ in side if alg.freeze(o) == offsets[0]), default=None)
            for side in (self.right, self.left)
        )
        shift = right if right is not None and (left is None or right < 0) else 0
        if right is None and left is not None and left < 0:
            offset, left = (
                alg.add(offset, alg.const(-left)),
                0,
            )  # each key from there on
            self.offset = alg.freeze(offset)
        if right is not None or left is not None:
            width = None if left is None else left + shift
            self.params["window"] = (width, None if right is None else right - shift)
            if shift:
                self.params["shift"] = shift
        if offset:
            self.operands["offset"] = position_operand(offset, self.b)
        if self.lengths:
            length = _least(alg, [alg.add(o, alg.const(c)) for c, o in self.lengths])
            length = alg.mul(length, alg.of_bool(self.whole_rows))
            self.operands["kv_lengths"] = position_operand(length, self.b)
        else:
            self.general = alg.both(self.general, self.whole_rows)
        if self.segments is not None:
            sides = zip(("q", "kv"), self.segments, (self.t, self.s), strict=True)
            for name, form, axis in sides:
                own = self.find.own_form(self.ev, form, [*self.b, *axis])
                self.operands[f"{name}_segments"] = Operand(
                    ((own, (self.b, axis)),), dtype="int32"
                )
        if self.prefix is not None:
            self.operands["prefix"] = position_operand(self.prefix, self.b)
        if self.general != TRUE:
            axes = (self.b, self.n, self.t, self.s)
            own = self.find.own_flag(self.ev, self.general, itertools.chain(*axes))
            self.operands["mask"] = flag_operand(own, *axes)


def _least(alg: Algebra, forms: list[Poly]) -> Poly:
    out, *others = forms
    for other in others:
        out = alg.add(out, alg.relu(alg.add(out, other, -1.0)), -1.0)
    return out


def _greatest(alg: Algebra, forms: list[Poly]) -> Poly:
    out, *others = forms
    for other in others:
        out = alg.add(out, alg.relu(alg.add(other, out, -1.0)))
    return out


def conjuncts(alg: Algebra, b: int) -> list[int]:
    """Conjuncts of a boolean function, as fine as they go."""
    out = []
    for a in alg.bools[b][0]:
        if a not in alg.bools[b][0]:
            continue
        mine = alg.project(b, [a])
        others = [x for x in alg.bools[b][0] if x != a]
        rest = alg.project(b, others)
        if mine != TRUE and alg.both(mine, rest) == b:
            out.append(mine)
            b = rest
    pairs = itertools.combinations(alg.bools[b][0], 2)
    for pair in list(pairs) if len(alg.bools[b][0]) > 2 else []:
        mine = alg.project(b, pair)
        others = [x for x in alg.bools[b][0] if x not in pair]
        rest = alg.project(b, others)
        if mine != TRUE and alg.both(mine, rest) == b:
            out.append(mine)
            b = rest
    if b != TRUE:
        out.append(b)
    return out
