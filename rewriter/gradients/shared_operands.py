"""Gradients of operands that other ops read too, through one matrix product.

Queries, a gate and an up branch may be cut out of one product ``x·w``. Its cotangent
joins theirs, ``concatenate dq dg du``, and the gradient of w is a product with all of
it: the op's own gradient plus a share of the others. No value of the program is the
op's own gradient. So its pieces, dg and du, become zero, and the gradient is added to
what is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from rewriter.algebra.canonicalize import TRANSPARENT
from rewriter.gradients.addends import SUMS, leads_to
from rewriter.gradients.cotangents import Cones
from rewriter.program.graph import Graph, Node

CASTS = TRANSPARENT | {"convert_element_type"}


@dataclass(frozen=True, eq=False)
class Shares:
    """Values that are linear in a cotangent, and in what other ops join to it.

    Attributes:
        foreign: What other ops join to it.
        pieces: A value to its pieces: the values that depend on the cotangent alone,
            through which all of it reaches the value.
        cones: A value to those between it and its pieces, itself too.
        own: A piece to the values that it is computed through.
    """

    foreign: frozenset[int]
    pieces: Mapping[int, frozenset[int]]
    cones: Mapping[int, frozenset[int]]
    own: Mapping[int, frozenset[int]]


def shares(
    graph: Graph, reached: Sequence[int], moving: Set[int], pure: Cones
) -> Shares | None:
    """The values that may be gradients with a share of others; None without any.

    Args:
        graph: The program.
        reached: Values below the cotangent, in program order.
        moving: Those of them that are linear in it.
        pure: Gives values computed from the leaves, the cotangent, and what cancels
            in the reading.
    """
    foreign = _foreign(graph, reached, moving, pure)
    if not foreign:
        return None
    mixed = Cones(graph, pure.stops | foreign)
    pieces: dict[int, frozenset[int]] = {}
    cones: dict[int, frozenset[int]] = {}
    own: dict[int, frozenset[int]] = {}
    for value in reached:
        if value not in moving or pure.of(value) is not None or not mixed.of(value):
            continue
        ins = set(graph.node_of(value).ins) & moving  # type: ignore[union-attr]
        through = {i for i in ins if i in pieces}
        new = {i: pure.of(i) for i in ins - through}
        own.update((i, inside) for i, inside in new.items() if inside)
        ends = frozenset(i for i, inside in new.items() if inside)
        pieces[value] = ends.union(*(pieces[i] for i in through))
        cones[value] = frozenset({value}).union(*(cones[i] for i in through))
    return Shares(foreign, pieces, cones, own)


def _foreign(
    graph: Graph, reached: Sequence[int], moving: Set[int], pure: Cones
) -> frozenset[int]:
    """What is joined to values that depend on the leaves and the cotangent alone."""
    joined: set[int] = set()
    foreign: set[int] = set()
    for value in reached:
        node = graph.node_of(value)
        if value not in moving or node is None or not _joins(graph, node):
            continue
        others = {i for i in node.ins if i not in joined and pure.of(i) is None}
        mine = [i for i in node.ins if i in moving and i not in others]
        if mine and (others or not joined.isdisjoint(mine)):
            joined.add(value)
            foreign |= others
    return frozenset(foreign)


def _joins(graph: Graph, node: Node) -> bool:
    """Whether an equation joins pieces of an array, perhaps as a sum of padded ones."""
    if node.prim in SUMS:
        return any(_is_padded(graph, i) for i in node.ins)
    return node.prim == "concatenate"


def _is_padded(graph: Graph, value: int) -> bool:
    node = graph.node_of(value)
    while node is not None and node.prim in CASTS:
        node = graph.node_of(node.ins[0])
    return node is not None and node.prim == "pad"


def may_be_zero(
    graph: Graph, found: Shares, values: Set[int], grads: Set[int], returned: Set[int]
) -> bool:
    """Whether pieces of some values are read for these and other gradients only.

    Args:
        graph: The program.
        found: The values that may be gradients.
        values: Those of them that are gradients.
        grads: All gradients, these too.
        returned: What bodies return.
    """
    pieces = frozenset().union(*(found.pieces[v] for v in values))
    between = frozenset().union(*(found.cones[v] for v in values))
    inside = between.union(*(found.own[p] for p in pieces))
    for value in pieces | between:
        node = graph.node_of(value)
        if node is None or node.copies or (value in returned and value not in grads):
            return False
    return all(
        leads_to(graph, node, grads, inside, returned)
        for p in pieces
        for node in graph.users(p)
    )
