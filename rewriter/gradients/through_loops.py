"""What a result of a loop is computed from, inside the loop and outside of it."""

from __future__ import annotations

from collections.abc import Iterator, Set

import jax.numpy as jnp

from rewriter.program.counted import counted
from rewriter.program.graph import Graph, Node


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
    outside = dict(zip(given, parts.ins[first:], strict=True))
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
        else:
            stack += node.ins
    return frozenset(seen - outside.keys() - found.keys()), tuple(found)


def _is_in(node: Node, loop: Node) -> bool:
    """Whether a loop's body computes a value, at any depth."""
    scopes = [node.scope, *(scope for scope, _, _ in node.copies)]
    for scope in scopes:
        while scope.parent is not None:
            if scope.parent is loop.scope and scope.call == loop.position:
                return True
            scope = scope.parent
    return False


def carries(loop: Node) -> Iterator[int]:
    """The float carries of a scan before each step."""
    parts = counted(loop)
    (scope,) = loop.scope.children[loop.position]
    first = parts.n_consts
    for var in parts.body.invars[first : first + parts.n_carry]:
        if jnp.issubdtype(var.aval.dtype, jnp.floating):
            yield scope.env[var]
