"""Finds operands that are slices of larger arrays, such as one layer of a stack.

A model that loops over stacked weights takes one of them per layer. That slice is the
operand: its gradient is a value of the program. The gradient of the whole array is
complete only when all layers have added theirs. The same holds for pieces of an array
that also serves something else.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Set

import jax.numpy as jnp

from rewriter.algebra.canonicalize import TRANSPARENT
from rewriter.program.graph import Graph, Node

_AROUND = TRANSPARENT | {"convert_element_type"}


def layers(graph: Graph) -> Iterator[int]:
    """Values that are one index of the leading axis of an input.

    Args:
        graph: The program; inputs of its loops and constants count as inputs too.
    """
    for node in graph.nodes:
        if node.prim == "unstack":
            if int(node.params["axis"]) == 0 and _is_input(graph, node.ins[0]):
                yield from node.outs
        elif node.prim in ("squeeze", "reshape"):
            part = graph.node_of(node.ins[0])
            if part is not None and _is_one(graph, part, node):
                yield node.outs[0]


def _is_one(graph: Graph, part: Node, node: Node) -> bool:
    """Whether an equation drops the size-1 leading axis of a slice of an input."""
    if part.prim not in ("slice", "dynamic_slice", "split"):
        return False
    if part.prim == "dynamic_slice" and graph.scalar(part.ins[1]) is None:
        return False
    whole, rest = graph.shape(part.ins[0]), graph.shape(node.outs[0])
    one = graph.shape(node.ins[0])
    return (
        len(whole) > 1
        and one == (1, *whole[1:])
        and rest == whole[1:]
        and whole[0] != 1
        and _is_input(graph, part.ins[0])
    )


def _is_input(graph: Graph, value: int) -> bool:
    """Whether a value is an input, perhaps cast."""
    node = graph.node_of(value)
    while node is not None and node.prim in _AROUND:
        node = graph.node_of(node.ins[0])
    return node is None


_CUTS = frozenset({"slice", "split", "unstack"})
_LAYOUT = TRANSPARENT | {"reshape", "transpose", "squeeze", "expand_dims"}
_BEFORE = _AROUND | _LAYOUT


def pieces(graph: Graph, leaves: Collection[int], inner: Set[int]) -> frozenset[int]:
    """Pieces of leaves, where the region does not read the whole leaf.

    One projection may be cut into queries, keys, values and parts for other uses. Then
    the gradient of the whole is not the region's own, but those of the pieces are.

    Args:
        graph: The program.
        leaves: What the region reads.
        inner: Values between those and the region's result, the result too.
    """
    found: set[int] = set()
    for leaf in leaves:
        cut = cuts(graph, [leaf], inner)
        if sum(_size(graph, v) for v in cut) != _size(graph, leaf):
            found |= cut
    return frozenset(found)


def cuts(graph: Graph, leaves: Collection[int], inner: Set[int]) -> frozenset[int]:
    """Pieces of leaves that a region reads, whether or not it reads the rest.

    Args:
        graph: The program.
        leaves: What the region reads.
        inner: Values between those and the region's result, the result too.
    """
    floats = (v for v in leaves if jnp.issubdtype(graph.dtype(v), jnp.floating))
    return frozenset().union(*(_cut(graph, v, inner) for v in floats))


def layouts_read_elsewhere(
    graph: Graph, leaves: Collection[int], inner: Set[int]
) -> frozenset[int]:
    """Layouts of leaves in a region that equations outside of it read, too.

    Keys of several heads may serve two ops. Their cotangents are added in that layout,
    and no value is the gradient of one op in the layout of the leaf.

    Args:
        graph: The program.
        leaves: What the region reads.
        inner: Values between those and the region's result, the result too.
    """
    found: set[int] = set()
    stack = [v for v in leaves if jnp.issubdtype(graph.dtype(v), jnp.floating)]
    while stack:
        for node in graph.users(stack.pop()):
            for value in inner.intersection(node.outs) if node.prim in _LAYOUT else ():
                stack.append(value)
                if any(inner.isdisjoint(n.outs) for n in graph.users(value)):
                    found.add(value)
    return frozenset(found)


def _cut(graph: Graph, leaf: int, inner: Set[int]) -> set[int]:
    """Pieces of a value in a region; none if the region also reads it whole."""
    found: set[int] = set()
    stack = [leaf]
    while stack:
        for node in graph.users(stack.pop()):
            inside = inner.intersection(node.outs)
            if node.prim in _CUTS:
                found |= inside
            elif inside and node.prim in _BEFORE:
                stack += inside
            elif inside:
                return set()
    return found


def _size(graph: Graph, value: int) -> int:
    return math.prod(graph.shape(value))
