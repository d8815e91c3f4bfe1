"""Joins sums over parts of a range into one sum over the range.

The body over the longer range is guessed from one part. It is accepted only if it gives
back every part.
"""

from __future__ import annotations

import itertools

from rewriter.algebra.normal_form.forms import TRUE, Index, Monomial, Poly

Term = tuple[int, Monomial]


class Ranges:
    """Bound indices that are parts of one position."""

    def joined(self, flag: int, mono: Monomial, bound: frozenset[int]):
        """A sum's body; two indices that are only read as i * n + j become one."""
        for i, j in self._pairs(flag, mono, bound):
            n = self.sizes[j]
            whole = self.new_index(self.sizes[i] * n)
            on_whole = self._bound_on_whole(flag, i, j, whole)
            body = self._body(on_whole, mono, {i: None, j: whole})
            both = self.cat(i, j, n)
            key = self._bound_on_whole(flag, i, j, both), mono
            if len(body) == 1 and self.subst(body, {whole: both}) == {key: 1.0}:
                (((flag, mono), c),) = body.items()
                if c == 1.0:
                    return self.joined(flag, mono, bound - {i, j} | {whole})
        return flag, mono, bound

    def _bound_on_whole(self, flag: int, i: int, j: int, whole: Index) -> int:
        """A condition on i as one on i * n + j, as far as it bounds i.

        ``i <= x`` exactly if ``i * n + j <= x * n + n - 1``.
        """
        n, literals = self.sizes[j], []
        for atom in self.bools[flag][0]:
            literal = self.literal(atom)
            if i in self._free[atom] and j not in self._free[atom]:
                kind, body, integral = (*self.defs[atom], False)[:3]
                p = self.thaw(body) if kind == "ge" and integral else {}
                c = p.pop((TRUE, ((self.atom("iota", i), 1),)), 0.0)
                if abs(c) != 1:
                    return flag
                p = self.add(self.scale(p, n), self.iota(whole), c)
                p = self.add(p, self.const(n - 1 if c < 0 else 0))
                literal = self.compare("ge", p, True)
            literals.append(literal)
        return self.of_literals(flag, literals)

    def _pairs(
        self, flag: int, mono: Monomial, bound: frozenset[int]
    ) -> list[tuple[int, int]]:
        found: dict[tuple[int, int], None] = {}
        for atom in (*(a for a, _ in mono), *self.bools[flag][0]):
            if len(self._free[atom] & bound) > 1:
                for a in self._index_arguments(atom):
                    while isinstance(a, tuple) and a[0] != "k":
                        if self._is_pair(a, bound):
                            found.setdefault((a[1], a[2]))
                        a = a[1]
        return list(found)

    def _is_pair(self, a: tuple, bound: frozenset[int]) -> bool:
        """Whether an index argument is i * n + j of two bound indices."""
        plain = a[0] == "cat" and isinstance(a[1], int) and isinstance(a[2], int)
        return plain and {a[1], a[2]} <= bound and self.sizes[a[2]] == a[3]

    def merged(self, p: Poly) -> Poly:
        """The form with sums over adjacent ranges of one body as one sum."""
        out: Poly = {}
        for (flag, mono), c in p.items():
            term: Poly = {(flag, ()): c}
            for a, e in mono:
                factor = self.of_atom(a, e)
                if self.kind(a) == "pow":
                    factor = self.power(self.merged(self.thaw(self.defs[a][1])), e)
                term = self.mul(term, factor)
            out = self.add(out, term)
        less = self._with_two_merged(out)
        while less is not None:
            out, less = less, self._with_two_merged(less)
        return out

    def _with_two_merged(self, p: Poly) -> Poly | None:
        """The form with two of its terms merged; None if no two fit."""
        for one, other in itertools.permutations(p, 2):
            if one[0] != other[0] or p[one] != p[other]:
                continue
            sums = self._only_difference(one[1], other[1])
            both = None if sums is None else self._adjacent(*sums)
            if both is None:
                continue
            outer = tuple(f for f in one[1] if f[0] != sums[0])
            rest = {t: c for t, c in p.items() if t not in (one, other)}
            return self.add(rest, self.mul(both, {(one[0], outer): p[one]}))
        return None

    def _only_difference(
        self, one: Monomial, other: Monomial
    ) -> tuple[int, int] | None:
        """The one sum in which each of two monomials differs from the other."""
        first, second = set(one) - set(other), set(other) - set(one)
        if len(first) != 1 or len(second) != 1:
            return None
        ((a, e),), ((b, x),) = first, second
        sums = self.kind(a) == "sum" == self.kind(b) and e == 1 == x
        return (a, b) if sums else None

    def _adjacent(self, a: int, b: int) -> Poly | None:
        """Two sums merged over a longer range, where b's part follows a's.

        The body of either is extended beyond its own part.
        """
        names = [sorted(self.defs[x][1], key=self.size_order) for x in (a, b)]
        sizes = [[self.sizes[i] for i in some] for some in names]
        for this, other, others in ((a, b, sizes[1]), (b, a, sizes[0])):
            bound, flag, mono = self.open_sum(this)
            for j in bound:
                rest = [i for i in bound if i != j]
                more = _without(others, [self.sizes[i] for i in rest])
                if len(more) != 1:
                    continue
                mine = self.sizes[j]
                shift = mine if this == a else -more[0]
                part = self.affine(self.new_index(more[0]), 1, shift)
                if self._summed(flag, mono, j, part, rest) != self.of_atom(other):
                    continue
                whole = self.new_index(mine + more[0])
                at = whole if this == a else self.affine(whole, 1, shift)
                return self._summed(flag, mono, j, at, rest)
        return None

    def _summed(
        self, flag: int, mono: Monomial, j: int, at: Index, rest: list[int]
    ) -> Poly:
        """The sum of a body with one of its indices replaced."""
        return self.sum_over(
            self._body(flag, mono, {j: at}), [*rest, *self.index_ids(at)]
        )

    def _body(self, flag: int, mono: Monomial, to: dict[int, Index]) -> Poly:
        return self._expanded(self.subst_bool(flag, to), self.subst_mono(mono, to), 1.0)


def _without(sizes: list[int], taken: list[int]) -> list[int]:
    """The sizes that are left."""
    left = list(sizes)
    for n in taken:
        if n in left:
            left.remove(n)
    return left if len(left) == len(sizes) - len(taken) else []
