"""Applies proved gradients to another match with the same reading.

Layers repeat. Where a gradient's equations equal those of a proved one, down to the
leaves and the cotangent, nothing is proved twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from rewriter.algebra.template import Template, go, same_cone, way
from rewriter.find.match import Match
from rewriter.gradients.addends import read_as_a_sum
from rewriter.gradients.backward import Backward
from rewriter.gradients.cotangents import below, cancelled_reads, cone
from rewriter.gradients.function_parameters import results_here
from rewriter.program.graph import Graph

Look = Callable[[Graph, Template, int], Iterator[int]]


@dataclass(frozen=True, eq=False)
class ProvedGradients:
    """A template of proved gradients, to be found again elsewhere.

    Attributes:
        match: The match that they belong to.
        cotangent: The cotangent there.
        parts: By leaf, the equations of its gradient and the way to them from the
            cotangent; also those of terms that become zero.
        unread: Leaves that no gradient depends on.
    """

    match: Match
    cotangent: int
    parts: Mapping[int, tuple[Template, ...]]
    unread: frozenset[int] = frozenset()


def known(graph: Graph, match: Match, backward: Backward) -> ProvedGradients:
    """Makes a template of proved gradients."""
    leaves = (v for _, v in match.leaves)
    stops = frozenset(
        [
            *leaves,
            *results_here(graph, match).values(),
            *cancelled_reads(graph, match),
            backward.cotangent,
        ]
    )

    def part(value: int) -> Template:
        inside = cone(graph, value, stops) or ()
        reached = {i for v in inside for i in graph.node_of(v).ins if i in stops}
        path = way(graph, (backward.cotangent,), value) or ()
        return Template(match.node, value, frozenset(reached), path, None)

    parts = {
        leaf: tuple(map(part, (value, *backward.zeros.get(leaf, ()))))
        for leaf, value in backward.grads.items()
        if value not in backward.shared
    }
    return ProvedGradients(match, backward.cotangent, parts, backward.unread)


def reapplied(
    graph: Graph,
    proved: Sequence[ProvedGradients],
    match: Match,
    candidates: Sequence[int],
    returned: Set[int],
) -> Backward | None:
    """The gradients of a match that equal proved ones; as many as possible.

    Args:
        graph: The program.
        proved: Gradients of matches of the same reading.
        match: The match.
        candidates: Candidates for its cotangent.
        returned: What bodies return.
    """
    best: Backward | None = None
    for one in proved:
        for look in (_at_its_place, _anywhere_below):
            for cotangent in candidates:
                found = _gradients_like(graph, one, match, cotangent, look, returned)
                if len(found.grads) == len(one.parts):
                    return found
                if found.grads and (best is None or len(found.grads) > len(best.grads)):
                    best = found
    return best


def _gradients_like(
    graph: Graph,
    one: ProvedGradients,
    match: Match,
    cotangent: int,
    look: Look,
    returned: Set[int],
) -> Backward:
    """The proved gradients that a match has too, from one cotangent."""
    mine = dict(match.leaves)
    to = {a: mine[name] for name, a in one.match.leaves}
    to |= _paired(results_here(graph, one.match), results_here(graph, match))
    to[one.cotangent] = cotangent
    grads: dict[int, int] = {}
    zeros: dict[int, tuple[int, ...]] = {}
    inner: frozenset[int] = frozenset()
    for leaf, parts in one.parts.items():
        found = [_like(graph, p, to, look(graph, p, cotangent)) for p in parts]
        if None in found:
            continue
        values = tuple(value for value, _ in found)
        inside = frozenset().union(*(cone for _, cone in found))
        if len(values) > 1 and not read_as_a_sum(graph, values, returned, inside):
            continue
        grads[to[leaf]] = values[0]
        if len(values) > 1:
            zeros[to[leaf]] = values[1:]
        inner |= inside
    spare = frozenset(to[leaf] for leaf in one.unread)
    return Backward(cotangent, grads, inner - match.inner, zeros, spare)


def _paired(there: Mapping[int, int], here: Mapping[int, int]) -> dict[int, int]:
    """The results of a parameter at one match to those at another."""
    return {value: here[name] for name, value in there.items() if name in here}


def _like(
    graph: Graph, part: Template, to: Mapping[int, int], places: Iterator[int]
) -> tuple[int, frozenset[int]] | None:
    """The value with a gradient's equations over other leaves, and its inner values."""
    for value in places:
        found = same_cone(graph, part, value)
        if found and all(to.get(a, a) == b for a, b in found[0].items()):
            return value, found[1]
    return None


def _at_its_place(graph: Graph, part: Template, cotangent: int) -> Iterator[int]:
    """The gradient at the end of the same path from the cotangent, or None."""
    value = go(graph, (cotangent,), part.path) if part.path else None
    return iter(() if value is None else (value,))


def _anywhere_below(graph: Graph, part: Template, cotangent: int) -> Iterator[int]:
    """Values below the cotangent with the gradient's shape."""
    shape = graph.shape(part.value)
    return (v for v in below(graph, cotangent) if graph.shape(v) == shape)
