"""Restates a match over pieces of the arrays that it reads.

Queries, keys and values that are cut out of one array share one gradient. Another
reader of one of them, such as a loss on the weights, also adds to its gradient. Then
only some of these gradients belong to attention alone, such as that of the values. Keys
that two attentions read share one gradient, too, but only in the layout that both read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Set
from dataclasses import dataclass, field, replace

from rewriter.algebra.template import Template, apply, template
from rewriter.find.check import check
from rewriter.find.finder import Finder
from rewriter.find.match import Match
from rewriter.find.precision import with_precision
from rewriter.find.reading import Reading, leaves_of
from rewriter.find.region import Regions, region_values
from rewriter.find.sliced_operands import cuts, layouts_read_elsewhere
from rewriter.gradients.cotangents import is_float
from rewriter.ops.spec import Spec
from rewriter.program.graph import Scope

MORE = 1.125
"""How many numbers more than the match its restatement may read."""


@dataclass(eq=False)
class OperandPieces:
    """Matches over pieces, for matches of the same reading.

    Attributes:
        regions: The walks over the program's graph.
        known: By the id of a reading, and whether pieces are what a body is given,
            and made of some leaves. Its first match over pieces and the template of
            it; None if there is none.
    """

    regions: Regions
    known: dict[tuple[int, bool, bool], tuple[Match, Template] | None] = field(
        default_factory=dict
    )

    def up(
        self,
        match: Match,
        body: Scope | None = None,
        made_of: Set[int] = frozenset(),
    ) -> Match | None:
        """The match over pieces of the arrays that it reads, or None.

        Args:
            match: The match.
            body: A body that computes the match. Pieces are then what it is given,
                such as queries that were scaled or laid out outside of it.
            made_of: Leaves. If there are any, only what is made of them is a piece.
        """
        key = id(match.reading), body is not None, bool(made_of)
        if key not in self.known:
            self.known[key] = self._first(match, body, made_of)
        if self.known[key] is None:
            return None
        first, again = self.known[key]
        if first.value == match.value:
            return first
        found = apply(self.regions.graph, again, match.anchor)
        if found is None or found[0] != match.value:
            return None
        restated = dataclasses.replace(match, spec=first.spec)
        leaves = tuple(found[1].items())
        return _with_reading(restated, first.reading, leaves, found[2])

    def _first(
        self, match: Match, body: Scope | None, made_of: Set[int]
    ) -> tuple[Match, Template] | None:
        graph = self.regions.graph
        if body is None:
            leaves = {v for _, v in match.leaves}
            cut = cuts(graph, leaves, match.inner)
            cut |= layouts_read_elsewhere(graph, leaves, match.inner)
            cut = cut and cut | leaves
        else:
            given = {v for v, (at, _) in body.first_var.items() if at < 0}
            given = {v for v in given if is_float(graph.dtype(v))}  # masks are read
            inside = self._made_of(match, made_of) if made_of else match.inner
            cut = inside & given - {match.value}
            cut = cut and cut | given.intersection(v for _, v in match.leaves)
        if not cut or match.op.parts:
            return None
        find = Finder(graph, match.reading.algebra, self.regions).at_pieces(cut)
        for other in match.pattern.propose(find, match.anchor):
            if other.value != match.value:
                continue
            spec, problem = check(graph, match.op, other)
            if problem is not None:
                continue
            leaves = leaves_of(other)
            inner = region_values(find.graph, other.value, set(leaves))
            other, spec = with_precision(graph, match.op, other, spec, inner)
            if body is None and not _is_the_same_use(spec, match.spec):
                continue
            pairs = tuple((v, v) for v in leaves)
            restated = dataclasses.replace(match, spec=spec)
            first = _with_reading(restated, other, pairs, frozenset(inner))
            known = template(graph, match.anchor, match.value, frozenset(leaves), first)
            return first and known and (first, known)
        return None

    def _made_of(self, match: Match, leaves: Set[int]) -> set[int]:
        """Values of the region that depend on some leaves."""
        found, todo = set(leaves), list(leaves)
        while todo:
            for node in self.regions.graph.users(todo.pop()):
                new = match.inner.intersection(node.outs) - found
                found |= new
                todo += new
        return found


def _is_the_same_use(spec: Spec, other: Spec) -> bool:
    """Whether uses differ at most in how axes of the same numbers are counted.

    A program may merge heads with the batch before it cuts queries out of one array.
    They are heads in that array, and sequences in its pieces. Lengths are then repeated
    for each, which takes little, and a mask is not.
    """
    size = lambda spec: sum(math.prod(shape) for _, shape in spec.shapes)
    if spec == other or spec.symbolic or other.symbolic:
        return spec == other
    alike = replace(spec, shapes=other.shapes) == other
    return alike and size(spec) <= MORE * size(other)


def _with_reading(
    match: Match,
    reading: Reading,
    leaves: tuple[tuple[int, int], ...],
    inner: frozenset[int],
) -> Match | None:
    """A match with another reading, if its leaves are available."""
    if any(v not in match.place.defined for _, v in leaves):
        return None
    return dataclasses.replace(match, reading=reading, leaves=leaves, inner=inner)
