"""Polynomials: sums of boolean functions times monomials, and their powers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from rewriter.algebra.normal_form.forms import (
    FALSE,
    TERM_BUDGET,
    TRUE,
    WORK_BUDGET,
    Monomial,
    OverBudget,
    Poly,
    TooMuchWork,
    real,
    term_order,
)

EXACT = 2.0**53
"""Smaller whole numbers are added without rounding."""

ROUNDING = 2
"""A sum of other numbers counts as zero if it is at most this many times `Algebra.snap`
of the largest."""


def _is_whole(c: float) -> bool:
    """Whether a number is whole, and small enough to be added without rounding."""
    return abs(c) < EXACT and c == int(c)


class Polynomials:
    """Ring operations, powers and knowledge of signs."""

    def const(self, c: float) -> Poly:
        """A constant."""
        return {(TRUE, ()): self.number(real(c))} if c != 0 else {}

    def of_atom(self, atom: int, exponent: Any = 1) -> Poly:
        """One atom."""
        return {(TRUE, ((atom, exponent),)): 1.0}

    def of_bool(self, b: int) -> Poly:
        """1 where b holds, else 0."""
        return {(b, ()): 1.0} if b != FALSE else {}

    def add(self, a: Poly, b: Poly, sign: float = 1.0) -> Poly:
        """A + sign * b."""
        if not b:
            return a
        out = dict(a)
        mixed = set()
        for (flag, mono), c in b.items():
            self._accumulate(out, flag, mono, sign * c)
            mixed.add(mono)
        return self._disjoint(out, mixed)

    def difference(self, a: Poly, b: Poly) -> Poly:
        """A - b; empty if they are the same, also in their infinite numbers."""
        alike = {t for t, c in a.items() if math.isinf(c) and b.get(t) == c}
        rest = ({t: c for t, c in p.items() if t not in alike} for p in (a, b))
        return self.add(*rest, -1.0)

    def _accumulate(self, out: Poly, flag: int, mono: Monomial, c: float) -> None:
        self.work += 1
        if self.work > WORK_BUDGET:
            raise TooMuchWork("the region takes too many steps")
        old = out.get((flag, mono), 0.0)
        new = old + c
        little = (
            old and math.isfinite(new) and abs(new) <= ROUNDING * self.snap * abs(old)
        )
        if little and not (_is_whole(old) and _is_whole(c)):
            new = 0.0
        if new == 0:
            out.pop((flag, mono), None)
        else:
            out[flag, mono] = self.number(new)
        if len(out) > TERM_BUDGET:
            raise OverBudget("too many terms")

    def _disjoint(self, p: Poly, candidates: Iterable[Monomial]) -> Poly:
        """Makes the boolean factors of equal monomials disjoint and maximal."""
        by_mono: dict[Monomial, list[tuple[int, float]]] = {}
        for flag, _ in p:
            if flag != TRUE:
                break
        else:
            return p
        wanted = set(candidates)
        for (flag, mono), c in p.items():
            if mono in wanted:
                by_mono.setdefault(mono, []).append((flag, c))
        for mono, entries in by_mono.items():
            if len(entries) < 2:
                continue
            # Of each piece: its value, the largest number in it, against which what
            # is left of a cancellation counts as nothing, and whether all are whole.
            pieces: list[tuple[int, float, float, bool]] = [(TRUE, 0.0, 0.0, True)]
            for flag, c in entries:
                split = []
                for piece, value, largest, whole in pieces:
                    inside = self.both(piece, flag)
                    outside = self.both(piece, self.negate(flag))
                    if inside != FALSE:
                        all_whole = whole and _is_whole(c)
                        most = max(largest, abs(c))
                        split.append((inside, value + c, most, all_whole))
                    if outside != FALSE:
                        split.append((outside, value, largest, whole))
                pieces = split
            merged: dict[float, int] = {}
            for piece, value, largest, whole in pieces:
                nothing = ROUNDING * self.snap * largest
                little = math.isfinite(largest) and abs(value) <= nothing
                if value == 0 or (little and not whole):
                    continue
                value = self.number(value)
                merged[value] = self.either(merged.get(value, FALSE), piece)
            for flag, _ in entries:
                p.pop((flag, mono), None)
            for value, flag in merged.items():
                p[flag, mono] = value
        return p

    def scale(self, p: Poly, k: float) -> Poly:
        """K * p."""
        if k == 1:
            return p
        return {t: self.number(c * k) for t, c in p.items()} if k != 0 else {}

    def monomial(self, factors: Iterable[tuple[int, Any]]) -> Monomial:
        """Sorted product of atoms with exponents."""
        exponents: dict[int, Any] = {}
        for a, e in factors:
            exponents[a] = exponents[a] + e if a in exponents else e
        for e in exponents.values():
            if e.__class__ is not int or not e:
                exponents = self._exponents(exponents)
                break
        if len(exponents) < 2:
            return tuple(exponents.items())
        return tuple(sorted(exponents.items()))

    def _exponents(self, given: Mapping[int, Any]) -> dict[int, Any]:
        """Exponents as integers or earlier numbers, without zeros."""
        out: dict[int, Any] = {}
        for a, e in given.items():
            if isinstance(e, float):
                e = self.number(e)
                e = int(e) if math.isfinite(e) and e == int(e) else e
                if isinstance(e, float) and abs(e) < 1e-9:
                    continue
            elif isinstance(e, Fraction) and e.denominator == 1:
                e = int(e)
            if e != 0:
                out[a] = e
        return out

    def mul(self, a: Poly, b: Poly) -> Poly:
        """A * b, expanded within the budget."""
        if not a or not b:
            return {}
        if len(b) == 1:
            ((flag, mono), c) = next(iter(b.items()))
            if flag == TRUE and not mono:
                return self.scale(a, c)
        if len(a) == 1:
            ((flag, mono), c) = next(iter(a.items()))
            if flag == TRUE and not mono:
                return self.scale(b, c)
        if len(a) * len(b) > TERM_BUDGET:
            raise OverBudget("a product of long sums")
        out: Poly = {}
        monos = set()
        for (fa, ma), ca in a.items():
            for (fb, mb), cb in b.items():
                flag = self.both(fa, fb)
                if flag == FALSE:
                    continue
                mono = self.monomial(ma + mb) if ma and mb else ma or mb
                if math.isinf(ca) or math.isinf(cb):
                    self._accumulate(
                        out, flag, mono, ca * cb if ca * cb == ca * cb else 0.0
                    )
                else:
                    self._accumulate(out, flag, mono, ca * cb)
                monos.add(mono)
        return self.partial_fractions(self._disjoint(out, monos))

    def freeze(self, p: Poly) -> tuple[Any, ...]:
        """Hashable canonical form."""
        return tuple(sorted(p.items(), key=term_order))

    @staticmethod
    def thaw(frozen: tuple[Any, ...]) -> Poly:
        """The polynomial of a frozen form."""
        return dict(frozen)

    def split_constant(self, p: Poly) -> tuple[float, Poly]:
        """(constant term, the rest)."""
        rest = dict(p)
        return rest.pop((TRUE, ()), 0.0), rest

    def as_constant(self, p: Poly) -> float | None:
        """The number p is, or None."""
        if not p:
            return 0.0
        if len(p) == 1 and (TRUE, ()) in p:
            return p[TRUE, ()]
        return None

    # --------------------------------------------------------------- powers
    def base_atom(self, p: Poly) -> tuple[float, int]:
        """(content, atom) of a sum of several terms; content times base is p."""
        frozen = self.freeze(p)
        sizes = [abs(c) for (f, m), c in frozen if m or len(frozen) == 1]
        if not sizes:
            raise OverBudget("a power of a choice among constants")
        content = max(sizes)
        if all(c < 0 for _, c in frozen):
            content = -content
        scaled = self.scale(p, 1.0 / content)
        return content, self.atom("pow", self.freeze(scaled))

    def positive(self, p: Poly) -> bool:
        """Whether p is proved to be >= 0 (> 0 for a strict factor) everywhere."""
        return bool(p) and all(
            c > 0 and all(self.positive_factor(a, e) for a, e in m)
            for (_, m), c in p.items()
        )

    def positive_factor(self, atom: int, exponent: Any) -> bool:
        """Whether atom ** exponent is proved to be >= 0."""
        kind = self.kind(atom)
        if kind in ("exp", "iota", "relu", "ind"):
            return True
        if isinstance(exponent, int) and exponent % 2 == 0:
            return True
        if isinstance(exponent, Fraction):  # a root that was taken already
            return exponent.denominator % 2 == 0 or exponent.numerator % 2 == 0
        if kind == "sum":
            _, _, _b, mono = self.defs[atom]
            return all(self.positive_factor(a, e) for a, e in mono)
        if kind == "pow":
            p = self.thaw(self.defs[atom][1])
            return self.positive(p) or self.defs[atom][1] in self.nonnegative
        if kind == "leaf":
            return atom in self.nonnegative
        return False

    def root_splits(self, atom: int, exponent: Any) -> bool:
        """Whether (atom ** exponent) ** e is atom ** (exponent * e) for every e."""
        if isinstance(exponent, Fraction) and exponent.denominator % 2 == 0:
            return True  # a root that exists already
        return self.positive_factor(atom, 1)

    def power(self, p: Poly, e: Any) -> Poly:
        """P ** e for a rational or float exponent."""
        if e == 1:
            return p
        if e == 0:
            return self.const(1.0)
        if not p:
            if e > 0:
                return {}
            raise OverBudget("zero to a negative power")
        if len(p) == 1:
            ((flag, mono), c) = next(iter(p.items()))
            if (
                e < 0
                and flag != TRUE
                and not any(self.kind(a) == "sum" for a, _ in mono)
            ):
                # 1 over what is chosen is infinite elsewhere, and not 0. Sums of
                # weights are taken to be positive.
                return self.of_atom(self.atom("pow", self.freeze(p)), e)
            if not isinstance(e, int):
                if c < 0:
                    raise OverBudget("fractional power of a negative value")
                if not all(self.root_splits(a, x) for a, x in mono):
                    return self.of_atom(self.atom("pow", self.freeze(p)), e)
            out = self.monomial((a, x * e) for a, x in mono)
            return self.partial_fractions({(flag, out): self.number(c ** float(e))})
        if isinstance(e, int) and e % 2 == 0:
            inside = self._absolute(p)
            if inside is not None:
                return self.power(inside, e)
        if isinstance(e, int) and 0 < e <= 4 and len(p) ** e <= TERM_BUDGET:
            out = p
            for _ in range(e - 1):
                out = self.mul(out, p)
            return out
        if all(not m for _, m in p):  # a choice among constants
            covered = FALSE
            for flag, _ in p:
                covered = self.either(covered, flag)
            if covered == TRUE and (isinstance(e, int) or self.positive(p)):
                return {t: self.number(c ** float(e)) for t, c in p.items()}
        common = self._common_factor(p)
        if common and (
            isinstance(e, int) or all(self.root_splits(a, x) for a, x in common)
        ):
            inverse = tuple((a, -x) for a, x in common)
            rest: Poly = {}
            for (flag, mono), c in p.items():
                self._accumulate(rest, flag, self.monomial(mono + inverse), c)
            outer = self.power({(TRUE, self.monomial(common)): 1.0}, e)
            return self.mul(outer, self.power(rest, e))
        content, atom = self.base_atom(p)
        if content < 0 and not isinstance(e, int):
            raise OverBudget("fractional power of a negative sum")
        return self.partial_fractions(
            {(TRUE, ((atom, e),)): self.number(content ** float(e))}
        )

    def _absolute(self, p: Poly) -> Poly | None:
        """X, of a form that is |x| = 2 max(x, 0) - x, or its negative; else None."""
        for (flag, mono), c in p.items():
            if flag != TRUE or len(mono) != 1 or mono[0][1] != 1:
                continue
            if self.kind(mono[0][0]) == "relu":
                x = self.scale(self.thaw(self.defs[mono[0][0]][1]), c / 2)
                rest = {t: v for t, v in p.items() if t != (flag, mono)}
                return None if self.add(rest, x) else x
        return None

    def _common_factor(self, p: Poly) -> tuple[tuple[int, Any], ...]:
        """Factors that all terms share, with their least exponents."""
        powers: dict[int, list[Any]] = {}
        for _, mono in p:
            for a, x in mono:
                powers.setdefault(a, []).append(x)
        common = []
        for a, xs in powers.items():
            least = min(xs) if len(xs) == len(p) else min(0, *xs)
            if least != 0 and (least < 0 or len(xs) == len(p)):
                common.append((a, least))
        return tuple(common)

    def partial_fractions(self, p: Poly) -> Poly:
        """With P = c*m + k*u, reduces u*P**-n: the spellings of a sigmoid meet.

        Here m is a number, or both m and u are products of exponentials with different
        outlines. With equal outlines, the choice of u would depend on atom numbers. A
        sum divided by itself and another one stays, as it may still cancel.
        """
        for (flag, mono), c in p.items():
            for atom, e in mono:
                if self.kind(atom) != "pow" or not isinstance(e, int) or e >= 0:
                    continue
                base = self.defs[atom][1]
                if len(base) != 2 or any(where != TRUE for (where, _), _ in base):
                    continue
                ((_, other), c0), ((_, lead), k) = base
                if not self._in_order(other, lead):
                    other, c0, lead, k = lead, k, other, c0
                    if not self._in_order(other, lead):
                        continue
                if not self._divides(lead, mono):
                    continue
                rest = {t: v for t, v in p.items() if t != (flag, mono)}
                inverse = tuple((a, -x) for a, x in lead)
                without = self.monomial((*mono, *inverse))
                lifted = self.monomial((*without, (atom, 1)))
                instead = self.monomial((*without, *other))
                extra = {(flag, lifted): self.number(c / k)}
                extra = self.add(extra, {(flag, instead): self.number(-c * c0 / k)})
                return self.partial_fractions(self.add(rest, extra))
        return p

    def _in_order(self, first: Monomial, second: Monomial) -> bool:
        """Whether one is a number, or both are exponentials, of different outlines."""
        if not first or not second:
            return not first
        if any(self.kind(a) != "exp" for a, _ in (*first, *second)):
            return False
        ranks = [
            sorted(self._outline(self.defs[a][1]) for a, _ in m)
            for m in (first, second)
        ]
        return ranks[0] < ranks[1]

    def _outline(self, mono: Monomial, depth: int = 3) -> tuple:
        """The kinds of a monomial's atoms, with exponents and contents.

        It does not depend on atom numbers, up to some depth.
        """
        return tuple(sorted(self._outline_of(a, x, depth) for a, x in mono))

    def _outline_of(self, atom: int, exponent: Any, depth: int) -> tuple:
        kind = self.kind(atom)
        inside: list[tuple] = []
        if depth and kind == "relu":
            form = self.thaw(self.defs[atom][1])
            inside = sorted(self._outline(m, depth - 1) for _, m in form)
        return kind, str(exponent), tuple(inside)

    def _divides(self, part: Monomial, mono: Monomial) -> bool:
        """Whether a monomial has all factors of another, with their signs."""
        present = dict(mono)
        return all(
            present.get(a, 0) * x > 0 and abs(present[a]) >= abs(x) for a, x in part
        )
