"""Results of a loop as forms: what its steps stack, and what they add up.

A stacked result at a step is the body's result there. A carry that each step
multiplies by g(before) / g(after) and adds a term to,

    c' = c g(before) / g(after) + r,

where g is a product of carries and of their exponentials, is after the last step

    c = (c0 g(first) + Σ over steps of r g(after)) / g(last),

by induction over the steps. So an online softmax, whose g is the exponential of
the largest score so far, is a softmax over the keys of all steps. Where steps that a
condition skips leave all carries, r is zero in them, and the other steps are as before.
A while loop has as many steps as its bound may allow, and skips the last ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rewriter.algebra.canonicalize.dtypes import kind_of
from rewriter.algebra.canonicalize.extremes import by_entries
from rewriter.algebra.canonicalize.intervals import held_by, within
from rewriter.algebra.canonicalize.loop_bodies import Loop
from rewriter.algebra.canonicalize.primitives import FULL, NeedSplit
from rewriter.algebra.canonicalize.reverse_loops import ReturningLoops
from rewriter.algebra.canonicalize.select import choose, reached
from rewriter.algebra.normal_form import TRUE, Index, Monomial, OverBudget, Poly
from rewriter.program.counted_loops import Condition, Counted, counted
from rewriter.program.graph import Node
from rewriter.program.skipped_steps import (
    Skipped,
    branch_results,
    decides,
    skipped,
)

MOST_STEPS = 2**24
"""The most steps of a while loop that is read."""


class LoopForms(ReturningLoops):
    """Forms of values in the bodies of loops, and of their results."""

    def enter(self, node: Node) -> Loop:
        """The loop of an equation; from now on its body's values have forms.

        Raises:
            OverBudget: If another loop's body shares values with it.
        """
        loops = self.loops
        known = loops.entered.get(node)
        if known is not None:
            return known
        parts = counted(node)
        if parts is None:
            raise OverBudget("a loop that does not count its steps")
        body, n_consts, n_carry = parts.body, parts.n_consts, parts.n_carry
        (scope,) = node.scope.children[node.position]
        inputs = [scope.env[v] for v in body.invars[n_consts:]]
        stacked = parts.ins[n_consts + n_carry :]
        over = self._loop_reversed(parts, inputs[n_carry:], stacked)
        new = self.alg.new_index
        loop = Loop(
            node,
            over.index if over else new(2 if parts.length is None else parts.length),
            parts.ins[n_consts : n_consts + n_carry],
            tuple(inputs[:n_carry]),
            tuple(self.g.read(scope, v) for v in body.outvars),
            parts.reverse,
            over=over,
        )
        if parts.condition is not None:
            loop = self._with_steps(loop, parts.condition)
        skips = self._skipped(loop)
        first = loops.first_run(loop) if parts.condition is None else None
        if first is not None:
            return self._enter_again(loop, first, skips, inputs[n_carry:], stacked)
        if over is not None:
            loop, skips = replace(loop, runs=over.runs), None
        if skips is not None:
            after = tuple(skips.carries.get(v, v) for v in loop.after[:n_carry])
            loop = replace(loop, after=(*after, *loop.after[n_carry:]))
        self._note(loop)
        for value, whole in zip(inputs[n_carry:], stacked, strict=True):
            if over is None or not self._is_of(over, value):
                loops.steps[value] = whole, loop.index
        loops.varying.clear()
        for value in loop.after[: 0 if over else n_carry]:  # named, not expanded
            inside = value not in loops.carries and self.varies(value)
            if inside and kind_of(self.g.dtype(value)) == "f":
                self.names.setdefault(value, value)
        if skips is not None:
            try:
                runs = self.alg.both(loop.runs, self._runs(loop, skips))
                loop = replace(loop, runs=runs)
            except OverBudget:
                del loops.entered[node]
                raise
            self._note(loop)
        return loop

    def _enter_again(
        self,
        loop: Loop,
        first: Loop,
        skips: Skipped | None,
        steps: Sequence[int],
        stacked: Sequence[int],
    ) -> Loop:
        """A loop that computes again what another one does: it has the same carries.

        Args:
            loop: The loop, with names of its own.
            first: The other one.
            skips: The steps that leave its carries.
            steps: What it reads step by step.
            stacked: The arrays of which that is.
        """
        loops, n = self.loops, len(loop.before)
        mine = loop.after[:n]
        if skips is not None:
            mine = tuple(skips.carries.get(v, v) for v in mine)
        theirs = (*first.before, *first.after[:n])
        for value, other in zip((*loop.before, *mine), theirs, strict=True):
            if kind_of(self.g.dtype(value)) == "f":
                self.names.setdefault(value, self.names.get(other, other))
        after = (*first.after[:n], *loop.after[n:])
        again = replace(first, node=loop.node, first=loop.first, after=after)
        self._note(again)
        loops.carries.update((v, (again, k)) for k, v in enumerate(loop.before))
        for value, whole in zip(steps, stacked, strict=True):
            loops.steps.setdefault(value, (whole, first.index))
        loops.varying.clear()
        return again

    def _loop_reversed(
        self, parts: Counted, inputs: Sequence[int], stacked: Sequence[int]
    ) -> Loop | None:
        """The loop over whose steps one goes back; None if it reads no other's steps.

        Of several, such as one that makes positions for another, it is the last. All
        of them then count their steps by one index.

        Raises:
            OverBudget: If it reads one that goes the same way.
        """
        wrote: dict[Node, Loop] = {}
        reads: dict[Node, Loop] = {}
        for value, whole in zip(inputs, stacked, strict=True):
            over = self._writer(value, whole)
            if over is not None:
                wrote[over.node] = over
            elif value in self.loops.steps:
                over = self._reader(value)
                reads[over.node] = over
            elif self.g.node_of(value) is not None:
                raise OverBudget("a loop reads what another one wrote, step by step")
        found = reads | wrote
        if any(x.reverse == parts.reverse for x in found.values()):
            raise OverBudget("a loop reads what another one wrote, step by step")
        if not found:
            return None
        last = found.pop(max(wrote or reads, key=lambda node: max(node.outs)))
        for other in found.values():
            self._count_alike(other.index, last.index)
        return last

    def _writer(self, value: int, whole: int) -> Loop | None:
        """The loop that stacked a whole, if a value is what it stacked at each step."""
        made = self.g.node_of(whole)
        if made is None or made.prim != "scan":
            return None
        loop = self.enter(made)
        return loop if loop.after[made.outs.index(whole)] == value else None

    def _reader(self, value: int) -> Loop:
        """The loop that reads a value at each step too.

        Raises:
            OverBudget: If that loop has no forms.
        """
        _, index = self.loops.steps[value]
        for loop in self.loops.entered.values():
            if loop.index == index and loop.over is None:
                return loop
        raise OverBudget("a loop reads what another one reads, step by step")

    def _count_alike(self, index: Index, other: Index) -> None:
        """Makes the loop over one index one over another index of the same size.

        Raises:
            OverBudget: If another loop goes back over the same steps.
        """
        loops = self.loops
        if index == other:
            return
        same = [loop for loop in loops.entered.values() if loop.index == index]
        if len(same) > 1 or self.alg.sizes[index] != self.alg.sizes[other]:
            raise OverBudget("a loop reads what several others wrote, step by step")
        self._note(replace(same[0], index=other))
        for value, (whole, step) in loops.steps.items():
            loops.steps[value] = whole, other if step == index else step
        loops.closed.clear()
        loops.varying.clear()
        loops.outdated += 1  # forms in the memo may hold the former index
        self.memo = {}

    def _is_of(self, loop: Loop, value: int) -> bool:
        """Whether a value is one of a loop's at each step."""
        return value in self.loops.steps or self.varies(value) == (loop.index,)

    def _with_steps(self, loop: Loop, test: Condition) -> Loop:
        """A while loop with its steps, and where they run.

        Raises:
            OverBudget: If it is not known how many steps there may be.
        """
        alg, k, at = self.alg, test.counter, test.carried
        first = loop.first[k]
        kept = at is None or loop.after[at] == loop.before[at]
        if not kept or kind_of(self.g.dtype(first)) != "i" or self.g.shape(first):
            raise OverBudget("a loop whose bound changes")
        self._note(loop)
        try:
            if self._increment(loop, k) != 1:
                raise OverBudget("a loop that does not count in ones")
        finally:
            self._forget(loop)
        bound = {} if test.bound is None else self.poly(test.bound, ())
        count = alg.add(bound, self.poly(first, ()), -1.0)
        count = alg.add(count, alg.const(float(test.more)))
        most = alg.bounds(count)[1]
        if not 0 < most < MOST_STEPS:
            raise OverBudget("a loop of a number of steps that is not known")
        index = alg.new_index(int(most))
        left = alg.add(count, alg.add(alg.iota(index), alg.const(1.0)), -1.0)
        return replace(loop, index=index, runs=alg.compare("ge", left, True))

    def _forget(self, loop: Loop) -> None:
        del self.loops.entered[loop.node]
        for value in loop.before:
            del self.loops.carries[value]
        self.loops.varying.clear()

    def _note(self, loop: Loop) -> None:
        self.loops.entered[loop.node] = loop
        for k, value in enumerate(loop.before):
            self.loops.carries[value] = loop, k

    def _skipped(self, loop: Loop) -> Skipped | None:
        """The steps that leave all float carries."""
        pairs = zip(loop.before, loop.after, strict=False)
        floats = [p for p in pairs if kind_of(self.g.dtype(p[0])) == "f"]
        if not floats:
            return None
        return skipped(self.g, *zip(*floats, strict=True))

    def _runs(self, loop: Loop, skips: Skipped) -> int:
        """Where a step runs, as a function of the step and of values outside.

        Raises:
            OverBudget: If it depends on what earlier steps computed.
        """
        alg = self.alg
        flag = by_entries(self, self.flag(skips.choice, ()))
        flag = flag if skips.taken else alg.negate(flag)
        leaves = {alg.defs[a][1] for a in alg.poly_leaves(alg.of_bool(flag))}
        if any(v in self.loops.carries or v in loop.after for v in leaves):
            raise OverBudget("steps are skipped as earlier ones decide")
        return flag

    def chosen(self, node: Node, value: int, args: Any) -> Poly:
        """The form of a result of a cond of two branches.

        Raises:
            OverBudget: If it is not known what decides.
        """
        choice, arms = decides(self.g, node), branch_results(self.g, node, value)
        if choice is None or len(arms) != 2:
            raise OverBudget("a choice among several branches")
        other, one = (self.poly(v, args) for v in arms)
        flag = self.flag(choice, ())
        flag = by_entries(self, flag) if self.loops.entered else flag
        return choose(self.alg, flag, one, other)

    def varies(self, value: int) -> tuple[Index, ...]:
        """The steps of entered loops that a value depends on."""
        loops = self.loops
        if not loops.entered:
            return ()
        known = loops.varying.get(value)
        if known is None:
            if value in loops.carries:
                known = (loops.carries[value][0].index,)
            elif value in loops.steps:
                known = (loops.steps[value][1],)
            elif value < min((*loops.carries, *loops.steps)):
                known = ()
            else:
                node = self.g.node_of(value)
                ins = node.ins if node is not None else ()
                known = tuple({i: None for v in ins for i in self.varies(v)})
            loops.varying[value] = known
        return known

    def scanned(self, node: Node, value: int, args: Any, mode: str) -> Poly:
        """The form of one result of a loop."""
        loop, k = self.enter(node), node.outs.index(value)
        try:
            if k < len(loop.first):
                return self._carried(loop, k, args)
            inner = self.poly(loop.after[k], args[1:], mode)
        except NeedSplit as need:
            if need.index == loop.index:
                raise OverBudget(
                    "a loop runs over an array that is joined from several"
                ) from None
            raise
        return self.alg.subst(inner, {loop.index: args[0]})

    def before_step(self, value: int, args: Any, mode: str) -> Poly | None:
        """The form of an input of a body at each step; None if it has none."""
        if value in self.loops.steps:
            whole, step = self.loops.steps[value]
            return self.poly(whole, (step, *args), mode)
        loop, k = self.loops.carries[value]
        if loop.after[k] == loop.before[k]:  # passed on as it is
            return self.poly(loop.first[k], args, mode)
        if not self.g.shape(value) and kind_of(self.g.dtype(value)) == "i":
            return self._counter(loop, k)
        if loop.over is not None and kind_of(self.g.dtype(value)) == "f":
            return self.reverse_carry(loop, k, args)
        return None

    def _counter(self, loop: Loop, k: int) -> Poly | None:
        """A carry to which each step adds the same number."""
        if loop.reverse:
            return None
        alg, step = self.alg, self._increment(loop, k)
        if step is None:
            return None
        first = self.poly(loop.first[k], ())
        count = alg.add(first, alg.scale(alg.iota(loop.index), step))
        dtype = self.g.dtype(loop.before[k])
        return count if within(alg.bounds(count), held_by(dtype)) else None

    def _increment(self, loop: Loop, k: int) -> float | None:
        """The number that each step adds to an integer, if it is one; else None."""
        alg, before = self.alg, loop.before[k]
        own = alg.of_atom(self.leaf(before, ()))
        self.ideal = True  # if the last step does not wrap around, none does
        del self.loops.carries[before]
        try:
            with self.other_memo():
                return alg.as_constant(alg.add(self.poly(loop.after[k], ()), own, -1.0))
        finally:
            self.ideal = False
            self.loops.carries[before] = loop, k

    @contextlib.contextmanager
    def other_memo(self) -> Iterator[None]:
        """Within it, forms are made that hold for the moment only."""
        held, self.memo, before = self.memo, {}, self.loops.outdated
        try:
            yield
        finally:
            self.memo = held if before == self.loops.outdated else {}

    @contextlib.contextmanager
    def proving(self) -> Iterator[None]:
        """Within it, a value whose form would rest on an assumption stays opaque."""
        held, leaves = dict(self.memo), set(self.leaf_values)
        with self.other_memo():
            self.memo.update(held)
            self.assumes = False
            try:
                yield
            finally:
                self.assumes, self.leaf_values = True, leaves

    def _carried(self, loop: Loop, k: int, args: Any) -> Poly:
        """A carry after the last step; see the module's docstring."""
        if loop.after[k] == loop.before[k]:
            return self.poly(loop.first[k], args)
        form = self._opened(loop, k, args)
        own = self.leaf(loop.before[k], args)
        if any(self.alg.kind(a) == "log" for _, mono in form for a, _ in mono):
            return self.alg.log(self._exponential(loop, form, own, k, args))
        return self._summed_steps(loop, self.alg.of_atom(own), form, k, args)

    def _exponential(self, loop: Loop, form: Poly, own: int, k: int, args: Any) -> Poly:
        """The exponential of a carry, as of a logarithm of a sum, after all steps."""
        before = self.alg.of_atom(self.alg.atom("exp", ((own, 1),)))
        return self._summed_steps(
            loop, before, self.alg.exp(form, self.fills.add), k, args
        )

    def _opened(self, loop: Loop, k: int, args: Any) -> Poly:
        """The form of a carry after a step, which is a name in other forms.

        Raises:
            OverBudget: If a loop that goes back changes it in a step that the other
                loop skipped.
        """
        after = loop.after[k]
        name = self.names.pop(after, None)
        try:
            form = self._poly(after, args, FULL)
        finally:
            if name is not None:
                self.names[after] = name
        if loop.over is None or loop.runs == TRUE:
            return form
        alg, before = self.alg, self.poly(loop.before[k], args)
        if alg.difference(reached(alg, form, alg.negate(loop.runs)), before):
            raise OverBudget("a loop goes back over steps that may be skipped")
        return reached(alg, form, loop.runs)

    def _summed_steps(
        self, loop: Loop, own: Poly, form: Poly, k: int, args: Any
    ) -> Poly:
        """The value of `own` after the last step: zero at first, `form` after each."""
        alg, n = self.alg, len(loop.before)
        (((_, ((atom, _),)), _),) = own.items()
        kept: list[Monomial] = []
        rest: Poly = {}
        for (flag, mono), c in form.items():
            if dict(mono).get(atom) == 1 and flag == TRUE and c == 1:
                kept.append(tuple(f for f in mono if f[0] != atom))
            else:
                rest[flag, mono] = c
        first = self.poly(loop.first[k], args)
        first = alg.exp(first, self.fills.add) if alg.kind(atom) == "exp" else first
        if len(kept) != 1 or first:
            raise OverBudget("a carry that is not a sum over the steps")
        gauge = self._gauge(kept[0], dict(zip(loop.before, loop.after, strict=False)))
        terms = alg.mul(rest, {(loop.runs, gauge): 1.0})
        inside = {*loop.before, *loop.after[:n]}
        if any(alg.defs[a][1] in inside for a in alg.poly_leaves(terms)):
            raise OverBudget("a step adds what depends on other carries")
        total = alg.summed_where_equal(terms, loop.index)
        for a, e in gauge:
            total = alg.mul(total, alg.power(self._last(loop, a), -e))
        return total

    def _last(self, loop: Loop, atom: int) -> Poly:
        """A carry after a step, or the exponential of some: after the last one."""
        alg, d = self.alg, self.alg.defs[atom]
        results = dict(
            zip(loop.after, loop.node.outs[: len(loop.before)], strict=False)
        )
        if d[0] == "leaf":
            return self.poly(results[d[1]], d[2][:-1])
        leaf = alg.defs[d[1][0][0]]
        if len(d[1]) == 1 and d[1][0][1] == 1 and leaf[0] == "leaf":
            k, args = loop.after.index(leaf[1]), leaf[2][:-1]
            own = self.leaf(loop.before[k], args)
            try:
                form = self._opened(loop, k, args)
                return self._exponential(loop, form, own, k, args)
            except OverBudget:
                pass
        last = (
            (self.leaf(results[alg.defs[a][1]], alg.defs[a][2][:-1]), e)
            for a, e in d[1]
        )
        return alg.of_atom(alg.atom("exp", alg.monomial(last)))

    def _gauge(self, kept: Monomial, names: Mapping[int, int]) -> Monomial:
        """g(after), where a carry is multiplied by g(before) / g(after)."""
        before, after = [], []
        for a, e in kept:
            leaves = {self.alg.defs[x][1] for x in self.alg.leaves(a)}
            if leaves and leaves <= names.keys():
                before.append((self._renamed(a, names), e))
            else:
                after.append((a, -e))
        gauge = self.alg.monomial(before)
        if gauge != self.alg.monomial(after):
            raise OverBudget("a carry multiplied by something else at each step")
        return gauge

    def _renamed(self, atom: int, names: Mapping[int, int]) -> int:
        """A leaf, or the exponential of some, under other names."""
        alg, d = self.alg, self.alg.defs[atom]
        if d[0] == "leaf" and d[1] in names:
            return alg.atom("leaf", names[d[1]], d[2])
        if d[0] == "exp":
            inner = ((self._renamed(a, names), e) for a, e in d[1])
            return alg.atom("exp", alg.monomial(inner))
        raise OverBudget("a carry scaled by something else")
