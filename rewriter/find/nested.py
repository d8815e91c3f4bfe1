"""Finds results inside a region that the program reads beside the region's own.

Two norms of one value, with and without a scale, are such a case: both are sites. A
gradient reads the result inside as well, but only to sum it up, as that of the scale.
"""

from __future__ import annotations

from collections.abc import Set

from rewriter import _jax
from rewriter.algebra.canonicalize import LAYOUT_PRIMITIVES, TRANSPARENT
from rewriter.program.graph import Graph, Node

MOVED = LAYOUT_PRIMITIVES | TRANSPARENT | {"convert_element_type"}
NEAR = 24
"""The most values that are followed."""


class Escapes:
    """Finds out whether values that bodies return are read outside."""

    def __init__(self, graph: Graph) -> None:
        self.to: dict[int, set[int | None]] = {}
        stack = [graph.top]
        for var in graph.top.jaxpr.outvars:
            if not _jax.is_literal(var):
                self.to.setdefault(graph.top.env[var], set()).add(None)
        while stack:
            scope = stack.pop()
            for position, children in scope.children.items():
                stack += children
                if children[0].kind in ("call", "remat"):
                    continue  # the results are the values themselves
                eqn = scope.jaxpr.eqns[position]
                for child in children:
                    outs = zip(child.jaxpr.outvars, eqn.outvars, strict=True)
                    for inner, outer in outs:
                        if not _jax.is_literal(inner) and not _jax.is_drop(outer):
                            to = self.to.setdefault(child.env[inner], set())
                            to.add(scope.env[outer])

    def leaves(self, graph: Graph, value: int) -> bool:
        """Whether a body's result is read outside, or returned by the program."""
        seen: set[int | None] = set()
        stack = [*self.to.get(value, ())]
        while stack:
            to = stack.pop()
            if to is None or any(_reads_anew(n, value) for n in graph.users(to)):
                return True
            if to not in seen:
                seen.add(to)
                stack += self.to.get(to, ())
        return False


def is_read_elsewhere(graph: Graph, value: int, inner: Set[int], out: Escapes) -> bool:
    """Whether a value in regions is also read outside, and not only to be summed up.

    Args:
        graph: The program.
        value: The value.
        inner: The values of the regions.
        out: Where values go that bodies return.
    """
    seen, stack = {value}, [(value, False)]
    while stack and len(seen) < NEAR:
        current, multiplied = stack.pop()
        if out.leaves(graph, current):
            return True
        for node in graph.users(current):
            if not inner.isdisjoint(node.outs) or node.prim == "reduce_sum":
                continue
            if node.prim in _jax.BODIES and not _reads_anew(node, current):
                continue
            if node.prim not in MOVED and (multiplied or node.prim != "mul"):
                return True
            stack += [(v, node.prim == "mul") for v in node.outs if v not in seen]
            seen.update(node.outs)
    return False


def _reads_anew(node: Node, value: int) -> bool:
    """Whether an equation reads a value otherwise than to have it in its bodies.

    A loop stacks a value for its backward loop, whose readers are the value's own.
    """
    children = node.scope.children.get(node.position, ())
    return not any(value in c.first_var for c in children)


def is_in_loop_of(graph: Graph, value: int, covered: Set[int]) -> bool:
    """Whether a value is in the body of a loop of which all that is read is covered."""
    node = graph.node_of(value)
    scope = node.scope if node is not None else graph.top
    while scope.parent is not None:
        owner = scope.parent.jaxpr.eqns[scope.call]
        outs = [scope.parent.env.get(v) for v in owner.outvars]
        read = [v for v in outs if v is not None and graph.users(v)]
        ends = {v for v in outs if v in graph.results}
        if (read or ends) and {*read, *ends} <= covered:
            return True
        scope = scope.parent
    return False


def body_values(scan: Node) -> set[int]:
    """Values in the body of a scan, calls in it included."""
    out: set[int] = set()
    scopes = list(scan.scope.children[scan.position])
    while scopes:
        scope = scopes.pop()
        out.update(scope.env.values())
        for children in scope.children.values():
            scopes += children
    return out
