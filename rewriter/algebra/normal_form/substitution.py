"""Substitution of index arguments in forms."""

from __future__ import annotations

from collections.abc import Mapping

from rewriter.algebra.normal_form.forms import (
    FALSE,
    ODD,
    TRUE,
    Index,
    Monomial,
    Poly,
    is_frozen,
)


class Substitution:
    """Forms at other index arguments."""

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
        free = self._free
        for a, _ in mono:
            if not free[a].isdisjoint(to):
                return self.monomial([(self.subst_atom(a, to), e) for a, e in mono])
        return mono

    def subst_bool(self, b: int, to: Mapping[int, Index]) -> int:
        """A boolean function with indices replaced."""
        support, _ = self.bools[b]
        free = self._free
        for a in support:
            if not free[a].isdisjoint(to):
                break
        else:
            return b
        literals = [self.subst_literal(a, to) for a in support]
        for atom, moved in zip(support, literals, strict=True):
            literal = self.literal(atom)
            self._remember_own(literal, moved, to)
            self._remember_own(self.negate(literal), self.negate(moved), to)
        out = self.of_literals(b, literals)
        self._remember_own(b, out, to)
        return out

    def _remember_own(self, b: int, out: int, to: Mapping[int, Index]) -> None:
        """Remembers the program's own boolean for a substituted function."""
        if out in (TRUE, FALSE):
            return
        for value, args in self.own.get(b, ()):
            moved = value, tuple(self.subst_index(a, to) for a in args)
            known = self.own.setdefault(out, [])
            if moved not in known:
                known.append(moved)

    def of_literals(self, b: int, literals: list[int]) -> int:
        """A boolean function with other functions in place of its literals."""
        _, table = self.bools[b]
        return self._of_table(table, literals, {})

    def _of_table(
        self, table: int, literals: list[int], known: dict[tuple[int, int], int]
    ) -> int:
        """The function with a truth table of literals; `known` holds those of parts."""
        n = len(literals)
        if table == 0 or n == 0:
            return TRUE if table else FALSE
        if (table, n) not in known:
            low, high = table & (1 << (1 << n - 1)) - 1, table >> (1 << n - 1)
            *first, x = literals
            out = self._of_table(low, first, known)
            if low != high:
                on = self.both(x, self._of_table(high, first, known))
                out = self.either(on, self.both(self.negate(x), out))
            known[table, n] = out
        return known[table, n]

    def same_index(self, a: Index, b: Index) -> int:
        """Whether two index arguments are equal, as one literal."""
        p = self.add(self.iota(a), self.iota(b), -1.0)
        c = self.as_constant(p)
        if c is not None:
            return FALSE if c else TRUE
        return self.literal(self.atom("eq", self.freeze(p), True))

    def summed_where_equal(self, p: Poly, index: int) -> Poly:
        """The sum over an index of terms, where a condition `same_index` gives it.

        ``Σ_i [a = i] f(i)`` is ``f(a)`` where a is one of the indices. Other terms are
        summed as usual.
        """
        out, rest = {}, {}
        for (flag, mono), c in p.items():
            for atom in self.bools[flag][0]:
                a = self._equal_to(atom, index)
                others = self.project(flag, {*self.bools[flag][0]} - {atom})
                if a is None or self.both(others, self.literal(atom)) != flag:
                    continue
                below = self.add(self.const(self.sizes[index] - 1), self.iota(a), -1.0)
                here = self.subst({(others, mono): c}, {index: a})
                inside = self.of_bool(self.compare("ge", below, True))
                out = self.add(out, self.mul(here, inside))
                break
            else:
                rest[flag, mono] = c
        return self.add(out, self.sum_over(rest, [index]))

    def _equal_to(self, atom: int, index: int) -> Index:
        """The index argument that a literal says to equal an index, or None."""
        kind, *body = self.defs[atom]
        if kind != "eq" or len(body[0]) != 2:
            return None
        (((one, first), c), ((other, second), d)) = body[0]
        plain = one == other == TRUE and (c, d) in ((1, -1), (-1, 1))
        if not plain or not all(
            len(m) == 1 and m[0][1] == 1 and self.kind(m[0][0]) == "iota"
            for m in (first, second)
        ):
            return None
        a, b = (self.defs[m[0][0]][1] for m in (first, second))
        found = b if a == index else a
        known = index in (a, b) and index not in self.index_ids(found)
        return found if known else None

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
        free = self._free[atom]
        if free.isdisjoint(to):
            return atom
        moved = tuple([(k, to[k]) for k in free if k in to])  # in the set's own order
        for _, index in moved:
            if not isinstance(index, int):
                return self._subst_atom(atom, to)
        key = atom, moved
        found = self._subst_memo.get(key)
        if found is None:
            found = self._subst_memo[key] = self._subst_atom(atom, to)
        return found

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
            if self._renames(atom, to):
                _, names, flag, mono = definition
                renamed = self.subst_bool(flag, to), self.subst_mono(mono, to)
                return self.atom("sum", names, *renamed)
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
            if isinstance(x, tuple) and is_frozen(x)
            else x
            for x in definition[1:]
        ]
        return self.atom(kind, *parts)

    def _renames(self, atom: int, to: Mapping[int, Index]) -> bool:
        """Whether a sum's free indices are only renamed, one to one.

        Its bound indices stay unchanged if their sizes distinguish them.
        """
        free = self._free[atom]
        names = [to.get(i, i) for i in free]
        if not all(isinstance(a, int) and a != 0 for a in names):
            return False
        sizes = [self.sizes[i] for i in self.defs[atom][1]]
        return (
            len(set(names)) == len(names)
            and len(set(sizes)) == len(sizes)
            and all(self.sizes[i] == self.sizes[to.get(i, i)] for i in free)
            and not set(names).intersection(self.defs[atom][1])
        )

    def _as_atom(self, p: Poly) -> int:
        if len(p) == 1:
            ((flag, mono), c) = next(iter(p.items()))
            if c == 1 and flag == TRUE and len(mono) == 1 and mono[0][1] == 1:
                return mono[0][0]
        return self.atom("val", self.freeze(p))
