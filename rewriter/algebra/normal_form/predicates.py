"""Predicates: comparisons of forms, and the bounds that decide them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rewriter.algebra.normal_form.forms import (
    FALSE,
    TRUE,
    Index,
    OverBudget,
    Poly,
    real,
)


class Predicates:
    """Comparisons as boolean functions."""

    def iota(self, a: Index) -> Poly:
        """The value of an index argument as a polynomial."""
        if a is None:
            return {}
        if isinstance(a, int):
            return self.of_atom(self.atom("iota", a))
        if a[0] == "k":
            return self.const(a[1])
        if a[0] == "aff":
            return self.add(self.scale(self.iota(a[1]), real(a[2])), self.const(a[3]))
        if a[0] == "cat":
            return self.add(self.scale(self.iota(a[1]), real(a[3])), self.iota(a[2]))
        return self.of_atom(self.atom("iota", a))

    def stepped(self, start: Poly, a: Index, size: int, whole: int) -> Index:
        """Start + a, for a position a of a slice that steps through an axis.

        Args:
            start: A number plus a multiple of one index, of at least the slice's size.
            a: The position in the slice.
            size: The slice's size.
            whole: The axis' size.

        Raises:
            OverBudget: If the start is another form, or the slice may be moved to
                stay inside.
        """
        lo, hi = self.bounds(start)
        first, steps = self.split_constant(start)
        if lo < 0 or hi > whole - size or len(steps) > 1:
            raise OverBudget("a slice starts at a position that is not known")
        for (flag, mono), c in steps.items():
            index = self.defs[mono[0][0]][1] if len(mono) == 1 else None
            if flag != TRUE or not isinstance(index, int) or c < size or c != int(c):
                raise OverBudget("a slice starts at a position that is not known")
            a = self.cat(index, a, int(c))
        return self.affine(a, 1, int(first))

    def within(self, start: Poly, size: int) -> int:
        """Whether an integer is a position of an axis, as a boolean function."""
        below_end = self.add(self.const(size - 1), start, -1.0)
        return self.both(
            self.compare("ge", start, True), self.compare("ge", below_end, True)
        )

    def moved_inside(self, b: int, index: int, start: Poly, size: int) -> int:
        """A boolean function with a clamped integer in place of an index.

        Args:
            b: The function.
            index: The index.
            start: The integer; below zero it means the first position, and from the
                size on the last.
            size: The size of the axis.

        Raises:
            OverBudget: If the index is used other than in comparisons.
        """
        inside = self.within(start, size)
        above = self.compare("ge", self.add(start, self.const(-size)), True)
        cases = (
            (self.negate(self.either(inside, above)), {}),
            (inside, start),
            (above, self.const(size - 1)),
        )
        literals = []
        for atom in self.bools[b][0]:
            literal = self.literal(atom)
            if index in self._free[atom]:
                kind, rest, factor = self._compared(atom, index)
                literal = FALSE
                for case, value in cases:
                    here = self.compare(kind, self.add(rest, value, factor), True)
                    literal = self.either(literal, self.both(case, here))
            literals.append(literal)
        return self.of_literals(b, literals)

    def _compared(self, atom: int, index: int) -> tuple[str, Poly, float]:
        """A literal as a comparison of an index with the rest: kind, rest, factor."""
        kind, body, integral = (*self.defs[atom], False)[:3]
        if kind not in ("ge", "eq") or not integral:
            raise OverBudget("a position that is not compared with numbers")
        rest = self.thaw(body)
        factor = rest.pop((TRUE, ((self.atom("iota", index), 1),)), 0.0)
        if index in self.ids(rest):
            raise OverBudget("a position is compared with a sum that holds it")
        return kind, rest, factor

    def bounds(self, p: Poly) -> tuple[float, float]:
        """Least and greatest value of an integer form; infinite if unknown."""
        lo = hi = 0.0
        for (flag, mono), c in p.items():
            a, b = 1.0, 1.0
            for atom, e in mono:
                x = self._atom_bounds(atom) if e == 1 else (-math.inf, math.inf)
                if math.isinf(x[0]) or math.isinf(x[1]):
                    return -math.inf, math.inf
                ends = [y * z for y in (a, b) for z in x]
                a, b = min(ends), max(ends)
            ends = [c * a, c * b] if flag == TRUE else [c * a, c * b, 0.0]
            lo, hi = lo + min(ends), hi + max(ends)
        return lo, hi

    def _atom_bounds(self, atom: int) -> tuple[float, float]:
        """Least and greatest value of an atom."""
        d = self.defs[atom]
        if d[0] == "iota":
            lo, hi = self.index_range(d[1])
            return float(lo), float(hi)
        if d[0] == "leaf":
            return self.leaf_range.get(d[1], (-math.inf, math.inf))
        if d[:2] == ("fn", "sign"):
            return -1.0, 1.0
        if d[0] == "relu":
            lo, hi = self.bounds(self.thaw(d[1]))
            return max(lo, 0.0), max(hi, 0.0)
        return -math.inf, math.inf

    def compare(self, kind: str, p: Poly, integral: bool) -> int:
        """[p >= 0] or [p == 0] as a boolean function."""
        c = self.as_constant(p)
        if c is not None:
            return TRUE if (c >= 0 if kind == "ge" else c == 0) else FALSE
        if all(not mono for _, mono in p):  # a choice among constants
            out, covered = FALSE, FALSE
            for (flag, _), value in p.items():
                covered = self.either(covered, flag)
                if value >= 0 if kind == "ge" else value == 0:
                    out = self.either(out, flag)
            return self.either(out, self.negate(covered))
        if len(cases := self.cases(p)) > 1:  # a factor of the form is a predicate
            out = FALSE
            for case, here in cases:
                out = self.either(
                    out, self.both(case, self.compare(kind, here, integral))
                )
            return out
        if integral or all(self.kind(a) == "iota" for _, m in p for a, _ in m):
            lo, hi = self.bounds(p)
            if kind == "ge" and lo >= 0:
                return TRUE
            if hi < 0 or (kind == "eq" and lo > 0):
                return FALSE
        if kind == "ge":
            near = self._ramps(p, integral)
            return self._ge(p, integral) if near is None else near
        one = len([m for _, m in p if m]) == 1  # a digit equals a number
        if integral and all(
            self.kind(a) == "iota" and (one or isinstance(self.defs[a][1], int))
            for _, m in p
            for a, _ in m
        ):
            above = self.compare("ge", self.add(p, self.const(-1)), True)
            return self.both(self.compare("ge", p, True), self.negate(above))
        frozen = self.freeze(p)
        lead = next(c for (_, m), c in frozen if m)
        return self.literal(
            self.atom("eq", self.freeze(self.scale(p, 1.0 / lead)), integral)
        )

    def cases(self, p: Poly) -> list[tuple[int, Poly]]:
        """What a form is by cases, of which one holds: each with the form there.

        A form with more than three predicates is a single case, and so is one with
        none.
        """
        flags = {flag for flag, _ in p if flag != TRUE}
        if not 0 < len(flags) <= 3:
            return [(TRUE, p)]
        cells = [TRUE]
        for flag in flags:
            halves = ((c, b) for c in cells for b in (flag, self.negate(flag)))
            cells = [x for c, b in halves if (x := self.both(c, b)) != FALSE]
        found = []
        for cell in cells:
            here: Poly = {}
            for (flag, mono), c in p.items():
                if self.implies(cell, flag):
                    self._accumulate(here, TRUE, mono, c)
            found.append((cell, here))
        return found

    def _ramps(self, p: Poly, integral: bool) -> int | None:
        """[r - max(b, 0) >= 0] as two bounds, r and r - b; [r + max(b, 0) >= 0] as one.

        This serves integers such as lengths, which are often a minimum or maximum. It
        also serves absolute values beside a number: |b| is 2 max(b, 0) - b.
        """
        ramps = [
            mono[0][0] for flag, mono in p
            if flag == TRUE and len(mono) == 1 and mono[0][1] == 1
            and self.kind(mono[0][0]) == "relu"
        ]  # fmt: skip
        if not ramps:
            return None
        atom = max(ramps)  # one that holds others was made after them
        term = TRUE, ((atom, 1),)
        b = self.scale(self.thaw(self.defs[atom][1]), p[term])
        rest = {t: v for t, v in p.items() if t != term}
        if not integral:
            middle = self.add(rest, b, 0.5)
            if p[term] > 0 or self.as_constant(middle) is None:
                return None
        join = self.both if p[term] < 0 else self.either
        return join(
            self.compare("ge", rest, integral),
            self.compare("ge", self.add(rest, b), integral),
        )

    def _ge(self, p: Poly, integral: bool) -> int:
        coefficients = [c for t, c in p.items() if t != (TRUE, ())]
        if integral and all(c == int(c) for c in coefficients):
            p = self._divided(p, coefficients)
        elif coefficients:
            p = self.scale(p, 1.0 / max(abs(c) for c in coefficients))
        frozen = self.freeze(p)
        if (
            integral
        ):  # of p >= 0 and not(-p-1 >= 0), keep the one whose lead is positive
            lead = next(c for (_, m), c in frozen if m)
            if lead < 0:
                flipped = self.add(self.scale(p, -1.0), self.const(-1.0))
                return self.negate(
                    self.literal(self.atom("ge", self.freeze(flipped), True))
                )
        return self.literal(self.atom("ge", frozen, integral))

    def _divided(self, p: Poly, coefficients: Sequence[float]) -> Poly:
        """A form that is at least 0 exactly where an integer form is, divided by g.

        ``g x + r >= 0`` is ``x + floor(r / g) >= 0``, if that floor is one number. So
        it is where r is a number, or a position in a block of g.
        """
        sizes = {int(abs(c)) for c in coefficients}
        for g in sorted({*sizes, math.gcd(*sizes)} - {1}, reverse=True):
            terms = p.items()
            multiple = {t: c / g for t, c in terms if t != (TRUE, ()) and c % g == 0}
            rest = {t: c for t, c in terms if t not in multiple}
            lo, hi = self.bounds(rest)
            if math.isfinite(lo + hi) and lo // g == hi // g:
                return self._divided(
                    self.add(multiple, self.const(lo // g)), [*multiple.values()]
                )
        return p
