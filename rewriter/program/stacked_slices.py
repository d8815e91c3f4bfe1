"""Finds loops that only cut an array into blocks, and stack them.

JAX makes them where it differentiates a loop that reads its blocks by `dynamic_slice`:
what does not depend on the carries is computed beforehand, for all steps.
"""

from __future__ import annotations

from collections.abc import Collection

from rewriter.program.counted_loops import counted
from rewriter.program.graph import Graph

DEPTH = 12
"""The most equations between a block and the array."""


def sliced(graph: Graph, value: int, layouts: Collection[str]) -> int | None:
    """The array of which a value is a stack of blocks, made by a scan; or None.

    Args:
        graph: The program.
        value: The value.
        layouts: Primitives that only move numbers.
    """
    return graph.known("sliced", value, lambda: _sliced(graph, value, layouts))


def _sliced(graph: Graph, value: int, layouts: Collection[str]) -> int | None:
    loop = graph.node_of(value)
    if loop is None or loop.prim != "scan":
        return None
    parts = counted(loop)
    k = loop.outs.index(value)
    if k < parts.n_carry:
        return None
    (scope,) = loop.scope.children[loop.position]
    at = graph.read(scope, parts.body.outvars[k])
    given = dict(zip((scope.env[v] for v in parts.body.invars), parts.ins, strict=True))
    carries = parts.body.invars[parts.n_consts : parts.n_consts + parts.n_carry]
    for carry in carries:
        given.pop(scope.env[carry], None)
    for _ in range(DEPTH):
        node = graph.node_of(at)
        inside = node is not None and at in scope.first_var
        if not inside or scope.first_var[at][0] < 0:
            return given.get(at)
        if node.prim not in layouts:
            return None
        at = node.ins[0]
    return None
