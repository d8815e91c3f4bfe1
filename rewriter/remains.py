"""What of a region would be computed all the same, were its result computed otherwise.

A replaced region only goes away if nothing else reads its parts. A program that
returns attention's weights, or keeps them for a gradient, computes them anyway: the
kernel would come on top.
"""

from __future__ import annotations

from collections.abc import Sequence

from rewriter import _jax
from rewriter.canonicalize import STRUCTURAL
from rewriter.graph import Graph, Node, Scope
from rewriter.match import Match

WHY = (
    "its products are read elsewhere too, so they would be computed twice; "
    "if a gradient reads them, optimize the function before differentiating it"
)


def computed_anyway(graph: Graph, matches: Sequence[Match]) -> set[int]:
    """The ids of matches whose contractions stay, though all of them be replaced."""
    returned = _returned(graph)
    alive = list(matches)
    while alive:
        inside = frozenset().union(*(m.inner for m in alive))
        read = returned | {v for m in alive for _, v in m.leaves}
        kept = [m for m in alive if not _reaches(graph, m, inside, read)]
        if len(kept) == len(alive):
            break
        alive = kept
    return {id(m) for m in matches} - {id(m) for m in alive}


def _returned(graph: Graph) -> set[int]:
    """Values that bodies return, beyond those of calls that are looked through."""
    out: set[int] = set()
    scopes: list[Scope] = [graph.top]
    while scopes:
        scope = scopes.pop()
        for children in scope.children.values():
            scopes += children
        if scope.kind not in ("call", "remat"):
            results = (v for v in scope.jaxpr.outvars if not _jax.is_literal(v))
            out.update(scope.env[v] for v in results)
    return out


def _reaches(
    graph: Graph, match: Match, inside: frozenset[int], read: set[int]
) -> bool:
    """Whether a contraction of the region is read from outside the regions."""
    stack = [v for v in match.inner if v != match.value and _heavy(graph.node_of(v))]
    seen = set(stack)
    while stack:
        value = stack.pop()
        if value in read:
            return True
        for node in graph.users(value):
            if inside.isdisjoint(node.outs):
                return True
            for out in node.outs:
                if out in match.inner and out != match.value and out not in seen:
                    seen.add(out)
                    stack.append(out)
    return False


def _heavy(node: Node | None) -> bool:
    if node is None:
        return False
    if node.prim == "dot_general":
        return bool(node.params["dimension_numbers"][0][0])
    return node.prim in STRUCTURAL
