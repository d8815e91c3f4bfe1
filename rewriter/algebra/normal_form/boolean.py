"""Boolean functions of literals, as truth tables without implied literals."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rewriter.algebra.normal_form.forms import (
    FALSE,
    LITERAL_BUDGET,
    TRUE,
    OverBudget,
    Poly,
)

Clause = tuple[int, bool, int, bool]
"""Two literals by position, and truth values that they never have together."""

PLACES = 64
"""The most positions at which a condition that holds anywhere is looked for."""


class BooleanFunctions:
    """Conjunction, disjunction and projection of interned functions."""

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
            never = self.impossible(support)
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

    def impossible(self, support: tuple[int, ...]) -> int:
        """Rows of a truth table that no assignment of values reaches."""
        found = self._unreached.get(support)
        if found is None:
            found = self._unreached[support] = self._contradictions(support)
        return found

    def _contradictions(self, support: tuple[int, ...]) -> int:
        out = self._held_nowhere(support)
        clauses = [
            *self._ordered(support), *self._bounded(support), *self._equal(support)
        ]  # fmt: skip
        if not clauses:
            return out
        everything = (1 << (1 << len(support))) - 1
        columns = [_column(k, len(support)) for k in range(len(support))]
        for a, if_a, b, if_b in clauses:
            rows = columns[a] if if_a else everything ^ columns[a]
            out |= rows & (columns[b] if if_b else everything ^ columns[b])
        return out

    def _held_nowhere(self, support: tuple[int, ...]) -> int:
        """Rows in which a condition holds, and does not hold anywhere.

        Where a mask is true, it is true anywhere in its block. So a block of keys that
        is skipped unless its mask holds anywhere is skipped by the mask alone.
        """
        out, width = 0, 1 << len(support)
        for k, atom in enumerate(support):
            if self.defs[atom][0] != "any":
                continue
            nowhere = (1 << width) - 1 ^ _column(k, len(support))
            for here in self._held_at(atom, support):
                own, table = self.bools[here]
                if set(own) <= set(support) - {atom}:
                    out |= nowhere & _expand(own, table, support)
                    continue
                for j, other in enumerate(support):
                    if self.defs[other][0] == "eq" and self._entails(other, here):
                        out |= nowhere & _column(j, len(support))
        return out

    def _entails(self, equality: int, flag: int) -> bool:
        """Whether a condition holds wherever two integers are equal."""
        try:
            return self.implies(self.literal(equality), flag)
        except OverBudget:
            return False

    def _held_at(self, atom: int, support: tuple[int, ...]) -> Iterator[int]:
        """What a condition that holds anywhere says at the indices of other literals.

        Indices of sizes like those of the condition are tried.
        """
        _, names, flag, _ = self.defs[atom]
        others = sorted(set().union(*(self._free[a] for a in support if a != atom)))
        sizes = [self.sizes[n] for n in names]
        like = [[i for i in others if self.sizes.get(i) == n] for n in sizes]
        for at in itertools.islice(itertools.product(*like), PLACES):
            yield self.subst_bool(flag, dict(zip(names, at, strict=True)))

    def _ordered(self, support: tuple[int, ...]) -> Iterator[Clause]:
        """Clauses: the stronger of two claims about one form implies the other."""
        groups: dict[Any, list[tuple[float, int]]] = {}
        for k, a in enumerate(support):
            d = self.defs[a]
            if d[0] == "ge":
                rest = tuple(t for t in d[1] if t[0] != (TRUE, ()))
                c = next((c for t, c in d[1] if t == (TRUE, ())), 0.0)
                groups.setdefault(rest, []).append((c, k))
        for rest, members in groups.items():
            members.sort()  # a smaller constant is the stronger claim
            for (_, a), (_, b) in itertools.combinations(members, 2):
                yield a, True, b, False
            for e, b in groups.get(self._undivided(rest), ()):
                yield from ((a, True, b, False) for c, a in members if e >= c)

    def _equal(self, support: tuple[int, ...]) -> Iterator[Clause]:
        """Clauses: where two integers are equal, one is at least the other."""
        whole = [(k, self.defs[a]) for k, a in enumerate(support)]
        whole = [(k, d) for k, d in whole if d[0] in ("eq", "ge") and d[2]]
        for k, claim in whole:
            for j, other in whole if claim[0] == "eq" else ():
                if other[0] == "ge":
                    p, q = self.thaw(claim[1]), self.thaw(other[1])
                    term = next(t for t in p if t[1])
                    rest = self.add(q, p, -q.get(term, 0.0) / p[term])
                    left = self.as_constant(rest)
                    if left is not None:
                        yield k, True, j, left < 0

    def _bounded(self, support: tuple[int, ...]) -> Iterator[Clause]:
        """Clauses between claims about two forms, from bounds of positions."""
        claims = [
            (k, a) for k, a in enumerate(support)
            if self.defs[a][0] == "ge" and self.defs[a][2]
        ]  # fmt: skip
        for (k, a), (j, b) in itertools.combinations(claims, 2):
            found = self._never.get((a, b))
            if found is None:
                found = self._never[a, b] = tuple(self._never_together(a, b))
            for if_a, if_b in found:
                yield k, if_a, j, if_b

    def _never_together(self, a: int, b: int) -> Iterator[tuple[bool, bool]]:
        """Truth values that two claims about integers never have together.

        What is no position may be a multiple in the other claim: one may be about the
        positions in blocks of m, and one about the numbers of the blocks.
        """
        (p, rest), (q, other) = self._by_positions(a), self._by_positions(b)
        if not rest and not other:
            yield from (*self._of_multiple(p, q, 1), *self._of_multiple(p, q, -1))
        elif m := _multiple(rest, other):
            yield from self._of_multiple(p, q, m)
        elif m := _multiple(other, rest):
            for if_b, if_a in self._of_multiple(q, p, m):
                yield if_a, if_b

    def _of_multiple(self, p: Poly, q: Poly, m: float) -> Iterator[tuple[bool, bool]]:
        """What claims about p and q exclude; beside them q has m times what p has.

        Where q - m p is never negative, p >= 0 implies q >= 0. Where it is less than m,
        q >= 0 implies p >= 0. With a negative m: where q - m p is always negative, they
        are not both true; and where it is at least m, not both false.
        """
        lo, hi = self.bounds(self.add(q, p, -m))
        if m > 0:
            if lo >= 0:
                yield True, False
            if hi < m:
                yield False, True
        else:
            if hi < 0:
                yield True, True
            if lo >= m:  # whole numbers: both false is m - 1 at most
                yield False, False

    def _by_positions(self, atom: int) -> tuple[Poly, Poly]:
        """The part of a claim's form made of positions and numbers, and the rest."""
        known: Poly = {}
        rest: Poly = {}
        for (flag, mono), c in self.defs[atom][1]:
            place = all(e == 1 and self.kind(a) == "iota" for a, e in mono)
            (known if flag == TRUE and place else rest)[flag, mono] = c
        return known, rest

    def _undivided(self, rest: tuple) -> tuple | None:
        """Replaces a digit by its position, which is at least as large."""
        if len(rest) != 1 or rest[0][1] != 1.0 or len(rest[0][0][1]) != 1:
            return None
        ((flag, ((atom, e),)), c) = rest[0]
        d = self.defs[atom]
        if e != 1 or d[0] != "iota" or not isinstance(d[1], tuple):
            return None
        if d[1][0] not in ("div", "mod") or self.index_range(d[1][1])[0] < 0:
            return None
        whole = self.atom("iota", d[1][1])
        return (((flag, ((whole, 1),)), c),)

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
        """The function: some assignment of the other literals makes b true."""
        keep = set(keep)
        for a in self.bools[b][0]:
            if a not in keep and a in self.bools[b][0]:
                support, table = self.bools[b]
                low, high = _cofactors(table, support.index(a), len(support))
                rest = tuple(x for x in support if x != a)
                b = self._bool(rest, low | high)
        return b


