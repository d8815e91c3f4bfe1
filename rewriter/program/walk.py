"""Walks over a program, from values to what they are made of or what is made of them.

Both walks go breadth first, so the nearest come first, and meet each value once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator

from rewriter.program.graph import Graph, Node

Where = Container[str] | Callable[[Node], bool]
"""The equations that a walk passes: by their primitives, or by a question."""


def values_above(
    graph: Graph,
    values: Iterable[int],
    through: Where,
    within: Container[int] | None = None,
    most: float = float("inf"),
) -> Iterator[int]:
    """Yields values, and those that they are computed from, nearest first.

    Args:
        graph: The program.
        values: Where to begin.
        through: The equations that are passed on the way up.
        within: The values that may be entered; all of them if None.
        most: The walk ends once it knows so many values. Constants do not count.
    """
    return (value for value, _ in _above(graph, values, through, within, most))


def equations_above(
    graph: Graph,
    values: Iterable[int],
    through: Where,
    within: Container[int] | None = None,
    most: float = float("inf"),
) -> Iterator[Node]:
    """Yields the equations of `values_above`, those that are not passed among them."""
    walk = _above(graph, values, through, within, most)
    return (node for _, node in walk if node is not None)


def _above(
    graph: Graph,
    values: Iterable[int],
    through: Where,
    within: Container[int] | None,
    most: float,
) -> Iterator[tuple[int, Node | None]]:
    """Yields values with the equations that make them."""
    passes = _question(through)
    producer, constants = graph.producer, graph.constants
    queue = deque(dict.fromkeys(values))
    seen = set(queue)
    count = len(seen)
    while queue and count < most:
        value = queue.popleft()
        made = producer.get(value)
        node = made[0] if made else None
        yield value, node
        if node is None or not passes(node):
            continue
        for i in node.ins:
            if i not in seen and (within is None or i in within):
                seen.add(i)
                queue.append(i)
                count += i not in constants


def values_below(
    graph: Graph,
    values: Iterable[int],
    through: Where,
    most: float = float("inf"),
) -> Iterator[int]:
    """Yields what is computed from values, without these, nearest first.

    Args:
        graph: The program.
        values: Where to begin.
        through: The equations whose results are met.
        most: The walk ends once it knows so many values.
    """
    passes = _question(through)
    queue = deque(dict.fromkeys(values))
    seen = set(queue)
    while queue and len(seen) < most:
        for node in graph.users(queue.popleft()):
            if not passes(node):
                continue
            for out in node.outs:
                if out not in seen:
                    seen.add(out)
                    queue.append(out)
                    yield out


def _question(through: Where) -> Callable[[Node], bool]:
    if callable(through):
        return through
    return lambda node: node.prim in through
