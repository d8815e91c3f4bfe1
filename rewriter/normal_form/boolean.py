"""Boolean functions of literals, as truth tables without implied literals."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from rewriter.normal_form.forms import (
    FALSE,
    LITERAL_BUDGET,
    TRUE,
    OverBudget,
)


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
        groups: dict[Any, list[tuple[float, int]]] = {}
        for k, a in enumerate(support):
            d = self.defs[a]
            if d[0] == "ge":
                rest = tuple(t for t in d[1] if t[0] != (TRUE, ()))
                c = next((c for t, c in d[1] if t == (TRUE, ())), 0.0)
                groups.setdefault(rest, []).append((c, k))
        pairs = []
        for rest, members in groups.items():
            members.sort()  # a smaller constant is the stronger claim
            pairs += [(a, b) for (_, a), (_, b) in itertools.combinations(members, 2)]
            above = groups.get(self._undivided(rest), ())
            pairs += [(a, b) for c, a in members for e, b in above if e >= c]
        out = 0
        for row in range(1 << len(support)) if pairs else ():
            if any(row >> a & 1 and not row >> b & 1 for a, b in pairs):
                out |= 1 << row
        return out

    def _undivided(self, rest: tuple) -> tuple | None:
        """A position in place of its digit: no digit is above its number."""
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
        """There is an assignment of the other literals that makes b true."""
        keep = set(keep)
        for a in self.bools[b][0]:
            if a not in keep and a in self.bools[b][0]:
                support, table = self.bools[b]
                low, high = _cofactors(table, support.index(a), len(support))
                rest = tuple(x for x in support if x != a)
                b = self._bool(rest, low | high)
        return b


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
