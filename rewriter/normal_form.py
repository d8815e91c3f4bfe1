"""Index polynomials: the algebra in which two spellings of a value become equal.

A value at given index arguments is a polynomial. A *term* is a boolean function
of literals times a monomial of atoms with rational exponents, with a number in
front. Equal polynomials over the same indices are equal at every real input at
which both are defined; the form may miss an equality, it never invents one.

Index arguments are integers (names of indices), ``("k", c)`` (the constant c),
or affine and digit forms of them::

    ("cat", a, b, n)  a * n + b      ("div", a, n)  a // n
    ("aff", a, m, c)  m * a + c      ("mod", a, n)  a % n

None stands for the only position of an axis of size one.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any

Index = Any
Monomial = tuple[tuple[int, Any], ...]
Poly = dict[tuple[int, Monomial], float]

TRUE, FALSE = 0, 1
TERM_BUDGET = 128
LITERAL_BUDGET = 9
SNAP = 1e-6
ODD = ("erf", "sin")


class OverBudget(Exception):
    """The form would grow beyond its budget, or a rule does not apply."""


class TooMuchWork(OverBudget):
    """One region took more steps than it may."""


WORK_BUDGET = 8000


class Algebra:
    """Interned atoms, boolean functions and indices of one analysis."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._next_index = itertools.count(1)
        self._bound: dict[tuple[int, int, int], int] = {}
        self._atoms: dict[Any, int] = {}
        self.defs: list[tuple[Any, ...]] = []
        self._free: list[frozenset[int]] = []
        self._level: list[int] = []
        self._bools: dict[tuple[tuple[int, ...], int], int] = {((), 1): 0, ((), 0): 1}
        self.bools: list[tuple[tuple[int, ...], int]] = [((), 1), ((), 0)]
        self._numbers: list[float] = []
        self._subst_memo: dict[Any, Any] = {}
        self.nonnegative: set[Any] = set()
        self.work = 0
        self._leaves: dict[int, frozenset[int]] = {}
        self._digit_args: dict[int, frozenset[Index]] = {}

    # --------------------------------------------------------------- numbers
    def number(self, c: float) -> float:
        """The canonical float close to c: an integer, or one met before."""
        if c == 0 or not math.isfinite(c):
            return c
        nearest = float(round(c))
        if c == nearest:
            return nearest
        if nearest and abs(c - nearest) <= SNAP * abs(c):
            return nearest
        at = bisect.bisect_left(self._numbers, c)
        for k in (at - 1, at):
            if 0 <= k < len(self._numbers):
                known = self._numbers[k]
                if abs(known - c) <= SNAP * abs(c):
                    return known
        self._numbers.insert(at, c)
        return c

    # --------------------------------------------------------------- indices
    def new_index(self, size: int) -> Index:
        """A new index of the given size; None for size one."""
        if size == 1:
            return None
        i = next(self._next_index)
        self.sizes[i] = size
        return i

    def bound_index(self, level: int, slot: int, size: int) -> int:
        """The canonical name of a bound index."""
        key = (level, slot, size)
        if key not in self._bound:
            self._bound[key] = -len(self._bound) - 1
            self.sizes[self._bound[key]] = size
        return self._bound[key]

    def index_range(self, a: Index) -> tuple[int, int]:
        """Least and greatest value of an index argument."""
        if a is None:
            return 0, 0
        if isinstance(a, int):
            return 0, self.sizes[a] - 1
        if a[0] == "k":
            return a[1], a[1]
        lo, hi = self.index_range(a[1])
        if a[0] == "aff":
            ends = (a[2] * lo + a[3], a[2] * hi + a[3])
            return min(ends), max(ends)
        if a[0] == "cat":
            lo2, hi2 = self.index_range(a[2])
            return lo * a[3] + lo2, hi * a[3] + hi2
        if a[0] == "div":
            return lo // a[2], hi // a[2]
        return (lo % a[2], hi % a[2]) if lo // a[2] == hi // a[2] else (0, a[2] - 1)

    def cat(self, a: Index, b: Index, n: int) -> Index:
        """A * n + b, where b is below n."""
        if n == 1:
            return a
        if a is None:
            return b
        if b is None:
            return self.affine(a, n, 0)
        if a[0] == "k" if isinstance(a, tuple) else False:
            return self.affine(b, 1, a[1] * n)
        if isinstance(a, tuple) and isinstance(b, tuple):
            if a[0] == "div" and b[0] == "mod" and a[1] == b[1] and a[2] == n == b[2]:
                return a[1]
            if (
                a[0] == "mod"
                and b[0] == "mod"
                and isinstance(a[1], tuple)
                and a[1][0] == "div"
                and a[1][1] == b[1]
                and a[1][2] == n == b[2]
            ):
                return self.mod(b[1], a[2] * n)
        if isinstance(b, tuple) and b[0] == "cat":  # a*n + (b1*m + b2)
            return self.cat(self.cat(a, b[1], n // b[3]), b[2], b[3])
        return ("cat", a, b, n)

    def affine(self, a: Index, m: int, c: int) -> Index:
        """M * a + c."""
        if a is None:
            return ("k", c) if c else None
        if isinstance(a, tuple) and a[0] == "k":
            return ("k", m * a[1] + c)
        if isinstance(a, tuple) and a[0] == "aff":
            return self.affine(a[1], m * a[2], m * a[3] + c)
        return a if (m, c) == (1, 0) else ("aff", a, m, c)

    def div(self, a: Index, n: int) -> Index:
        """A // n."""
        lo, hi = self.index_range(a)
        if lo // n == hi // n:
            return ("k", lo // n) if lo // n else None
        if n == 1:
            return a
        if isinstance(a, tuple):
            if a[0] == "cat":
                if a[3] == n:
                    return a[1]
                if a[3] % n == 0:
                    return self.cat(a[1], self.div(a[2], n), a[3] // n)
                if n % a[3] == 0:
                    return self.div(a[1], n // a[3])
            if a[0] == "aff" and a[2] % n == 0 and a[3] >= 0:
                return self.affine(a[1], a[2] // n, a[3] // n)
            if a[0] == "aff" and a[2] == 1 and a[3] % n == 0:
                return self.affine(self.div(a[1], n), 1, a[3] // n)
            if a[0] == "div":
                return self.div(a[1], a[2] * n)
        return ("div", a, n)

    def mod(self, a: Index, n: int) -> Index:
        """A % n."""
        lo, hi = self.index_range(a)
        if n == 1:
            return None
        if lo // n == hi // n:
            return self.affine(a, 1, -(lo // n) * n)
        if isinstance(a, tuple):
            if a[0] == "cat":
                if a[3] == n:
                    return a[2]
                if a[3] % n == 0:
                    return self.mod(a[2], n)
                if n % a[3] == 0:
                    return self.cat(self.mod(a[1], n // a[3]), a[2], a[3])
            if a[0] == "aff" and a[2] % n == 0:
                return ("k", a[3] % n) if a[3] % n else None
            if a[0] == "aff" and a[2] == 1 and a[3] % n == 0:
                return self.mod(a[1], n)
            if a[0] == "mod" and a[2] % n == 0:
                return self.mod(a[1], n)
        return ("mod", a, n)

    def index_ids(self, a: Index) -> frozenset[int]:
        """Indices named in an index argument."""
        if a is None:
            return frozenset()
        if isinstance(a, int):
            return frozenset((a,))
        if a[0] == "k":
            return frozenset()
        if a[0] == "cat":
            return self.index_ids(a[1]) | self.index_ids(a[2])
        return self.index_ids(a[1])

    def subst_index(self, a: Index, to: Mapping[int, Index]) -> Index:
        """The argument with indices replaced."""
        if a is None:
            return None
        if isinstance(a, int):
            return to.get(a, a)
        if a[0] == "k":
            return a
        if a[0] == "cat":
            return self.cat(
                self.subst_index(a[1], to), self.subst_index(a[2], to), a[3]
            )
        if a[0] == "aff":
            return self.affine(self.subst_index(a[1], to), a[2], a[3])
        make = self.div if a[0] == "div" else self.mod
        return make(self.subst_index(a[1], to), a[2])

    # --------------------------------------------------------------- atoms
    def atom(self, *definition: Any) -> int:
        """Interned atom; the definition is its kind and its hashable content."""
        found = self._atoms.get(definition)
        if found is not None:
            return found
        number = self._atoms[definition] = len(self.defs)
        self.defs.append(definition)
        free, level = self._describe(definition)
        self._free.append(free)
        self._level.append(level)
        return number

    def kind(self, atom: int) -> str:
        """Kind of an atom."""
        return self.defs[atom][0]

    def _describe(self, definition: tuple[Any, ...]) -> tuple[frozenset[int], int]:
        kind = definition[0]
        if kind == "leaf":
            ids = frozenset().union(*map(self.index_ids, definition[2]))
            return ids, self._bound_level(ids)
        if kind == "iota":
            ids = self.index_ids(definition[1])
            return ids, self._bound_level(ids)
        if kind in ("sum", "any"):
            bound, inner, mono = definition[1], definition[2], definition[3]
            ids = self.term_ids(inner, mono)
            level = max(
                [self._level[a] for a, _ in mono]
                + [self._level[a] for a in self.bools[inner][0]]
                + [self._bound_level(bound)]
            )
            return ids - frozenset(bound), level
        if kind == "exp":
            mono = definition[1]
            return (
                self.term_ids(TRUE, mono),
                max((self._level[a] for a, _ in mono), default=0),
            )
        if kind == "ind":
            lits = self.bools[definition[1]][0]
            ids = frozenset().union(*(self._free[a] for a in lits))
            return ids, max((self._level[a] for a in lits), default=0)
        polys = [p for p in definition[1:] if isinstance(p, tuple) and _is_frozen(p)]
        ids, level = frozenset(), 0
        for p in polys:
            for (b, mono), _ in p:
                ids |= self.term_ids(b, mono)
                level = max([level, *(self._level[a] for a, _ in mono)])
                level = max([level, *(self._level[a] for a in self.bools[b][0])])
        return ids, level

    def _bound_level(self, ids: Iterable[int]) -> int:
        negative = [i for i in ids if i < 0]
        if not negative:
            return 0
        names = {v: k[0] for k, v in self._bound.items()}
        return max(names[i] for i in negative)

    def free(self, atom: int) -> frozenset[int]:
        """Indices free in an atom."""
        return self._free[atom]

    def term_ids(self, b: int, mono: Monomial) -> frozenset[int]:
        """Indices free in a term."""
        out = frozenset().union(*(self._free[a] for a, _ in mono))
        if b > 1:
            out = out.union(*(self._free[a] for a in self.bools[b][0]))
        return out

    def ids(self, p: Poly) -> frozenset[int]:
        """Indices free in a polynomial."""
        return frozenset().union(*(self.term_ids(b, m) for b, m in p))

    # --------------------------------------------------------------- booleans
    def _bool(self, support: tuple[int, ...], table: int) -> int:
        if len(support) > 1 and len(support) <= LITERAL_BUDGET + 2:
            support, table = self._without_implied(support, table)
        for k in reversed(range(len(support))):  # drop literals without effect
            low, high = _cofactors(table, k, len(support))
            if low == high:
                support, table = support[:k] + support[k + 1 :], low
        if len(support) > LITERAL_BUDGET:
            raise OverBudget("too many predicates in one mask")
        key = (support, table)
        if key not in self._bools:
            self._bools[key] = len(self.bools)
            self.bools.append(key)
        return self._bools[key]

    def _without_implied(
        self, support: tuple[int, ...], table: int
    ) -> tuple[tuple[int, ...], int]:
        """Drops literals that others decide: x >= 3 makes x >= 1 true."""
        while True:
            never = self._impossible(support)
            if not never:
                return support, table
            table &= ~never
            for k in reversed(range(len(support))):
                low, high = _cofactors(table, k, len(support))
                no_low, no_high = _cofactors(never, k, len(support))
                if not (low ^ high) & ~no_low & ~no_high:
                    support = support[:k] + support[k + 1 :]
                    table = low & ~no_low | high & ~no_high
                    break
            else:
                return support, table

    def _impossible(self, support: tuple[int, ...]) -> int:
        """Rows of a truth table that no assignment of values reaches."""
        groups: dict[Any, list[tuple[float, int]]] = {}
        for k, a in enumerate(support):
            d = self.defs[a]
            if d[0] == "ge":
                rest = tuple(t for t in d[1] if t[0] != (TRUE, ()))
                c = next((c for t, c in d[1] if t == (TRUE, ())), 0.0)
                groups.setdefault(rest, []).append((c, k))
        pairs = []
        for members in groups.values():
            members.sort()  # a smaller constant is the stronger claim
            pairs += [(a, b) for (_, a), (_, b) in itertools.combinations(members, 2)]
        out = 0
        for row in range(1 << len(support)) if pairs else ():
            if any(row >> a & 1 and not row >> b & 1 for a, b in pairs):
                out |= 1 << row
        return out

    def literal(self, atom: int) -> int:
        """The boolean function that is one literal."""
        return self._bool((atom,), 0b10)

    def _aligned(self, a: int, b: int) -> tuple[tuple[int, ...], int, int]:
        (sa, ta), (sb, tb) = self.bools[a], self.bools[b]
        support = tuple(sorted({*sa, *sb}))
        if len(support) > LITERAL_BUDGET:
            raise OverBudget("too many predicates in one mask")
        return support, _expand(sa, ta, support), _expand(sb, tb, support)

    def both(self, a: int, b: int) -> int:
        """A and b."""
        if a in (TRUE, b) or b == FALSE:
            return b
        if b == TRUE or a == FALSE:
            return a
        support, ta, tb = self._aligned(a, b)
        return self._bool(support, ta & tb)

    def either(self, a: int, b: int) -> int:
        """A or b."""
        if a in (FALSE, b) or b == TRUE:
            return b
        if b == FALSE or a == TRUE:
            return a
        support, ta, tb = self._aligned(a, b)
        return self._bool(support, ta | tb)

    def negate(self, a: int) -> int:
        """Not a."""
        if a <= 1:
            return 1 - a
        support, table = self.bools[a]
        return self._bool(support, table ^ ((1 << (1 << len(support))) - 1))

    def implies(self, a: int, b: int) -> bool:
        """Whether a entails b for every assignment of the literals."""
        return self.both(a, self.negate(b)) == FALSE

    def conjuncts(self, b: int, groups: Callable[[int], Any]) -> list[tuple[Any, int]]:
        """Splits b into a conjunction by groups of literals, as far as it goes.

        Returns (group, part) pairs whose conjunction is b; the group of a part
        that mixes literals of several groups is None.
        """
        support, _ = self.bools[b]
        names = list(dict.fromkeys(groups(a) for a in support))
        parts = []
        for name in names:
            mine = [a for a in support if groups(a) == name]
            parts.append((name, self.project(b, mine)))
        product = TRUE
        for _, part in parts:
            product = self.both(product, part)
        return parts if product == b else [(None, b)]

    def project(self, b: int, keep: Iterable[int]) -> int:
        """There is an assignment of the other literals that makes b true."""
        keep = set(keep)
        for a in self.bools[b][0]:
            if a not in keep and a in self.bools[b][0]:
                support, table = self.bools[b]
                low, high = _cofactors(table, support.index(a), len(support))
                rest = tuple(x for x in support if x != a)
                b = self._bool(rest, low | high)
        return b

    # --------------------------------------------------------------- polynomials
    def const(self, c: float) -> Poly:
        """A constant."""
        return {(TRUE, ()): self.number(float(c))} if c != 0 else {}

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

    def _accumulate(self, out: Poly, flag: int, mono: Monomial, c: float) -> None:
        self.work += 1
        if self.work > WORK_BUDGET:
            raise TooMuchWork("the region takes too many steps")
        old = out.get((flag, mono), 0.0)
        new = old + c
        if old and math.isfinite(new) and abs(new) <= 2e-6 * abs(old):
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
        wanted = set(candidates)
        if all(flag == TRUE for flag, m in p):
            return p
        for (flag, mono), c in p.items():
            if mono in wanted:
                by_mono.setdefault(mono, []).append((flag, c))
        for mono, entries in by_mono.items():
            if len(entries) < 2:
                continue
            pieces: list[tuple[int, float]] = [(TRUE, 0.0)]
            for flag, c in entries:
                split = []
                for piece, value in pieces:
                    inside = self.both(piece, flag)
                    outside = self.both(piece, self.negate(flag))
                    if inside != FALSE:
                        split.append((inside, value + c))
                    if outside != FALSE:
                        split.append((outside, value))
                pieces = split
            merged: dict[float, int] = {}
            largest = (
                max(abs(c) for _, c in entries if math.isfinite(c))
                if any(math.isfinite(c) for _, c in entries)
                else 1.0
            )
            for piece, value in pieces:
                if abs(value) <= 2e-6 * largest:
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
            exponents[a] = exponents.get(a, 0) + e
        out = []
        for a, e in exponents.items():
            if isinstance(e, float):
                e = self.number(e)
                e = int(e) if math.isfinite(e) and e == int(e) else e
                if isinstance(e, float) and abs(e) < 1e-9:
                    continue
            elif isinstance(e, Fraction) and e.denominator == 1:
                e = int(e)
            if e != 0:
                out.append((a, e))
        out.sort(key=lambda f: f[0])
        return tuple(out)

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
        return tuple(sorted(p.items(), key=_term_order))

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
        content = max(abs(c) for (f, m), c in frozen if m or len(frozen) == 1)
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
            if not isinstance(e, int):
                if c < 0:
                    raise OverBudget("fractional power of a negative value")
                if not all(self.root_splits(a, x) for a, x in mono):
                    return self.of_atom(self.atom("pow", self.freeze(p)), e)
            out = self.monomial((a, x * e) for a, x in mono)
            return self.partial_fractions({(flag, out): self.number(c ** float(e))})
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
        """With P = c0 + k*u, reduces u*P**-n: the spellings of a sigmoid meet."""
        for (flag, mono), c in p.items():
            for atom, e in mono:
                if self.kind(atom) != "pow" or not isinstance(e, int) or e >= 0:
                    continue
                base = self.defs[atom][1]
                if len(base) != 2 or (
                    base[0][0] != (TRUE, ()) and base[1][0] != (TRUE, ())
                ):
                    continue
                split = dict(base)
                c0 = split.pop((TRUE, ()))
                (((bu, mu), k),) = split.items()
                if bu != TRUE:
                    continue
                present = dict(mono)
                rest = {t: v for t, v in p.items() if t != (flag, mono)}
                if all(
                    present.get(a, 0) * x > 0 and abs(present[a]) >= abs(x)
                    for a, x in mu
                ):
                    without = self.monomial(mono + tuple((a, -x) for a, x in mu))
                    lifted = self.monomial((*without, (atom, 1)))
                    extra = {(flag, lifted): self.number(c / k)}
                    extra = self.add(extra, {(flag, without): -c * c0 / k})
                    return self.partial_fractions(self.add(rest, extra))
        return p

    # --------------------------------------------------------------- exp, log
    def exp(self, p: Poly, fill: Callable[[float], None] = lambda c: None) -> Poly:
        """The exponential: a product over terms, boolean terms taken apart."""
        out = self.const(1.0)
        for (flag, mono), c in p.items():
            factor = self._exp_term(mono, c, fill)
            if flag != TRUE:
                factor = self.add(
                    {(self.both(flag, b), m): v for (b, m), v in factor.items()},
                    self.of_bool(self.negate(flag)),
                )
            out = self.mul(out, factor)
        return out

    def _exp_term(
        self, mono: Monomial, c: float, fill: Callable[[float], None]
    ) -> Poly:
        if not mono:
            if c <= -80:
                fill(c)
                return {}
            if c > 700:
                raise OverBudget("exp of a large constant")
            return self.const(math.exp(c))
        if math.isinf(c):
            raise OverBudget("infinity times a value")
        if len(mono) == 1 and mono[0][1] == 1 and self.kind(mono[0][0]) == "log":
            return self.power(self.thaw(self.defs[mono[0][0]][1]), _exact(c))
        return {(TRUE, ((self.atom("exp", mono), _exact(c)),)): 1.0}

    def log(self, p: Poly) -> Poly:
        """The logarithm; logs of factors proved positive split."""
        if len(p) == 1:
            ((flag, mono), c) = next(iter(p.items()))
            if flag == TRUE and c > 0:
                exps = [(a, e) for a, e in mono if self.kind(a) == "exp"]
                rest = tuple((a, e) for a, e in mono if self.kind(a) != "exp")
                out = self.const(math.log(c))
                for a, e in exps:
                    out = self.add(out, {(TRUE, self.defs[a][1]): float(e)})
                if not rest:
                    return out
                if len(rest) == 1 and rest[0][1] == 1:
                    inner = {(TRUE, rest): 1.0}
                    atom = self.atom("log", self.freeze(inner))
                    return self.add(out, self.of_atom(atom))
                if not exps and c == 1.0:
                    return self.of_atom(self.atom("log", self.freeze(p)))
                inner = {(TRUE, rest): 1.0}
                atom = self.atom("log", self.freeze(inner))
                return self.add(out, self.of_atom(atom))
        common = self._common_factor(p)
        if common and all(self.kind(a) == "exp" for a, _ in common):
            inverse = tuple((a, -x) for a, x in common)
            rest_p: Poly = {}
            for (flag, mono), c in p.items():
                self._accumulate(rest_p, flag, self.monomial(mono + inverse), c)
            outer = self.log({(TRUE, self.monomial(common)): 1.0})
            return self.add(outer, self.log(rest_p))
        return self.of_atom(self.atom("log", self.freeze(p)))

    # --------------------------------------------------------------- max, odd functions
    def by_cases(self, p: Poly, f: Callable[[Poly], Poly]) -> Poly | None:
        """f(p) taken apart where p has masked terms; None if it has none."""
        flags = {flag for flag, _ in p if flag != TRUE}
        if not flags:
            return None
        cells = [TRUE]
        for flag in flags:
            halves = ((c, side) for c in cells for side in (flag, self.negate(flag)))
            cells = [x for c, side in halves if (x := self.both(c, side)) != FALSE]
            if len(cells) > 16:
                raise OverBudget("too many cases")
        out: Poly = {}
        for cell in cells:
            here: Poly = {}
            for (flag, mono), c in p.items():
                if self.implies(cell, flag):
                    self._accumulate(here, TRUE, mono, c)
            for (flag, mono), c in f(here).items():
                out = self.add(out, {(self.both(flag, cell), mono): c})
        return out

    def relu(self, p: Poly) -> Poly:
        """max(p, 0); max(-p, 0) is max(p, 0) - p."""
        cases = self.by_cases(p, self.relu)
        if cases is not None:
            return cases
        c = self.as_constant(p)
        if c is not None:
            return self.const(max(c, 0.0))
        if self.positive(p) or self.is_variance(p):
            return p
        minus = self.scale(p, -1.0)
        if self.positive(minus) or self.is_variance(minus):
            return {}
        frozen = self.freeze(p)
        lead = next((c for (_, m), c in frozen if m), frozen[0][1])
        k = max(abs(c) for (_, m), c in frozen if m)
        if lead < 0:
            atom = self.atom("relu", self.freeze(self.scale(minus, 1.0 / k)))
            return self.add(self.scale(self.of_atom(atom), k), p)
        atom = self.atom("relu", self.freeze(self.scale(p, 1.0 / k)))
        return self.scale(self.of_atom(atom), k)

    def is_variance(self, p: Poly) -> bool:
        """C sum(x^2) - d sum(x)^2, d <= c / N: not negative (Cauchy and Schwarz)."""
        if len(p) != 2:
            return False
        (((f1, m1), c1), ((f2, m2), c2)) = sorted(p.items(), key=lambda t: -t[1])
        if c1 <= 0 or c2 >= 0 or f1 != TRUE or f2 != TRUE:
            return False
        if len(m1) != 1 or len(m2) != 1:
            return False
        (a1, e1), (a2, e2) = m1[0], m2[0]
        if e1 != 1 or e2 != 2 or self.kind(a1) != "sum" or self.kind(a2) != "sum":
            return False
        _, n1, b1, body1 = self.defs[a1]
        _, n2, b2, body2 = self.defs[a2]
        squared = self.monomial((a, 2 * e) for a, e in body2)
        if n1 != n2 or b1 != b2 or squared != body1:
            return False
        count = math.prod(self.sizes[n] for n in n1)
        return -c2 <= c1 / count * (1 + 1e-4)

    def odd(self, name: str, p: Poly) -> Poly:
        """f(p) for an odd function f: the sign is taken out."""
        if not p:
            return {}
        cases = self.by_cases(p, lambda q: self.odd(name, q))
        if cases is not None:
            return cases
        frozen = self.freeze(p)
        sign = -1.0 if frozen[0][1] < 0 else 1.0
        atom = self.atom("fn", name, self.freeze(self.scale(p, sign)))
        return self.scale(self.of_atom(atom), sign)

    # --------------------------------------------------------------- sums
    def sum_over(self, p: Poly, indices: Iterable[Index]) -> Poly:
        """Sum over indices: distributed, independent factors taken out."""
        bound = frozenset(i for i in indices if i is not None)
        if not bound:
            return p
        out: Poly = {}
        for (flag, mono), c in p.items():
            out = self.add(out, self._sum_term(flag, mono, c, bound))
        return self.partial_fractions(out)

    def _sum_term(
        self, flag: int, mono: Monomial, c: float, bound: frozenset[int]
    ) -> Poly:
        for a, e in mono:  # flatten a sum inside the sum
            if e == 1 and self.kind(a) == "sum" and self._free[a] & bound:
                inner_bound, inner_flag, inner_mono = self.open_sum(a)
                rest = tuple(f for f in mono if f[0] != a)
                return self._sum_term(
                    self.both(flag, inner_flag),
                    self.monomial(rest + inner_mono),
                    c,
                    bound | frozenset(inner_bound),
                )
        flag, mono, bound = self._digits(flag, mono, bound)
        used = self.term_ids(flag, mono)
        for j in bound - used:
            c *= self.sizes[j]
        bound &= used
        if not bound:
            return {(flag, mono): self.number(c)}
        result, components, outer_flag = self._components(flag, mono, bound)
        for ids, factors, inner_flag in components:
            result.append((self._sum_atom(sorted(ids), inner_flag, factors), 1))
        return {(outer_flag, self.monomial(result)): self.number(c)}

    def _components(self, flag: int, mono: Monomial, bound: frozenset[int]):
        """Independent factors, and groups of factors that share bound indices."""
        outside = [f for f in mono if not self._free[f[0]] & bound]
        parts: list[tuple[frozenset[int], list[tuple[int, Any]]]] = []
        literals = self.bools[flag][0]

        def join(ids: frozenset[int], factors: list[tuple[int, Any]]) -> None:
            nonlocal parts
            touching = [g for g in parts if g[0] & ids]
            merged = ids.union(*(g[0] for g in touching))
            together = [f for g in touching for f in g[1]] + factors
            parts = [g for g in parts if not g[0] & ids] + [(merged, together)]

        for f in mono:
            ids = self._free[f[0]] & bound
            if ids:
                join(ids, [f])
        inside = [a for a in literals if self._free[a] & bound]
        outer_flag, inner = flag, []
        if inside:
            names = {a: self._free[a] & bound for a in inside}
            pieces = self.conjuncts(flag, lambda a: names.get(a, frozenset()))
            if len(pieces) == 1 and pieces[0][0] is None:
                pieces = self.conjuncts(flag, lambda a: bool(names.get(a)))
                pieces = (
                    [
                        (frozenset().union(*names.values()) if g else frozenset(), p)
                        for g, p in pieces
                    ]
                    if pieces[0][0] is not None
                    else [(frozenset().union(*names.values()), flag)]
                )
            outer_flag = TRUE
            for ids, part in pieces:
                if ids:
                    join(ids, [])
                    inner.append((ids, part))
                else:
                    outer_flag = self.both(outer_flag, part)
        out = []
        for ids, factors in parts:
            mine = TRUE
            for where, part in inner:
                if where & ids:
                    mine = self.both(mine, part)
            out.append((ids, self.monomial(factors), mine))
        return outside, out, outer_flag

    def _digits(self, flag: int, mono: Monomial, bound: frozenset[int]):
        """Splits a bound index that is read by digits; joins two read as one."""
        splits: dict[int, set[int]] = {}
        for a, _ in mono:
            self._find_digits(a, bound, splits)
        for a in self.bools[flag][0]:
            self._find_digits(a, bound, splits)
        for j, factors in splits.items():
            n = min(factors)
            if self.sizes[j] % n:
                continue
            high, low = self.new_index(self.sizes[j] // n), self.new_index(n)
            to = {j: self.cat(high, low, n)}
            flag = self.subst_bool(flag, to)
            mono = self.subst_mono(mono, to)
            bound = (bound - {j}) | {i for i in (high, low) if i is not None}
            return self._digits(flag, mono, bound)
        return flag, mono, bound

    def _find_digits(
        self, atom: int, bound: frozenset[int], found: dict[int, set[int]]
    ) -> None:
        if not self._free[atom] & bound:
            return
        for a in self._index_arguments(atom):
            while isinstance(a, tuple):
                if a[0] in ("div", "mod") and isinstance(a[1], int) and a[1] in bound:
                    found.setdefault(a[1], set()).add(a[2])
                if a[0] == "cat":
                    b = a[2]
                    if (
                        isinstance(b, tuple)
                        and b[0] in ("div", "mod")
                        and b[1] in bound
                    ):
                        found.setdefault(b[1], set()).add(b[2])
                a = a[1] if a[0] != "k" else None

    def _index_arguments(self, atom: int) -> frozenset[Index]:
        """Composite index arguments of leaves at any depth."""
        known = self._digit_args.get(atom)
        if known is None:
            definition = self.defs[atom]
            if definition[0] == "leaf":
                known = frozenset(a for a in definition[2] if isinstance(a, tuple))
            elif definition[0] == "iota":
                known = frozenset()
            else:
                known = frozenset().union(
                    *map(self._index_arguments, self.children(atom))
                )
            self._digit_args[atom] = known
        return known

    def children(self, atom: int) -> Iterable[int]:
        """Atoms directly inside an atom."""
        definition = self.defs[atom]
        kind = definition[0]
        if kind in ("leaf", "iota"):
            return
        if kind in ("sum", "any"):
            yield from (a for a, _ in definition[3])
            yield from self.bools[definition[2]][0]
        elif kind == "exp":
            yield from (a for a, _ in definition[1])
        elif kind == "ind":
            yield from self.bools[definition[1]][0]
        else:
            for part in definition[1:]:
                if isinstance(part, tuple) and _is_frozen(part):
                    for (b, mono), _ in part:
                        yield from (a for a, _ in mono)
                        yield from self.bools[b][0]

    def leaves(self, atom: int) -> frozenset[int]:
        """Leaf atoms at any depth."""
        known = self._leaves.get(atom)
        if known is None:
            if self.kind(atom) == "leaf":
                known = frozenset((atom,))
            else:
                known = frozenset().union(*map(self.leaves, self.children(atom)))
            self._leaves[atom] = known
        return known

    def poly_leaves(self, p: Poly) -> set[int]:
        """Leaf atoms of a polynomial at any depth."""
        out: set[int] = set()
        for b, m in p:
            for a in (*(a for a, _ in m), *self.bools[b][0]):
                out |= self.leaves(a)
        return out

    def _sum_atom(
        self, bound: list[int], flag: int, mono: Monomial, kind: str = "sum"
    ) -> int:
        level = 1 + max(
            [self._level[a] for a, _ in mono]
            + [self._level[a] for a in self.bools[flag][0]],
            default=0,
        )
        orders = [tuple(bound)] if len(bound) == 1 else self._orders(bound, flag, mono)
        best = None
        for order in orders:
            names = [
                self.bound_index(level, k, self.sizes[j]) for k, j in enumerate(order)
            ]
            to = dict(zip(order, names, strict=True))
            new_flag = self.subst_bool(flag, to)
            new_mono = self.subst_mono(mono, to)
            key = (self.bools[new_flag], repr(new_mono))
            if best is None or key < best[0]:
                best = (key, tuple(names), new_flag, new_mono)
        _, names, new_flag, new_mono = best
        return self.atom(kind, names, new_flag, new_mono)

    def _orders(self, bound: list[int], flag: int, mono: Monomial):
        """Orders of the bound indices worth trying, by where each occurs."""
        colors = {}
        for j in bound:
            seen = [self.sizes[j]]
            for a, e in mono:
                if j in self._free[a]:
                    seen.append((self._shape(a, j), str(e)))
            for a in self.bools[flag][0]:
                if j in self._free[a]:
                    seen.append((self._shape(a, j), "bool"))
            colors[j] = repr((seen[0], sorted(map(repr, seen[1:]))))
        ranked = sorted(bound, key=lambda j: colors[j])
        groups = [
            list(g) for _, g in itertools.groupby(ranked, key=lambda j: colors[j])
        ]
        choices = [
            list(itertools.permutations(g)) if len(g) <= 4 else [tuple(g)]
            for g in groups
        ]
        for combination in itertools.islice(itertools.product(*choices), 48):
            yield tuple(j for group in combination for j in group)

    def _shape(self, atom: int, j: int) -> Any:
        """How an index occurs in an atom, without names of indices."""
        definition = self.defs[atom]
        if definition[0] == "leaf":
            marks = [
                (k, "at" if a == j else repr(type(a)))
                for k, a in enumerate(definition[2])
                if j in self.index_ids(a)
            ]
            return ("leaf", definition[1], marks)
        if definition[0] == "iota":
            return ("iota",)
        inner = [
            repr(self._shape(a, j)) for a in self.children(atom) if j in self._free[a]
        ]
        return (definition[0], sorted(inner))

    def open_sum(self, atom: int) -> tuple[list[int], int, Monomial]:
        """(new bound indices, boolean factor, monomial) of a sum's body."""
        _, names, flag, mono = self.defs[atom]
        fresh = {n: self.new_index(self.sizes[n]) for n in names}
        return (
            list(fresh.values()),
            self.subst_bool(flag, fresh),
            self.subst_mono(mono, fresh),
        )

    def any_over(self, b: int, indices: Iterable[Index]) -> int:
        """There is a position of the indices at which b holds."""
        bound = frozenset(i for i in indices if i is not None)
        if b <= 1:
            return b
        support = self.bools[b][0]
        inside = {a for a in support if self._free[a] & bound}
        if not inside:
            return b
        parts = self.conjuncts(b, lambda a: a in inside)
        if len(parts) == 1 and parts[0][0] is None:
            parts = [(True, b)]
        out = TRUE
        for group, part in parts:
            if group:
                used = sorted(bound & self.term_ids(part, ()))
                part = self.literal(self._sum_atom(used, part, (), kind="any"))
            out = self.both(out, part)
        return out

    # --------------------------------------------------------------- substitution
    def subst(self, p: Poly, to: Mapping[int, Index]) -> Poly:
        """The polynomial with indices replaced by index arguments."""
        out: Poly = {}
        for (flag, mono), c in p.items():
            new = self.subst_mono(mono, to)
            out = self.add(out, self._expanded(self.subst_bool(flag, to), new, c))
        return out

    def _expanded(self, flag: int, mono: Monomial, c: float) -> Poly:
        """A term with atoms that became sums multiplied out."""
        plain = tuple(f for f in mono if self.kind(f[0]) != "val")
        out: Poly = {(flag, plain): c}
        for a, e in mono:
            if self.kind(a) == "val":
                out = self.mul(out, self.power(self.thaw(self.defs[a][1]), e))
        return out

    def subst_mono(self, mono: Monomial, to: Mapping[int, Index]) -> Monomial:
        """A monomial with indices replaced."""
        keys = to.keys()
        if not any(self._free[a] & keys for a, _ in mono):
            return mono
        return self.monomial((self.subst_atom(a, to), e) for a, e in mono)

    def subst_bool(self, b: int, to: Mapping[int, Index]) -> int:
        """A boolean function with indices replaced."""
        support, table = self.bools[b]
        keys = to.keys()
        if not any(self._free[a] & keys for a in support):
            return b
        out = FALSE
        literals = [self.subst_literal(a, to) for a in support]
        for row in range(1 << len(support)):
            if table >> row & 1:
                term = TRUE
                for k, lit in enumerate(literals):
                    term = self.both(term, lit if row >> k & 1 else self.negate(lit))
                out = self.either(out, term)
        return out

    def subst_literal(self, atom: int, to: Mapping[int, Index]) -> int:
        """A literal with indices replaced, as a boolean function."""
        definition = self.defs[atom]
        if definition[0] in ("ge", "eq"):
            if not self._free[atom] & to.keys():
                return self.literal(atom)
            body = self.subst(self.thaw(definition[1]), to)
            integral = definition[2]
            return self.compare(definition[0], body, integral)
        if definition[0] == "any":
            fresh, flag, _ = self.open_sum(atom)
            return self.any_over(self.subst_bool(flag, to), fresh)
        return self.literal(self.subst_atom(atom, to))

    def subst_atom(self, atom: int, to: Mapping[int, Index]) -> int:
        """An atom with indices replaced."""
        if not self._free[atom] & to.keys():
            return atom
        key = (
            atom,
            tuple(sorted((k, v) for k, v in to.items() if k in self._free[atom]))
            if all(isinstance(v, int) for v in to.values())
            else None,
        )
        if key[1] is not None and key in self._subst_memo:
            return self._subst_memo[key]
        out = self._subst_atom(atom, to)
        if key[1] is not None:
            self._subst_memo[key] = out
        return out

    def _subst_atom(self, atom: int, to: Mapping[int, Index]) -> int:
        definition = self.defs[atom]
        kind = definition[0]
        if kind == "leaf":
            args = tuple(self.subst_index(a, to) for a in definition[2])
            return self.atom("leaf", definition[1], args)
        if kind == "iota":
            p = self.iota(self.subst_index(definition[1], to))
            if len(p) == 1:
                ((flag, mono), c) = next(iter(p.items()))
                if c == 1 and len(mono) == 1 and mono[0][1] == 1:
                    return mono[0][0]
            return self.atom("val", self.freeze(p))
        if kind == "sum":
            fresh, flag, mono = self.open_sum(atom)
            inner = self._expanded(
                self.subst_bool(flag, to), self.subst_mono(mono, to), 1.0
            )
            return self._as_atom(self.sum_over(inner, fresh))
        if kind == "any":
            lit = self.subst_literal(atom, to)
            return self.atom("ind", lit)
        if kind == "exp":
            mono = self.subst_mono(definition[1], to)
            if any(self.kind(a) == "val" for a, _ in mono):
                return self._as_atom(self.exp(self._expanded(TRUE, mono, 1.0)))
            return self.atom("exp", mono)
        if kind == "ind":
            return self.atom("ind", self.subst_bool(definition[1], to))
        if kind == "relu":
            return self._as_atom(self.relu(self.subst(self.thaw(definition[1]), to)))
        if kind == "fn" and definition[1] in ODD:
            inner = self.subst(self.thaw(definition[2]), to)
            return self._as_atom(self.odd(definition[1], inner))
        if kind == "pow":
            content, atom = self.base_atom(self.subst(self.thaw(definition[1]), to))
            if content == 1:
                return atom
            return self.atom("val", self.freeze({(TRUE, ((atom, 1),)): content}))
        parts = [
            self.freeze(self.subst(self.thaw(x), to))
            if isinstance(x, tuple) and _is_frozen(x)
            else x
            for x in definition[1:]
        ]
        return self.atom(kind, *parts)

    def _as_atom(self, p: Poly) -> int:
        if len(p) == 1:
            ((flag, mono), c) = next(iter(p.items()))
            if c == 1 and flag == TRUE and len(mono) == 1 and mono[0][1] == 1:
                return mono[0][0]
        return self.atom("val", self.freeze(p))

    # --------------------------------------------------------------- predicates
    def iota(self, a: Index) -> Poly:
        """The value of an index argument as a polynomial."""
        if a is None:
            return {}
        if isinstance(a, int):
            return self.of_atom(self.atom("iota", a))
        if a[0] == "k":
            return self.const(a[1])
        if a[0] == "aff":
            return self.add(self.scale(self.iota(a[1]), float(a[2])), self.const(a[3]))
        if a[0] == "cat":
            return self.add(self.scale(self.iota(a[1]), float(a[3])), self.iota(a[2]))
        return self.of_atom(self.atom("iota", a))

    def bounds(self, p: Poly) -> tuple[float, float]:
        """Least and greatest value of a polynomial of iotas; infinite if unknown."""
        lo = hi = 0.0
        for (flag, mono), c in p.items():
            if not mono:
                a, b = 1.0, 1.0
            elif len(mono) == 1 and mono[0][1] == 1 and self.kind(mono[0][0]) == "iota":
                a, b = map(float, self.index_range(self.defs[mono[0][0]][1]))
            else:
                return -math.inf, math.inf
            ends = (c * a, c * b) if flag == TRUE else (c * a, c * b, 0.0)
            lo, hi = lo + min(ends), hi + max(ends)
        return lo, hi

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
        if integral or all(self.kind(a) == "iota" for _, m in p for a, _ in m):
            lo, hi = self.bounds(p)
            if kind == "ge" and lo >= 0:
                return TRUE
            if hi < 0 or (kind == "eq" and lo > 0):
                return FALSE
        if kind == "ge":
            near = self._within(p, integral)
            return self._ge(p, integral) if near is None else near
        if integral and all(
            self.kind(a) == "iota" and isinstance(self.defs[a][1], int)
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

    def _within(self, p: Poly, integral: bool) -> int | None:
        """[c - |b| >= 0] as two bounds; |b| is 2 max(b, 0) - b."""
        for (flag, mono), c in p.items():
            if flag != TRUE or len(mono) != 1 or mono[0][1] != 1 or c >= 0:
                continue
            if self.kind(mono[0][0]) != "relu":
                continue
            b = self.scale(self.thaw(self.defs[mono[0][0]][1]), -c / 2)
            rest = self.add({t: v for t, v in p.items() if t != (flag, mono)}, b, -1.0)
            if self.as_constant(rest) is not None:
                return self.both(
                    self.compare("ge", self.add(rest, b), integral),
                    self.compare("ge", self.add(rest, b, -1.0), integral),
                )
        return None

    def _ge(self, p: Poly, integral: bool) -> int:
        coefficients = [c for t, c in p.items() if t != (TRUE, ())]
        if integral and all(c == int(c) for c in coefficients):
            g = math.gcd(*(int(abs(c)) for c in coefficients))
            if g > 1:  # g*x + c >= 0  is  x + floor(c/g) >= 0
                c0 = p.get((TRUE, ()), 0.0)
                p = self.scale({t: c for t, c in p.items() if t != (TRUE, ())}, 1 / g)
                p = self.add(p, self.const(math.floor(c0 / g)))
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

    # --------------------------------------------------------------- text
    def show(self, p: Poly, names: Callable[[Any], str] = str) -> str:
        """Readable text of a polynomial, for messages."""
        if not p:
            return "0"
        terms = []
        for (flag, mono), c in itertools.islice(p.items(), 6):
            factors = [
                self.show_atom(a, names) + ("" if e == 1 else f"^{_short(e)}")
                for a, e in mono
            ]
            if flag != TRUE:
                factors.append(self.show_bool(flag, names))
            if c != 1 or not factors:
                factors.insert(0, f"{c:.5g}")
            terms.append("*".join(factors))
        return " + ".join(terms) + (" + ..." if len(p) > 6 else "")

    def show_bool(self, b: int, names: Callable[[Any], str] = str) -> str:
        """Readable text of a boolean function."""
        support, table = self.bools[b]
        if len(support) == 1:
            text = self.show_atom(support[0], names)
            return f"[{text}]" if table == 0b10 else f"[not {text}]"
        return "[mask of " + ", ".join(self.show_atom(a, names) for a in support) + "]"

    def show_atom(self, atom: int, names: Callable[[Any], str] = str) -> str:
        """Readable text of an atom."""
        d = self.defs[atom]
        if d[0] == "leaf":
            inside = ",".join(_show_index(a) for a in d[2] if a is not None)
            return f"{names(d[1])}[{inside}]"
        if d[0] == "iota":
            return _show_index(d[1])
        if d[0] == "sum":
            body = self.show({(d[2], d[3]): 1.0}, names)
            return "sum_" + ",".join(map(_show_index, d[1])) + f"({body})"
        if d[0] == "exp":
            return f"exp({self.show({(TRUE, d[1]): 1.0}, names)})"
        if d[0] == "ge":
            return self.show(self.thaw(d[1]), names) + " >= 0"
        if d[0] == "eq":
            return self.show(self.thaw(d[1]), names) + " == 0"
        if d[0] == "any":
            return f"any({self.show_bool(d[2], names)})"
        if d[0] == "ind":
            return self.show_bool(d[1], names)
        parts = [
            self.show(self.thaw(x), names)
            for x in d[1:]
            if isinstance(x, tuple) and _is_frozen(x)
        ]
        name = "" if d[0] == "pow" else d[1] if d[0] == "fn" else d[0]
        return f"{name}({', '.join(parts)})"


def _term_order(item: Any) -> Any:
    (flag, mono), c = item
    return flag, len(mono), [(a, float(e)) for a, e in mono], c


def _is_frozen(value: tuple[Any, ...]) -> bool:
    return not value or (
        isinstance(value[0], tuple)
        and len(value[0]) == 2
        and isinstance(value[0][0], tuple)
        and len(value[0][0]) == 2
        and isinstance(value[0][1], float)
    )


def _exact(c: float) -> Any:
    return int(c) if c == int(c) else c


def _short(e: Any) -> str:
    return str(e) if isinstance(e, (int, Fraction)) else f"{e:.4g}"


def _show_index(a: Index) -> str:
    if a is None:
        return "0"
    if isinstance(a, int):
        return f"i{a}" if a > 0 else f"j{-a}"
    if a[0] == "k":
        return str(a[1])
    if a[0] == "cat":
        return f"({_show_index(a[1])}*{a[3]}+{_show_index(a[2])})"
    if a[0] == "aff":
        return f"({a[2]}*{_show_index(a[1])}+{a[3]})"
    return f"({_show_index(a[1])}{'//' if a[0] == 'div' else '%'}{a[2]})"


def _cofactors(table: int, k: int, n: int) -> tuple[int, int]:
    """Tables with literal k false and true, over the other n - 1 literals."""
    low = high = 0
    out = 0
    for row in range(1 << n):
        if row >> k & 1:
            continue
        low |= (table >> row & 1) << out
        high |= (table >> (row | 1 << k) & 1) << out
        out += 1
    return low, high


def _expand(support: tuple[int, ...], table: int, wider: tuple[int, ...]) -> int:
    """The same function over a wider support."""
    if support == wider:
        return table
    at = [wider.index(a) for a in support]
    out = 0
    for row in range(1 << len(wider)):
        small = 0
        for k, pos in enumerate(at):
            small |= (row >> pos & 1) << k
        out |= (table >> small & 1) << row
    return out
