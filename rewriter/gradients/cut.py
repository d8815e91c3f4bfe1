"""Restates a match over pieces of the arrays that it reads.

Queries, keys and values that are cut out of one array share one gradient. Another
reader of one of them, such as a loss on the weights, also adds to its gradient. Then
only some of these gradients belong to attention alone, such as that of the values.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from rewriter.algebra.template import Template, apply, template
from rewriter.find.check import check
from rewriter.find.finder import Finder
from rewriter.find.match import Match, region_values
from rewriter.find.precision import with_precision
from rewriter.find.reading import Reading, leaves_of
from rewriter.find.region import Regions
from rewriter.find.stacked import cuts


@dataclass(eq=False)
class Cut:
    """Matches over pieces, for matches of the same reading.

    Attributes:
        regions: The walks over the program's graph.
        known: By the id of a reading, its first match over pieces and the template of
            it; None if there is none.
    """

    regions: Regions
    known: dict[int, tuple[Match, Template] | None] = field(default_factory=dict)

    def up(self, match: Match) -> Match | None:
        """The match over pieces of the arrays that it reads, or None."""
        key = id(match.reading)
        if key not in self.known:
            self.known[key] = self._first(match)
        if self.known[key] is None:
            return None
        first, again = self.known[key]
        if first.value == match.value:
            return first
        found = apply(self.regions.graph, again, match.anchor)
        if found is None or found[0] != match.value:
            return None
        return _with_reading(match, first.reading, tuple(found[1].items()), found[2])

    def _first(self, match: Match) -> tuple[Match, Template] | None:
        graph = self.regions.graph
        cut = cuts(graph, [v for _, v in match.leaves], match.inner)
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
            inner = region_values(find, other.value, set(leaves))
            other, spec = with_precision(graph, match.op, other, spec, inner)
            if spec != match.spec:
                continue
            pairs = tuple((v, v) for v in leaves)
            first = _with_reading(match, other, pairs, frozenset(inner))
            known = template(graph, match.anchor, match.value, frozenset(leaves), first)
            return first and known and (first, known)
        return None


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
