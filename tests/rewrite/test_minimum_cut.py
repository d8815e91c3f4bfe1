"""Cuts by weight, against those of networkx."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence

import networkx
import pytest

from rewriter.rewrite.minimum_cut import lightest_cut

Nodes = Mapping[Hashable, tuple[int, Sequence[Hashable] | None]]


def by_networkx(wanted: Sequence[Hashable], nodes: Nodes) -> frozenset[Hashable]:
    """The cut nearest to what is wanted."""
    graph = networkx.DiGraph()
    graph.add_edges_from(((k, "out"), "end") for k in wanted)
    for k, (weight, operands) in nodes.items():
        graph.add_edge((k, "in"), (k, "out"), capacity=weight)
        if operands is None:
            graph.add_edge("start", (k, "in"))
        graph.add_edges_from(((o, "out"), (k, "in")) for o in operands or ())
    if "start" not in graph:
        return frozenset()
    _, (near, _) = networkx.minimum_cut(graph, "start", "end")
    return frozenset(k for k in nodes if (k, "in") in near and (k, "out") not in near)


def drawn(seed: int) -> tuple[list[int], dict[int, tuple[int, list[int] | None]]]:
    """Some wanted nodes, and a graph without circles, with equal weights and zeros."""
    draw = random.Random(seed)
    count = draw.randint(1, 24)
    nodes: dict[int, tuple[int, list[int] | None]] = {}
    for k in range(count):
        before = [draw.randrange(k) for _ in range(draw.randint(0, 3))] if k else []
        weight = draw.choice([0, 1, 1, 2, 7, 10**12, draw.randint(1, 50)])
        nodes[k] = weight, before if before and draw.random() < 0.8 else None
    return draw.sample(range(count), draw.randint(1, min(4, count))), nodes


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_cuts_are_those_of_networkx(first: int) -> None:
    for seed in range(first, first + 100):
        wanted, nodes = drawn(seed)
        assert lightest_cut(wanted, nodes) == by_networkx(wanted, nodes), seed


def test_no_path_has_no_cut() -> None:
    assert lightest_cut("a", {"a": (0, [])}) == frozenset()
