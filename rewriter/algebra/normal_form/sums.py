"""Sums over indices: factored, with bound indices in a canonical order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from rewriter.algebra.normal_form.forms import (
    TRUE,
    Index,
    Monomial,
    Poly,
    is_frozen,
    real,
)


class Sums:
    """Sums of products over bound indices."""

    def sum_over(self, p: Poly, indices: Iterable[Index]) -> Poly:
        """Sum over indices: distributes it, and moves independent factors out."""
        bound = frozenset(i for i in indices if i is not None)
        if not bound:
            return p
        out: Poly = {}
        for (flag, mono), c in self._without_complements(p).items():
            out = self.add(out, self._sum_term(flag, mono, c, bound))
        return self.partial_fractions(out)

    def _without_complements(self, p: Poly) -> Poly:
        """A form in which no term has one number at a position, and one elsewhere.

        A smoothed one-hot row ``[v = i] a + [v != i] b`` is ``b + [v = i] (a - b)``.
        """
        for (flag, mono), c in p.items():
            literals, table = self.bools[flag]
            if len(literals) != 1 or table != 0b10 or self.kind(literals[0]) != "eq":
                continue
            elsewhere = p.get((self.negate(flag), mono))
            if elsewhere is not None:
                rest = {t: x for t, x in p.items() if t[1] != mono}
                kept = {t: x for t, x in p.items() if t[1] == mono and t[0] != flag}
                kept.pop((self.negate(flag), mono))
                rest |= kept
                rest[TRUE, mono] = rest.get((TRUE, mono), 0.0) + elsewhere
                rest[flag, mono] = self.number(c - elsewhere)
                return self._without_complements(rest)
        return p

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
        flag, mono, bound = self.joined(flag, mono, bound)
        used = self.term_ids(flag, mono)
        for j in bound - used:
            c *= real(self.sizes[j])
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
                if isinstance(part, tuple) and is_frozen(part):
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
        best: Any = None
        orders = list(self._orders(bound, flag, mono))
        for order in orders:
            names = tuple(
                self.bound_index(level, k, self.sizes[j]) for k, j in enumerate(order)
            )
            to = dict(zip(order, names, strict=True))
            new_flag, new_mono = self.subst_bool(flag, to), self.subst_mono(mono, to)
            key = (self.bools[new_flag], repr(new_mono)) if len(orders) > 1 else None
            if best is None or key < best[0]:
                best = (key, names, new_flag, new_mono)
        _, names, new_flag, new_mono = best
        return self.atom(kind, names, new_flag, new_mono)

    def _orders(self, bound: list[int], flag: int, mono: Monomial):
        """Orders of the bound indices worth trying, by where each occurs."""
        if len({self.sizes[j] for j in bound}) == len(bound):  # told apart by size
            yield tuple(sorted(bound, key=self.size_order))
            return
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
        """The occurrences of an index in an atom, without names of indices."""
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

    def without_implied(self, p: Poly) -> Poly:
        """A form without conditions of terms that hold wherever a sum in them is not 0.

        ``[i <= n] Σ_j [j < i <= n] x_ij`` is the sum alone.
        """
        out: Poly = {}
        for (flag, mono), c in p.items():
            for atom, e in mono:
                if flag != TRUE and e == 1 and self.kind(atom) == "sum":
                    flag = self._not_implied(flag, self.open_sum(atom)[1])
            out = self.add(out, {(flag, mono): c})
        return out

    def _not_implied(self, flag: int, inner: int) -> int:
        """The parts of a condition that another one does not imply."""
        out = TRUE
        for _, part in self.conjuncts(flag, lambda literal: literal):
            if not self.implies(inner, part):
                out = self.both(out, part)
        return out

    def any_over(self, b: int, indices: Iterable[Index]) -> int:
        """The function: b holds at some position of the indices."""
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
