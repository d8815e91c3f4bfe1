"""Checks whether terms of a sum are read only through that sum.

A gradient need not be one value. Where a value is read twice, by an op and beside it,
its cotangents are added one by one: ``((ct + a) + b)``. Then ``a + b``, the op's
gradient, is no value of the program. If nothing else reads the terms, the first one can
become the whole gradient, and the others zero.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence, Set

import numpy as np

from rewriter import _jax
from rewriter.algebra.canonicalize import TRANSPARENT, kind_of
from rewriter.program.graph import Graph, Node, Scope

SUMS = frozenset({"add_any", "add"})
MOST = 16
"""The most terms of a sum that is examined."""


def terms(graph: Graph, total: int, among: Collection[int]) -> list[int]:
    """The terms of a value that is a sum.

    Args:
        graph: The program.
        total: The sum.
        among: Sums that may be split further; other sums count as terms.
    """
    found: list[int] = []
    stack = [total]
    while stack and len(found) + len(stack) <= MOST:
        value = stack.pop()
        node = graph.node_of(_uncast(graph, value))
        if node is not None and node.prim in SUMS and node.outs[0] in among:
            stack += node.ins
        else:
            found.append(value)
    return [] if stack else found


def larger_sums(
    graph: Graph,
    below: Sequence[int],
    cones: Mapping[int, Set[int]],
    returned: Set[int],
) -> Iterator[tuple[int, ...]]:
    """Terms without a sum of their own, which are read only within larger sums.

    Args:
        graph: The program.
        below: Values that may be such sums.
        cones: Possible terms, with the values that they are computed through.
        returned: What bodies return.
    """
    mixed = _mixed(graph, below, cones)
    for value in below:
        node = graph.node_of(value)
        if value not in mixed or node is None or node.prim not in SUMS:
            continue
        parts = tuple(v for v in terms(graph, value, mixed) if v in cones)
        inside = frozenset().union(*(cones[v] for v in parts))
        if len(parts) > 1 and read_as_a_sum(graph, parts, returned, inside):
            yield parts


def _mixed(
    graph: Graph, below: Sequence[int], cones: Mapping[int, Set[int]]
) -> Set[int]:
    """Values without cones, such as the cotangent itself, and sums with them."""
    mixed: set[int] = set()
    for value in below:
        node = graph.node_of(_uncast(graph, value))
        if value not in cones or (
            node is not None
            and node.prim in SUMS
            and any(i not in cones or i in mixed for i in node.ins)
        ):
            mixed.add(value)
    return mixed


def read_as_a_sum(
    graph: Graph,
    parts: Collection[int],
    returned: Set[int],
    inside: Set[int] = frozenset(),
) -> bool:
    """Whether terms are only read by their sum, and each once.

    Args:
        graph: The program.
        parts: The terms.
        returned: Values that bodies return, which count as read.
        inside: Equations that may read a term to compute another one.
    """
    heap = list(parts)
    heapq.heapify(heap)
    held = set(heap)
    if len(held) != len(heap):
        return False
    while len(held) > 1:
        value = heapq.heappop(heap)
        held.remove(value)
        readers = graph.users(value)
        node = graph.node_of(value)
        if value in parts:
            ends = frozenset(parts) - {value}
            readers = [
                n for n in readers if not leads_to(graph, n, ends, inside, returned)
            ]
        if len(readers) != 1 or value in returned or node is None or node.copies:
            return False
        (reader,) = readers
        if reader.prim in SUMS:
            if reader.ins[0] == reader.ins[1]:
                return False
        elif not _is_cast(graph, reader):
            return False
        (out,) = reader.outs
        if out not in held:
            held.add(out)
            heapq.heappush(heap, out)
    return True


def leads_to(
    graph: Graph, node: Node, ends: Set[int], inside: Set[int], returned: Set[int]
) -> bool:
    """Whether all readers of an equation's results lead to some values only."""
    seen: set[int] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        for out in current.outs:
            if out in ends or out in seen:
                continue
            if out not in inside or out in returned:
                return False
            seen.add(out)
            stack += graph.users(out)
    return True


def returned(graph: Graph) -> set[int]:
    """Values that bodies return, except bodies of transparent calls."""
    return {
        scope.env[var]
        for scope in _scopes(graph)
        if scope.kind not in ("call", "remat")
        for var in scope.jaxpr.outvars
        if not _jax.is_literal(var)
    }


def _scopes(graph: Graph) -> Iterator[Scope]:
    stack = [graph.top]
    while stack:
        scope = stack.pop()
        yield scope
        for children in scope.children.values():
            stack += children


def _is_cast(graph: Graph, node: Node) -> bool:
    """Whether an equation copies or casts a float."""
    if node.prim in TRANSPARENT:
        return len(node.outs) == 1
    return node.prim == "convert_element_type" and all(
        kind_of(graph.dtype(v)) == "f" for v in (*node.ins, *node.outs)
    )


def _uncast(graph: Graph, value: int) -> int:
    node = graph.node_of(value)
    while node is not None and _is_cast(graph, node):
        value = node.ins[0]
        node = graph.node_of(value)
    return value


def widest(graph: Graph, values: Collection[int]) -> int:
    """The first of the values with the widest dtype."""
    return max(values, key=lambda v: (np.dtype(graph.dtype(v)).itemsize, -v))
