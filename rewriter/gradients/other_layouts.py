"""Extends a match to values that are its result in another layout or scale.

The program need not compute the cotangent of an op's result. Where the result is only
transposed, the program may hold the cotangent of the transpose instead. The region is
then extended down to the transpose, which is the same op in another layout.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from rewriter.algebra.canonicalize import (
    LAYOUT,
    LAYOUT_PRIMITIVES,
    TRANSPARENT,
    Evaluator,
)
from rewriter.algebra.normal_form import TRUE, Index
from rewriter.find.check import check
from rewriter.find.match import Match
from rewriter.find.reading import Reading, split_digits
from rewriter.find.region import Regions
from rewriter.gradients.cotangents import cotangents
from rewriter.program.graph import Graph, Node

LINEAR = LAYOUT_PRIMITIVES | TRANSPARENT | {"mul", "div", "neg"}
MOST = 6
"""The most equations below a result to examine."""


@dataclass(eq=False)
class OtherLayouts:
    """Extended readings, for matches of the same reading.

    Attributes:
        regions: The walks over the program's graph.
        returned: What bodies return.
        known: By the id of a reading and a number of equations, the reading that many
            equations further down; None if it is not proved.
    """

    regions: Regions
    returned: Set[int]
    known: dict[tuple[int, int], Reading | None] = field(default_factory=dict)

    def below(self, match: Match) -> Iterator[Match]:
        """The match, extended to values that may have a cotangent, nearest first."""
        graph, reading = self.regions.graph, match.reading
        inner = match.inner
        first = _only_readers(graph, reading.value, self.returned)
        here = _only_readers(graph, match.value, self.returned)
        for count, (like, step) in enumerate(zip(first, here, strict=False)):
            if not _same(like, step):
                return
            node, (value,) = step.node, step.node.outs
            inner |= {value}
            if self.regions.place(node.scope) is not match.place:
                return
            lower = dataclasses.replace(
                match, node=node, value=value, inner=inner, copies=_copies(match, node)
            )
            if not cotangents(graph, lower):
                continue
            key = (id(reading), count)
            if key not in self.known:
                self.known[key] = _taken_down(graph, match, like.node.outs[0])
            if self.known[key] is not None:
                yield dataclasses.replace(lower, reading=self.known[key])


@dataclass(frozen=True)
class _Step:
    """An equation that changes the layout or scale of a value."""

    value: int
    node: Node


def _only_readers(graph: Graph, value: int, returned: Set[int]) -> Iterator[_Step]:
    """Steps down from a value, each the only reader of the one before.

    Their results keep its dtype and number of elements.
    """
    size, dtype = math.prod(graph.shape(value)), graph.dtype(value)
    for _ in range(MOST):
        readers = graph.users(value)
        if len(readers) != 1 or value in returned:
            return
        (node,) = readers
        if node.prim not in LINEAR or len(node.outs) != 1:
            return
        (out,) = node.outs
        if graph.dtype(out) != dtype or math.prod(graph.shape(out)) != size:
            return
        yield _Step(value, node)
        value = out


def _same(one: _Step, other: _Step) -> bool:
    """Whether two steps are equal, including their numbers."""
    others = [[i for i in s.node.ins if i != s.value] for s in (one, other)]
    at = [s.node.ins.index(s.value) for s in (one, other)]
    same = one.node.signature == other.node.signature
    return same and others[0] == others[1] and at[0] == at[1]


def _copies(match: Match, node: Node) -> int:
    """How often the region is computed again in the same body."""
    again = sum(scope is node.scope for scope, _, _ in node.copies)
    return min(match.copies, again)


def _taken_down(graph: Graph, match: Match, value: int) -> Reading | None:
    """The reading of a match whose result is in another layout or scale."""
    reading, alg = match.reading, match.reading.algebra
    ev = Evaluator(graph, alg, names={reading.value: reading.value})
    args = ev.indices(value)
    form, args = split_digits(alg, ev.poly(value, args, LAYOUT), args)
    if len(form) != 1:
        return None
    ((flag, mono), c) = next(iter(form.items()))
    (atom, power), *more = mono or ((None, 0),)
    if flag != TRUE or more or power != 1 or alg.kind(atom) != "leaf":
        return None
    _, name, at = alg.defs[atom][:3]
    to: dict[int, Index] = {}
    if name != reading.value or not all(map(_paired, at, reading.args, [to] * len(at))):
        return None
    args = tuple(alg.subst_index(a, to) for a in args)
    lower = _moved(reading, value, args, c)
    spec, problem = check(graph, match.op, lower)
    return lower if problem is None and spec == match.spec else None


def _moved(reading: Reading, value: int, args: tuple[Index, ...], c: float) -> Reading:
    """A reading of another value, which is c times the same in another layout.

    Args:
        reading: The reading.
        value: The other value.
        args: Its indices, those of the reading's form.
        c: The number.
    """
    alg, times, proof = reading.algebra, reading.times, reading.proof
    if c != 1:
        times = alg.scale(alg.const(1.0) if times is None else times, c)
    return dataclasses.replace(
        reading,
        value=value,
        args=args,
        form=None if reading.form is None else alg.scale(reading.form, c),
        times=times,
        plus=None if reading.plus is None else alg.scale(reading.plus, c),
        proof=None if proof is None else _moved(proof, value, args, c),
    )


def _paired(a: Index, b: Index, to: dict[int, Index]) -> bool:
    """Whether two index arguments are equal up to names; the names are noted."""
    if isinstance(a, int) and b is not None:
        to[a] = b
        return True
    if a is None or b is None or isinstance(b, int):
        return a is b
    same = a[0] == b[0] == "cat" and a[3] == b[3]
    return same and _paired(a[1], b[1], to) and _paired(a[2], b[2], to)
