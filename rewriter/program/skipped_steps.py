"""Finds steps of a loop that are skipped: their carries pass unchanged.

Looks like a `cond` of which one branch returns what it got, or a choice between a new
and an old carry, in the body of a loop. All carries are skipped by one condition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from rewriter.program.graph import Graph, Node


@dataclass(frozen=True)
class Skipped:
    """Steps that are skipped.

    Attributes:
        choice: The boolean that decides.
        taken: Its value in steps that are not skipped.
        carries: By a carry after a step, the same if the step is not skipped.
    """

    choice: int
    taken: bool
    carries: dict[int, int]


def skipped(
    graph: Graph, before: Sequence[int], after: Sequence[int]
) -> Skipped | None:
    """The steps of a loop that leave all carries that they would change.

    Args:
        graph: The program.
        before: The carries before a step.
        after: The same carries after a step; those that are not skipped are left out.

    Returns:
        None if no step is skipped.
    """
    found: set[tuple[int, bool]] = set()
    carries: dict[int, int] = {}
    for old, new in zip(before, after, strict=True):
        if new == old:
            continue
        one = changed(graph, old, new)
        if one is None:
            return None
        choice, taken, carries[new] = one
        found.add((choice, taken))
    if len(found) != 1:
        return None
    return Skipped(*found.pop(), carries)


def changed(graph: Graph, old: int, new: int) -> tuple[int, bool, int] | None:
    """(condition, its value, what the carry then becomes); None if not skipped."""
    node = graph.node_of(new)
    if node is None:
        return None
    if node.prim == "cond":
        arms = branch_results(graph, node, new)
        choice = decides(graph, node)
    elif node.prim == "select_n":
        arms = list(node.ins[1:])
        choice = _number(graph, node.ins[0])
    else:
        return None
    kept = [_as_it_is(graph, v) == old for v in arms]
    if choice is None or len(kept) != 2 or kept[0] == kept[1]:
        return None
    taken = kept[0]
    return choice, taken, arms[1 if taken else 0]


def branch_results(graph: Graph, node: Node, value: int) -> list[int]:
    """What each branch of a cond returns as one of its results."""
    at = node.outs.index(value)
    children = node.scope.children[node.position]
    return [graph.read(child, child.jaxpr.outvars[at]) for child in children]


def _as_it_is(graph: Graph, value: int) -> int:
    """The value below a cast to the dtype it has, as from a weak type."""
    node = graph.node_of(value)
    if node is None or node.prim != "convert_element_type":
        return value
    below = node.ins[0]
    return below if graph.dtype(below) == graph.dtype(value) else value


def decides(graph: Graph, cond: Node) -> int | None:
    """The boolean that the index of a cond of two branches is made of."""
    index = cond.ins[0]
    node = graph.node_of(index)
    if node is not None and node.prim == "convert_element_type":
        index = node.ins[0]
    return index if jnp.issubdtype(graph.dtype(index), jnp.bool_) else None


def _number(graph: Graph, value: int) -> int | None:
    """The one boolean that a condition holds at every position."""
    node = graph.node_of(value)
    while graph.shape(value) != () and node is not None and node.prim in _SPREAD:
        value, node = node.ins[0], graph.node_of(node.ins[0])
    return value if graph.shape(value) == () else None


_SPREAD = frozenset({"broadcast_in_dim", "reshape"})
