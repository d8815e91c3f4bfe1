"""Carries of a loop that goes back over the steps of another, as gradients do.

`jax.grad` of a loop makes a second one, which reads what the first one stacked, last
step first. Let g be a product of the first loop's carries and of their exponentials.
A carry that each step of the second loop multiplies by g(before) / g(after) is

    d = d0 g(after) / g(last)

before the step that goes back over a step, by induction from the last step on.

Another carry is a function of the first loop's carries: what its step gives, if all
that depends on it vanishes. That is proved for any step, and for the last one. The
cotangent of the largest score so far is such a carry: as a whole it has no effect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rewriter.algebra.canonicalize.checkpointed_values import Recomputed
from rewriter.algebra.canonicalize.loop_bodies import Loop
from rewriter.algebra.normal_form import (
    FALSE,
    TRUE,
    Algebra,
    Index,
    Monomial,
    OverBudget,
    Poly,
)

Replaced = Callable[[int, tuple[Index, ...]], Poly]
"""Maps a carry's position in its loop, and index arguments, to a form."""


class ReturningLoops(Recomputed):
    """Forms of the carries of a loop that goes back over another one's steps."""

    def reverse_carry(self, loop: Loop, k: int, args: Any) -> Poly | None:
        """The form of a carry before a step; None if it has none."""
        known, value = self.loops.closed, loop.before[k]
        if value not in known:
            known[value] = None  # a name in its own step
            at, before = self.indices(value), self.loops.outdated
            with contextlib.suppress(OverBudget), self.other_memo():
                form = self._closed(loop, k, at)
                known[value] = (at, form) if before == self.loops.outdated else None
        if known.get(value) is None:
            return None
        at, form = known[value]
        moved = {i: to for i, to in zip(at, args, strict=True) if i is not None}
        return self.alg.subst(form, moved)

    def _closed(self, loop: Loop, k: int, at: tuple[Index, ...]) -> Poly:
        """The form of a carry before a step.

        Raises:
            OverBudget: If none is known.
        """
        alg, own = self.alg, self.leaf(loop.before[k], at)
        form = self._opened(loop, k, at)
        mine = {t: c for t, c in form.items() if dict(t[1]).get(own) == 1}
        rest = {t: c for t, c in form.items() if t not in mine}
        if self._holds(rest, {loop.before[k]}):
            raise OverBudget("a step that is not linear in a carry")
        first = self.poly(loop.first[k], at)
        ((flag, mono), c), *more = mine.items() or [((TRUE, ()), 0.0)]
        if not more and not rest and flag == TRUE and c == 1:
            kept = tuple(f for f in mono if f[0] != own)
            gauge = self._gauge(kept, _names(loop.over))
            form = alg.mul(first, {(TRUE, gauge): 1.0})
            for a, e in gauge:
                form = alg.mul(form, alg.power(self._last(loop.over, a), -e))
            return form
        if all(f == TRUE for f, _ in mine):
            raise OverBudget("a sum over the steps")
        step = _without(alg, rest, [flag for flag, _ in mine])
        return self._as_function(loop, k, at, step, first)

    def _as_function(
        self, loop: Loop, k: int, at: tuple[Index, ...], step: Poly, first: Poly
    ) -> Poly:
        """The form of a carry whose step depends on the other loop's carries alone.

        Args:
            loop: The loop.
            k: Which carry.
            at: Its index arguments.
            step: What its step gives, if what depends on the carry vanishes.
            first: Its form before the first step, which is the last one of the other.

        Raises:
            OverBudget: If that is not proved.
        """
        over = loop.over
        after = self._with_carries(
            over, step, lambda j, args: self._opened(over, j, args), renamed=True
        )
        last = self._with_carries(
            over, step, lambda j, args: self.poly(over.node.outs[j], args)
        )
        if self._holds(step, {*loop.before}) or self.alg.difference(last, first):
            raise OverBudget("a carry that is not known before the last step")
        known = self.loops.closed
        known[loop.before[k]] = at, after
        try:
            with self.other_memo():
                again = self._opened(loop, k, at)
        finally:
            known[loop.before[k]] = None
        if self.alg.difference(again, step):
            raise OverBudget("a carry that is no function of the other loop's")
        return after

    def _holds(self, form: Poly, names: set[int]) -> bool:
        """Whether a form depends on some values."""
        return any(self.alg.defs[a][1] in names for a in self.alg.poly_leaves(form))

    def _with_carries(
        self, over: Loop, form: Poly, instead: Replaced, *, renamed: bool = False
    ) -> Poly:
        """A form with other forms of a loop's carries before a step.

        Args:
            over: The loop.
            form: The form.
            instead: Gives the forms.
            renamed: Whether carries in exponentials become those after the step, and
                not those after the last one.

        Raises:
            OverBudget: If it depends on the step otherwise.
        """
        alg, before = self.alg, {v: j for j, v in enumerate(over.before)}

        def of_atom(atom: int, e: Any) -> Poly:
            d = alg.defs[atom]
            leaves = {alg.defs[x][1] for x in alg.leaves(atom)}
            if before.keys().isdisjoint(leaves):
                if over.index in alg.free(atom):
                    raise OverBudget("a carry also depends on the number of the step")
                return alg.of_atom(atom, e)
            if d[0] == "leaf":
                return alg.power(instead(before[d[1]], d[2][:-1]), e)
            if d[0] == "exp" and leaves <= before.keys():
                moved = self._renamed(atom, _names(over))
                if renamed:
                    return alg.of_atom(moved, e)
                return alg.power(self._last(over, moved), e)
            if d[0] == "sum":
                bound, flag, mono = alg.open_sum(atom)
                return alg.power(alg.sum_over(of_term(flag, mono), bound), e)
            raise OverBudget(
                "a carry goes through a function that is neither exp nor a sum"
            )

        def of_term(flag: int, mono: Monomial) -> Poly:
            leaves = alg.poly_leaves(alg.of_bool(flag))
            if any(alg.defs[a][1] in before for a in leaves):
                raise OverBudget("a condition reads a carry of the loop")
            if over.index in alg.term_ids(flag, ()):
                raise OverBudget("a carry also depends on the number of the step")
            out: Poly = {(flag, ()): 1.0}
            for atom, e in mono:
                out = alg.mul(out, of_atom(atom, e))
            return out

        out: Poly = {}
        for (flag, mono), c in form.items():
            out = alg.add(out, alg.scale(of_term(flag, mono), c))
        return out


def _names(over: Loop) -> Mapping[int, int]:
    """The carries before a step to those after it."""
    return dict(zip(over.before, over.after, strict=False))


def _without(alg: Algebra, form: Poly, flags: Iterable[int]) -> Poly:
    """A form where none of some conditions holds.

    Raises:
        OverBudget: If terms depend on the conditions in another way.
    """
    none = TRUE
    for flag in flags:
        none = alg.both(none, alg.negate(flag))
    out: Poly = {}
    for (flag, mono), c in form.items():
        here = alg.both(flag, none)
        if here == FALSE:
            continue
        deciding = {*alg.bools[none][0]}
        there = alg.project(here, [a for a in alg.bools[here][0] if a not in deciding])
        if alg.both(there, none) != here:
            raise OverBudget("a carry is chosen by another condition than the loop's")
        out = alg.add(out, {(there, mono): c})
    return out
