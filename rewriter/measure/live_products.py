"""Finds matches whose matrix products stay computed, since others read them.

A replaced region disappears only if nothing else reads its intermediate values. A
program that returns attention's weights, or keeps them for a gradient, computes them
anyway: the kernel would add to that time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rewriter import _jax
from rewriter.algebra.canonicalize import STRUCTURAL
from rewriter.find.match import Match
from rewriter.gradients.backward import Backward
from rewriter.program.counted_loops import LOOPS
from rewriter.program.graph import Graph, Node, Scope
from rewriter.site.facts import Facts

WHY = (
    "{reader} a value inside of it, so its products would be computed twice; "
    "if a gradient reads it, optimize the function before differentiating it"
)


def with_live_products(graph: Graph, facts: Sequence[Facts]) -> dict[int, str]:
    """Finds the matches whose contractions stay computed when all are replaced.

    Args:
        graph: The program.
        facts: The matches that are replaced, with the gradients replaced with them.

    Returns:
        What reads a value inside of each such match, as in ``WHY``, by the `id` of its
        facts.
    """
    returned = _returned(graph)
    live = _live(graph)
    gone = [(f, _region(f.match, f.backward)) for f in facts]
    needed: dict[int, str] = {}
    while gone:
        inside = frozenset().union(*(region.values for _, region in gone))
        read = returned.union(*(region.read for _, region in gone))
        outside = _Outside(inside, read, returned, live)
        readers = {id(f): _reader(graph, region, outside) for f, region in gone}
        reached = {key: reader for key, reader in readers.items() if reader}
        if not reached:
            break
        needed |= reached
        gone = [(f, region) for f, region in gone if id(f) not in reached]
    return needed


def _returned(graph: Graph) -> set[int]:
    """Values that bodies return, beyond those of calls that are looked through.

    What a loop stacks for its backward loop alone is not returned: that loop's
    equations read it. So it is with what a branch returns for the same branch of its
    gradients.
    """
    out: set[int] = set()
    passed: list[tuple[int, int, str]] = []  # a value in a body, and what it is outside
    scopes: list[Scope] = [graph.top]
    while scopes:
        scope = scopes.pop()
        for children in scope.children.values():
            scopes += children
        if scope.kind in ("call", "remat"):
            continue
        for value, whole in _results(graph, scope):
            if whole is None:
                out.add(value)
            else:
                passed.append((value, whole, scope.kind))
    more = True
    while more:
        more = False
        for value, whole, kind in passed:
            if value not in out and (
                whole in out
                or not all(
                    _reads_alike(graph, kind, n, whole) for n in graph.users(whole)
                )
            ):
                out.add(value)
                more = True
    return out


def _results(graph: Graph, scope: Scope) -> Iterator[tuple[int, int | None]]:
    """Each value that a body returns, and what it is outside; None if it is itself."""
    results = scope.jaxpr.outvars
    if scope.kind == "cond" and scope.parent is not None:
        outer = scope.parent.jaxpr.eqns[scope.call].outvars
        wholes = [scope.parent.env.get(v, UNREAD) for v in outer]
    else:
        wholes = graph.stacked.get(id(scope), (None,) * len(results))
    for var, whole in zip(results, wholes, strict=True):
        if not _jax.is_literal(var) and whole != UNREAD:
            yield scope.env[var], whole


UNREAD = -1
"""In place of a value that nobody reads."""


def _reads_alike(graph: Graph, kind: str, node: Node, value: int) -> bool:
    """Whether an equation reads a value in the bodies that it comes from.

    It is a loop that reads it one step at a time, or a cond of the same choice.
    """
    if kind != "cond":
        return _step_by_step(node, value)
    made = graph.node_of(value)
    if node.prim != "cond" or made is None or value == node.ins[0]:
        return False
    return graph.one_number(node.ins[0]) == graph.one_number(made.ins[0])


def _step_by_step(node: Node, value: int) -> bool:
    """Whether an equation is a loop that reads a value one step at a time."""
    if node.prim != "scan":
        return False
    _, n_consts, n_carry, _ = _jax.scan_parts(node.eqn)
    return value not in node.ins[: n_consts + n_carry]


SAVED = "a checkpoint saves its products and makes the result from them again"


@dataclass(frozen=True)
class _Region:
    """Values of a match and its gradients: all, the results, and what is read."""

    values: frozenset[int]
    results: frozenset[int]
    read: frozenset[int]


def _region(match: Match, backward: Backward | None) -> _Region:
    leaves = frozenset(v for _, v in match.leaves)
    if backward is None:
        return _Region(match.inner, frozenset({match.value}), leaves)
    return _Region(
        match.inner | backward.inner,
        frozenset({match.value, *backward.results}),
        leaves | {backward.cotangent},
    )


def _live(graph: Graph) -> set[int]:
    """Values that results or effects of some body depend on.

    Differentiation leaves equations behind that nobody reads, such as those of a
    row's maximum.
    """
    stack: list[int] = []
    scopes: list[Scope] = [graph.top]
    while scopes:
        scope = scopes.pop()
        for children in scope.children.values():
            scopes += children
        results = (v for v in scope.jaxpr.outvars if not _jax.is_literal(v))
        if scope.kind not in ("call", "remat"):
            stack += [scope.env[v] for v in results]
    for node in graph.nodes:
        if node.eqn.effects or node.prim in _jax.BODIES:
            stack += node.ins
    live: set[int] = set()
    while stack:
        value = stack.pop()
        if value not in live:
            live.add(value)
            node = graph.node_of(value)
            stack += node.ins if node is not None else ()
    return live


@dataclass(frozen=True)
class _Outside:
    """What decides whether a value of a region is read from outside of all regions."""

    inside: frozenset[int]
    """Values of all regions."""
    read: set[int]
    """Values that bodies return or regions read."""
    returned: set[int]
    """Values that bodies return."""
    live: set[int]
    """Values that some result depends on."""


def _reader(graph: Graph, region: _Region, outside: _Outside) -> str:
    """What reads a contraction of the region from outside; "" if nothing does."""
    parts = region.values - region.results
    stack = [v for v in parts if _heavy(graph.node_of(v))]
    loops = {n.outs: n for v in parts if (n := graph.node_of(v)) and n.prim in LOOPS}
    stack += [out for node in loops.values() for out in node.outs]
    seen = set(stack)
    while stack:
        value = stack.pop()
        if value in outside.read:
            return _of_results(graph, value, outside)
        for node in graph.users(value):
            if outside.live.isdisjoint(node.outs):
                continue
            away = outside.inside.isdisjoint(node.outs)
            if away or _cuts_more(node, outside.inside, outside.live):
                line = _jax.source_of(node.eqn)
                return f"{line} reads" if line else "another equation reads"
            for out in node.outs:
                if out in parts and out not in seen:
                    seen.add(out)
                    stack.append(out)
    return ""


def _of_results(graph: Graph, value: int, outside: _Outside) -> str:
    """Says which results hold a value: the program's, a body's or another match's."""
    if value not in outside.returned:
        return "another site reads"
    results = graph.top.jaxpr.outvars
    own = {graph.top.env[v] for v in results if not _jax.is_literal(v)}
    return "the program returns" if value in own else "a loop or branch returns"


def _cuts_more(node: Node, inside: frozenset[int], live: set[int]) -> bool:
    """Whether a product is cut into pieces, of which others are read elsewhere."""
    pieces = node.outs if node.prim in ("split", "unstack") else ()
    return any(v in live and v not in inside for v in pieces)


def _heavy(node: Node | None) -> bool:
    if node is None:
        return False
    if node.prim == "dot_general":
        return bool(node.params["dimension_numbers"][0][0])
    return node.prim in STRUCTURAL
