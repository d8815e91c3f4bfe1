"""Tries to read a place of the program as a call of a user's function.

Every assignment of values to operands whose sizes agree is a reading. Its parameters
are the numbers written at that place. The search proves each reading or drops it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rewriter.algebra.canonicalize import NeedSplit
from rewriter.algebra.normal_form import OverBudget
from rewriter.find.declared import bound_sizes, letters
from rewriter.find.finder import Finder
from rewriter.find.reading import Operand, Reading, operand
from rewriter.ops.op import OUT, Op
from rewriter.program.graph import Node
from rewriter.program.walk import equations_above, values_below
from rewriter.support.verdict import Verdict

TRIALS = 400
"""The most readings to try at one place."""


@dataclass(frozen=True)
class Candidate:
    """A proved place, as a check of `Pattern.requires` sees it.

    Attributes:
        shapes: Shape by operand name.
        dtypes: Dtype by operand name.
        params: The parameters read off.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, Any]
    params: Mapping[str, Any]


@dataclass(frozen=True)
class Wanted:
    """A user's pattern, as the search needs it.

    Attributes:
        op: The op; its reference is the function.
        params: Names of the parameters.
        checks: Checks that a place must pass.
    """

    op: Op
    params: tuple[str, ...]
    checks: tuple[Callable[[Candidate], Verdict], ...]

    def readings(self, find: Finder, anchor: Node) -> Iterator[Reading]:
        """Readings of the places below an anchor whose operands and parameters fit."""
        trials = itertools.count()
        for value in self._results(find, anchor):
            if find.done(self.op.name, value):
                return
            for reading in self._readings(find, value):
                if next(trials) > TRIALS:
                    return
                yield reading
                if find.done(self.op.name, value):
                    return

    def _results(self, find: Finder, anchor: Node) -> list[int]:
        below = values_below(find.graph, anchor.outs, lambda n: _inside(find, n), 40)
        found = sorted({*anchor.outs, *below})
        rank = len(letters(self.op.dims[OUT]))
        return [v for v in found if len(find.graph.shape(v)) >= rank][:24]

    def _readings(self, find: Finder, value: int) -> Iterator[Reading]:
        region, numbers = _region(find, value)
        shape = find.graph.shape(value)
        for sizes in bound_sizes(self.op.dims[OUT], shape):
            for names in self._operands(find, region, sizes):
                yield from self._read(find, value, names, numbers)

    def _operands(self, find: Finder, region: list[int], sizes: dict[str, Any]):
        """Assignments of region values to operands with sizes that agree."""
        order = self.op.required

        def extend(k: int, chosen: dict[str, int], sizes: dict[str, Any]):
            if k == len(order):
                yield dict(chosen)
                return
            for v in region:
                if v in chosen.values():
                    continue
                for more in bound_sizes(
                    self.op.dims[order[k]], find.graph.shape(v), sizes
                ):
                    yield from extend(k + 1, {**chosen, order[k]: v}, more)

        yield from itertools.islice(extend(0, {}, sizes), TRIALS)

    def _read(
        self, find: Finder, value: int, names: dict[str, int], numbers: list[float]
    ) -> Iterator[Reading]:
        alg = find.algebra
        inside = frozenset(
            out
            for node in _between(find, value, set(names.values()))
            if node.prim == "dot_general"
            for out in node.outs
        )
        sides = frozenset((v, k) for v in inside for k in (0, 1))
        ev = find.evaluator(
            value,
            inside=inside,
            full_sides=sides,
            names={v: v for v in names.values()},
            roots=names.values(),
        )
        args = ev.indices(value)
        try:
            form = ev.poly(value, args)
        except NeedSplit:  # a result in pieces: the search compares each piece
            form = None
        except OverBudget:
            return
        if form is not None:
            leaves = {alg.defs[a][1] for a in alg.poly_leaves(form)}
            if leaves - set(names.values()):
                return
        operands: dict[str, Operand] = {}
        for name, v in names.items():
            at = ev.indices(v)
            operands[name] = operand(
                alg.of_atom(alg.atom("leaf", v, at)),
                *((() if i is None else (i,)) for i in at),
            )
        groups = tuple(() if i is None else (i,) for i in args)
        for values in itertools.product(numbers, repeat=len(self.params)):
            params = dict(zip(self.params, values, strict=True))
            candidate = Candidate(
                {n: find.graph.shape(v) for n, v in names.items()},
                {n: find.graph.dtype(v) for n, v in names.items()},
                params,
            )
            if not all(check(candidate).ok for check in self.checks):
                continue
            yield Reading(
                self.op.name,
                alg,
                ev.place,
                value,
                args,
                form,
                groups,
                operands,
                params,
                evaluator=ev,
            )


def _region(find: Finder, value: int) -> tuple[list[int], list[float]]:
    """Values that a result is computed from, nearest first, and numbers among them."""
    g = find.graph
    seen, queue, numbers = [], [value], {}
    while queue and len(seen) < 60:
        node = g.node_of(queue.pop(0))
        if node is None or not _inside(find, node):
            continue
        for i in node.ins:
            c = g.scalar(i)
            if c is not None:
                numbers.setdefault(float(c))
            elif i not in seen:
                seen.append(i)
                queue.append(i)
    return seen, [x for x in numbers if math.isfinite(x)][:12]


def _between(find: Finder, value: int, leaves: set[int]) -> Iterator[Node]:
    goes_on = lambda node: leaves.isdisjoint(node.outs)
    for node in equations_above(find.graph, [value], goes_on, most=100):
        if goes_on(node):
            yield node


def _inside(find: Finder, node: Node) -> bool:
    """Whether an equation may be inside a region: local, or a contraction."""
    return find.local(node) or node.prim == "dot_general"
