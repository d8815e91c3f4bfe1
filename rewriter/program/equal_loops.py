"""Finds loops that compute the same results, whatever else they stack.

A checkpoint's recomputation runs a loop again, and stacks what its gradients read. So
its equation differs from that of the first run. Its carries are the same. So is what
both stack, such as the positions of blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rewriter import _jax
from rewriter.program.counters import added
from rewriter.program.equations import live

HOISTED = 12
"""The most equations, one above the other, that make what every step reads."""


@dataclass(eq=False)
class Loops:
    """The loops that were seen, by what their carries are.

    Attributes:
        numbers: By content, the number of a value of a body.
        results: By what they are, results of the first such loop.
        seen: Loops that are not in `results` yet: what they are is told once there is a
            recomputation.
        stacked: By results of a loop, the numbers of what its steps give.
        arms: By the number of a result of a cond, what decides, and the numbers of what
            its branches return.
    """

    numbers: dict[Hashable, int] = field(default_factory=dict)
    results: dict[Hashable, tuple[int, ...]] = field(default_factory=dict)
    seen: list[tuple[Any, Sequence[int], tuple[int, ...]]] = field(default_factory=list)
    stacked: dict[tuple[int, ...], tuple[int, ...] | None] = field(default_factory=dict)
    arms: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)

    def first(
        self, graph: Any, eqn: Any, ins: Sequence[int], outs: Sequence[int], again: bool
    ) -> tuple[int, ...]:
        """The results of a loop, where a recomputation has them from an earlier one.

        Args:
            graph: The graph that it is in. It is not kept: it has these loops.
            eqn: A scan.
            ins: Its operands, as values of the graph.
            outs: Its results, as values of the graph; they are returned if there is no
                earlier such loop.
            again: Whether it is part of a checkpoint's recomputation.
        """
        if not again:
            self.seen.append((eqn, ins, tuple(outs)))
            return tuple(outs)
        while self.seen:
            earlier, its_ins, its_outs = self.seen.pop(0)
            for key, part in _Keys(graph, self).of(earlier, its_ins):
                self.results.setdefault(key, its_outs[part])
        same = list(outs)
        for key, part in _Keys(graph, self).of(eqn, ins):
            same[part] = self.results.setdefault(key, tuple(same[part]))
        return tuple(same)


@dataclass(frozen=True)
class _Keys:
    """Keys of loops' last carries, and of what they stack.

    Attributes:
        graph: The graph that they are in.
        loops: The loops that were seen.
    """

    graph: Any
    loops: Loops

    def of(self, eqn: Any, ins: Sequence[int]) -> list[tuple[Hashable, slice]]:
        """What results of a scan are, as far as it is told, and which ones."""
        _, _, n_carry, length = _jax.scan_parts(eqn)
        how = length, bool(eqn.params["reverse"])
        carried = self._outs(eqn, ins, n_carry)
        if carried is None:
            return []
        found = [((*how, carried), slice(0, n_carry))] if n_carry else []
        outs = self._outs(eqn, ins, len(eqn.outvars)) or ()
        for k, x in enumerate(outs[n_carry:], n_carry):
            found.append(((*how, carried, x), slice(k, k + 1)))
        return found

    def _outs(self, eqn: Any, ins: Sequence[int], count: int) -> tuple[int, ...] | None:
        """The numbers of a scan's first carries after a step, and of what it stacks."""
        body, n_consts, n_carry, length = _jax.scan_parts(eqn)
        if eqn.effects:
            return None
        how, given = (length, bool(eqn.params["reverse"])), []
        for k, value in enumerate(ins):
            if k < n_consts:
                given.append(self._outside(value, HOISTED))
            elif k < n_consts + n_carry:
                counter = self._count(eqn, k - n_consts, value)
                own = "input", k - n_consts, value
                given.append(self._number(counter or own))
            else:
                given.append(self._step(value, how))
        return self._results(body, given, count)

    def _step(self, value: int, how: tuple[Any, bool]) -> int:
        """The number of a step of an array, which an earlier loop may have stacked.

        The first run of a loop may have the positions of its blocks from a loop of
        their own, where its recomputation makes them at each step. And a checkpoint may
        save products of the first run's steps.
        """
        node, k = self.graph.producer.get(value, (None, 0))
        counts = node is not None and node.prim == "iota" and not how[1]
        if counts and len(self.graph.shape(value)) == 1:
            return self._number(("count", 0, 1, str(self.graph.dtype(value))))
        if node is None or node.prim != "scan":
            return self._number(("step", value))
        _, _, n_carry, length = _jax.scan_parts(node.eqn)
        if k < n_carry or how != (length, bool(node.params["reverse"])):
            return self._number(("step", value))
        known = self.loops.stacked
        if node.outs not in known:
            known[node.outs] = self._outs(node.eqn, node.ins, len(node.outs))
        made = known[node.outs]
        return made[k] if made else self._number(("step", value))

    def _count(self, eqn: Any, k: int, first: int) -> Hashable | None:
        """What a carry is that counts the steps; the steps of an iota are the same."""
        counts, start = added(eqn, k), self.graph.scalar(first)
        if counts is None or start is None or eqn.params["reverse"]:
            return None
        dtype, by = counts
        return "count", int(start), by, dtype

    def _outside(self, value: int, depth: int) -> int:
        """The number of a value that every step reads; some loops make it themselves.

        The first run of a loop may make its positions step by step, where its
        recomputation makes them before it.
        """
        const, found = self.graph.constants.get(value), self.graph.producer.get(value)
        if const is not None and not np.shape(const):
            return self._literal(const, self.graph.dtype(value))
        if found is None or found[0].signature < 0 or depth == 0:
            return self._number(("input", -1, value))
        operands = tuple(self._outside(i, depth - 1) for i in found[0].ins)
        return self._number((found[0].signature, operands, found[1]))

    def _literal(self, value: Any, dtype: Any) -> int:
        if _jax.is_opaque(value):
            return self._number(("opaque", id(value)))
        return self._number(("literal", str(dtype), np.asarray(value, dtype).tobytes()))

    def _results(
        self, body: Any, given: Sequence[int], count: int
    ) -> tuple[int, ...] | None:
        """The numbers of a body's first results; None if they cannot be told."""
        inner = getattr(body, "jaxpr", body)
        consts = zip(inner.constvars, _jax.consts_of(body), strict=True)
        known = {v: self._number(("constant", id(c))) for v, c in consts}
        known |= dict(zip(inner.invars, given, strict=True))
        signatures = self.graph.signatures.of_body(inner.eqns)
        numbers = dict(zip(map(id, inner.eqns), signatures, strict=True))
        kept, _ = live(inner.eqns, inner.outvars[:count])
        for eqn in kept:
            operands = tuple(self._read(known, a) for a in eqn.invars)
            signature, results = numbers[id(eqn)], None
            if signature >= 0:
                places = range(len(eqn.outvars))
                results = [self._number((signature, operands, k)) for k in places]
            elif eqn.primitive.name == "reduce_precision":
                results = (self._rounded(eqn, *operands),)
            elif _jax.call_kind(eqn) in ("call", "remat"):
                body = _jax.call_body(eqn)
                results = self._results(body, operands, len(eqn.outvars))
            elif _jax.call_kind(eqn) == "cond":
                results = self._chosen(eqn, operands)
            if results is None:
                return None
            known.update(zip(eqn.outvars, results, strict=True))
        return tuple(self._read(known, a) for a in inner.outvars[:count])

    def _rounded(self, eqn: Any, operand: int) -> int:
        if _jax.keeps_precision(eqn):  # a checkpoint saves the same value
            return operand
        return self._number(("reduce_precision", str(eqn.params), operand))

    def _chosen(self, eqn: Any, operands: Sequence[int]) -> list[int] | None:
        """The numbers of the results of a cond; None if they cannot be told.

        A branch that reads what another cond chose in the same way reads what that
        branch of it returned. A checkpoint saves products of a branch like this.
        """
        count, (which, *given) = len(eqn.outvars), operands
        found = []
        for k, branch in enumerate(eqn.params["branches"]):
            arms = [self.loops.arms.get(g, (None, ())) for g in given]
            own = [
                numbers[k] if choice == which else g
                for g, (choice, numbers) in zip(given, arms, strict=True)
            ]
            found.append(self._results(branch, own, count))
        if None in found:
            return None
        results = []
        for numbers in zip(*found, strict=True):
            results.append(self._number(("cond", which, numbers)))
            self.loops.arms[results[-1]] = which, numbers
        return results

    def _read(self, known: dict[Any, int], atom: Any) -> int:
        if not _jax.is_literal(atom):
            return known[atom]
        return self._literal(atom.val, atom.aval.dtype)

    def _number(self, content: Hashable) -> int:
        return self.loops.numbers.setdefault(content, len(self.loops.numbers))
