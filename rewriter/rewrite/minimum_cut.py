"""The lightest values through which all paths to wanted ones lead.

networkx would do, and takes 0.1 s to import: a tenth of the time to lower a model. The
graphs have some dozens of values.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

Rest = dict[Hashable, dict[Hashable, float]]
"""By the ends of an edge, how much more can flow along it."""

START, END = ("start",), ("end",)


def lightest_cut(
    wanted: Iterable[Hashable],
    nodes: Mapping[Hashable, tuple[int, Sequence[Hashable] | None]],
) -> frozenset[Hashable]:
    """Returns the lightest nodes through which all paths to wanted ones lead.

    Of several it is the one nearest to what is wanted; none if no path begins. It is
    found by flows along shortest paths (Edmonds and Karp, "Theoretical
    improvements in algorithmic efficiency for network flow problems", 1972).

    Args:
        wanted: Some of the nodes.
        nodes: By node its weight and its operands, from which paths lead to it. A node
            without, None, is where paths begin.

    Example:
        >>> sorted(lightest_cut("d", {
        ...     "a": (5, None), "b": (1, ["a"]), "c": (2, ["a"]), "d": (9, ["b", "c"]),
        ... }))
        ['b', 'c']
    """
    rest = _edges(wanted, nodes)
    if not rest[START]:
        return frozenset()
    while path := _path(rest):
        edges = list(itertools.pairwise(path))
        most = min(rest[a][b] for a, b in edges)
        for a, b in edges:
            rest[a][b] -= most
            rest[b][a] += most
    far = _reached(rest, END, lambda a, b: rest[b][a])
    inner, outer = (lambda k: (k, "in")), (lambda k: (k, "out"))
    return frozenset(k for k in nodes if inner(k) not in far and outer(k) in far)


def _edges(
    wanted: Iterable[Hashable],
    nodes: Mapping[Hashable, tuple[int, Sequence[Hashable] | None]],
) -> Rest:
    rest: Rest = {START: {}, END: {}}

    def add(a: Hashable, b: Hashable, most: float) -> None:
        rest.setdefault(a, {})[b] = most
        rest.setdefault(b, {}).setdefault(a, 0)

    for k in wanted:
        add((k, "out"), END, math.inf)
    for k, (weight, operands) in nodes.items():
        add((k, "in"), (k, "out"), weight)
        if operands is None:
            add(START, (k, "in"), math.inf)
        for operand in operands or ():
            add((operand, "out"), (k, "in"), math.inf)
    return rest


def _path(rest: Rest) -> list[Hashable]:
    """A shortest path from the start to the end; empty if there is none."""
    before = _reached(rest, START, lambda a, b: rest[a][b])
    path: list[Hashable] = [END] if END in before else []
    while path and path[-1] != START:
        path.append(before[path[-1]])
    return path[::-1]


def _reached(
    rest: Rest, first: Hashable, room: Callable[[Hashable, Hashable], float]
) -> dict[Hashable, Hashable]:
    """What is reached from a node along edges with room, and from where."""
    found, todo = {first: first}, deque([first])
    while todo:
        node = todo.popleft()
        for other in rest[node]:
            if other not in found and room(node, other) > 0:
                found[other] = node
                todo.append(other)
    return found
