"""Finds the values that a loop's result is computed from, also outside the loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

import jax.numpy as jnp

from rewriter.program.counted_loops import counted
from rewriter.program.graph import Graph, Node
from rewriter.program.skipped_steps import branch_results


def through(
    graph: Graph, loop: Node, value: int, stops: Set[int]
) -> tuple[frozenset[int], tuple[int, ...]]:
    """What one result of a scan is computed from.

    Args:
        graph: The program.
        loop: The scan.
        value: One of its results.
        stops: Where to stop.

    Returns:
        The values of its body, and of bodies in it, and the values outside.
    """
    parts = counted(loop)
    (scope,) = loop.scope.children[loop.position]
    first = parts.n_consts
    given = [scope.env[v] for v in parts.body.invars[first:]]
    results = [graph.read(scope, v) for v in parts.body.outvars]
    outside = dict(_given_and_whole(graph, given, parts.ins[first:]))
    carried = dict(zip(given, results[: parts.n_carry], strict=False))
    own = {v for v, (position, _) in scope.first_var.items() if position >= 0}
    seen: set[int] = set()
    found: dict[int, None] = {}
    stack = [results[loop.outs.index(value)]]
    while stack:
        current = stack.pop()
        if current in seen or current in stops or current in graph.constants:
            continue
        seen.add(current)
        node = graph.node_of(current)
        if current in outside:
            found[outside[current]] = None
            stack += [carried[current]] if current in carried else []
        elif node is None or not (current in own or _is_in(node, loop)):
            found[current] = None
        elif node.prim == "cond":
            stack += (node.ins[0], *branch_results(graph, node, current))
        else:
            stack += node.ins
    return frozenset(seen - outside.keys() - found.keys()), tuple(found)


def _given_and_whole(
    graph: Graph, given: Sequence[int], outside: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Pairs of what a step is given, and what that is a part of outside.

    What a cond returned step by step is known in a branch as what its branch returned.
    """
    for value, whole in zip(given, outside, strict=True):
        node = graph.node_of(value)
        if node is not None and node.prim == "cond":
            yield from ((v, whole) for v in branch_results(graph, node, value))
        yield value, whole


def _is_in(node: Node, loop: Node) -> bool:
    """Whether a loop's body computes a value, at any depth."""
    scopes = [node.scope, *(scope for scope, _, _ in node.copies)]
    for scope in scopes:
        while scope.parent is not None:
            if scope.parent is loop.scope and scope.call == loop.position:
                return True
            scope = scope.parent
    return False


def after_step(graph: Graph, loop: Node, value: int) -> int:
    """What a step of a scan returns as one of its results."""
    (scope,) = loop.scope.children[loop.position]
    return graph.read(scope, counted(loop).body.outvars[loop.outs.index(value)])


def carries(loop: Node) -> Iterator[int]:
    """The float carries of a scan before each step."""
    parts = counted(loop)
    (scope,) = loop.scope.children[loop.position]
    first = parts.n_consts
    for var in parts.body.invars[first : first + parts.n_carry]:
        if jnp.issubdtype(var.aval.dtype, jnp.floating):
            yield scope.env[var]
