"""Applies a proved match to an equal region elsewhere in the program.

Layers repeat. A region whose equations equal those of a proved one, down to its
leaves, computes the same function of its own leaves. So it needs no second proof.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any

from rewriter.algebra.canonicalize import is_local
from rewriter.program.graph import Graph, Node

Step = tuple[int, str, int, int]
CONE_LIMIT = 400


@dataclass(frozen=True, eq=False)
class Template:
    """A proved match, as seen from its anchor.

    Attributes:
        anchor: The anchor's equation.
        value: The region's result.
        leaves: Values that the replacement reads.
        path: The way from the anchor down to the result.
        source: The caller's data about the match.
    """

    anchor: Node
    value: int
    leaves: frozenset[int]
    path: tuple[Step, ...]
    source: Any


def template(
    graph: Graph, anchor: Node, value: int, leaves: frozenset[int], source: Any
) -> Template | None:
    """The template of a match, or None if its result is not below its anchor."""
    path = way(graph, anchor.outs, value)
    return None if path is None else Template(anchor, value, leaves, path, source)


def way(graph: Graph, starts: tuple[int, ...], value: int) -> tuple[Step, ...] | None:
    """The shortest way down from one of some values to a value, or None.

    Its first step names the start.
    """
    came: dict[int, tuple[int, Step] | None] = dict.fromkeys(starts)
    queue = collections.deque(starts)
    while queue and value not in came and len(came) < CONE_LIMIT:
        current = queue.popleft()
        seen: dict[tuple[str, int], int] = {}
        for node in graph.users(current):
            key = (node.prim, node.ins.index(current))
            nth = seen[key] = seen.get(key, -1) + 1
            for k, out in enumerate(node.outs):
                if out not in came:
                    came[out] = (current, (k, *key, nth))
                    queue.append(out)
    if value not in came:
        return None
    path: list[Step] = []
    at = value
    while came[at] is not None:
        at, step = came[at]  # type: ignore[misc]
        path.append(step)
    return ((starts.index(at), "", 0, 0), *reversed(path))


def go(graph: Graph, starts: tuple[int, ...], path: tuple[Step, ...]) -> int | None:
    """The value at the end of a `way` from other values; None if the way breaks off."""
    value = starts[path[0][0]]
    for k, prim, position, nth in path[1:]:
        for node in graph.users(value):
            if node.prim == prim and node.ins.index(value) == position:
                if nth == 0:
                    value = node.outs[k]
                    break
                nth -= 1
        else:
            return None
    return value


def apply(
    graph: Graph, known: Template, anchor: Node
) -> tuple[int, dict[int, int], frozenset[int]] | None:
    """(result, leaf to leaf, values inside) of an equal region at another anchor.

    None if the region there differs.
    """
    if anchor.prim != known.anchor.prim:
        return None
    value = go(graph, anchor.outs, known.path)
    if value is None:
        return None
    cone = same_cone(graph, known, value)
    if cone is None or _uses(graph, value) != _uses(graph, known.value):
        return None
    return value, *cone


def _uses(graph: Graph, value: int) -> list[tuple[str, int]]:
    """Readers of a region's result that might belong to the region.

    A contraction of the result does not: attention reads a norm's result three times
    so, and a gated linear unit twice.
    """
    return sorted(
        (n.prim, n.ins.index(value))
        for n in graph.users(value)
        if n.prim != "dot_general" or is_local(n)
    )


def same_cone(
    graph: Graph, known: Template, value: int
) -> tuple[dict[int, int], frozenset[int]] | None:
    """(leaf to leaf, values inside) if the equations above both results are equal."""
    matched: dict[int, int] = {known.value: value}
    leaves: dict[int, int] = {}
    stack = [(known.value, value)]
    while stack:
        a, b = stack.pop()
        x, y = graph.avals[a], graph.avals[b]
        if x.shape != y.shape or x.dtype != y.dtype:
            return None
        if a in known.leaves:
            leaves[a] = b
            continue
        if a == b and _closed(graph, a, known.leaves):
            continue  # else it is made of leaves that both regions have, as a mask is
        first, second = graph.producer.get(a), graph.producer.get(b)
        if first is None or second is None:
            return None
        (m, i), (n, j) = first, second
        if i != j or m.prim != n.prim or len(m.ins) != len(n.ins):
            return None
        if m.signature != n.signature or m.scope.rules != n.scope.rules:
            return None  # `jax.nn.relu` and `jnp.maximum` differ in derivatives
        for p, q in zip(m.ins, n.ins, strict=True):
            old = matched.get(p)
            if old is None:
                matched[p] = q
                stack.append((p, q))
            elif old != q:
                return None
        if len(matched) > CONE_LIMIT:
            return None
    if len(leaves) != len(known.leaves):
        return None
    return leaves, frozenset(matched.values()).difference(leaves.values())


def same_makers(graph: Graph, known: int, value: int) -> bool:
    """Whether two values are made by equal equations, down to the program's inputs."""
    matched, stack = {known: value}, [(known, value)]
    while stack:
        a, b = stack.pop()
        if a == b:
            continue
        first, second = graph.producer.get(a), graph.producer.get(b)
        if first is None and second is None:
            x, y = graph.constants.get(a), graph.constants.get(b)
            if x is None and y is None and graph.avals[a] == graph.avals[b]:
                continue
            return False
        if first is None or second is None:
            return False
        (m, i), (n, j) = first, second
        if (i, m.prim, m.signature) != (j, n.prim, n.signature):
            return False
        for p, q in zip(m.ins, n.ins, strict=True):
            if p not in matched:
                stack.append((p, q))
            if matched.setdefault(p, q) != q:
                return False
        if len(matched) > CONE_LIMIT:
            return False
    return True


def _closed(graph: Graph, value: int, leaves: frozenset[int]) -> bool:
    """Whether a shared value is computed without the leaves."""
    seen, stack = {value}, [value]
    while stack:
        current = stack.pop()
        if current in leaves:
            return False
        node = graph.node_of(current)
        if node is not None:
            for i in node.ins:
                if i not in seen and i not in graph.constants:
                    seen.add(i)
                    stack.append(i)
        if len(seen) > 60:
            return False
    return True


def neighbourhood(graph: Graph, anchor: Node, up: int = 48, down: int = 40) -> int:
    """A hash of the equations around an anchor, equal for equal surroundings."""
    numbers: dict[int, int] = {}
    items: list[Any] = []
    queue = collections.deque((i, 0) for i in anchor.outs)
    while queue and len(items) < up:
        value, depth = queue.popleft()
        if value in numbers:
            items.append(numbers[value])
            continue
        numbers[value] = len(numbers)
        aval = graph.avals[value]
        scalar = graph.scalar(value)
        node = graph.node_of(value)
        if scalar is not None or node is None or depth > 12:
            items.append((aval.shape, aval.dtype, scalar))
            continue
        items.append((node.prim, aval.shape, aval.dtype, node.signature))
        queue.extend((i, depth + 1) for i in node.ins)
    readers = collections.deque(anchor.outs)
    seen = set(readers)
    while readers and len(items) < up + down:
        for node in graph.users(readers.popleft()):
            items.append((node.prim, node.signature, len(node.ins)))
            for out in node.outs:
                if out not in seen:
                    seen.add(out)
                    readers.append(out)
    return hash(tuple(items))