def _multiple(p: Poly, q: Poly) -> float | None:
    """The whole number m, not 0, for which q is m times p; None if there is none."""
    if not p or p.keys() != q.keys():
        return None
    ratios = {q[t] / c for t, c in p.items()}
    m = ratios.pop()
    return m if not ratios and m == int(m) and m else None


@functools.lru_cache(maxsize=256)
def _column(k: int, n: int) -> int:
    """Rows of a truth table of n literals in which literal k holds."""
    rows = ((1 << (1 << k)) - 1) << (1 << k)
    for j in range(k + 1, n):
        rows |= rows << (1 << j)
    return rows


def _swapped(table: int, k: int, n: int) -> int:
    """The table of n literals with k and k + 1 in each other's place."""
    by = 1 << k
    moved = (table ^ table >> by) & _column(k, n) & ~_column(k + 1, n)
    return table ^ moved ^ moved << by


def _cofactors(table: int, k: int, n: int) -> tuple[int, int]:
    """Tables with literal k false and true, over the other n - 1 literals."""
    for j in range(k, n - 1):
        table = _swapped(table, j, n)
    half = 1 << (n - 1)
    return table & ((1 << half) - 1), table >> half


def _expand(support: tuple[int, ...], table: int, wider: tuple[int, ...]) -> int:
    """The same function over a wider support; both are in order."""
    n = len(support)
    for k, a in enumerate(wider):
        if a not in support:
            table |= table << (1 << n)  # a new literal, at first the last one
            n += 1
            for j in reversed(range(k, n - 1)):
                table = _swapped(table, j, n)
    return table
