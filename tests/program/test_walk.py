"""Walks over a program: which values they meet, in which order, and where they end."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from rewriter.program.graph import Graph
from rewriter.program.walk import equations_above, values_above, values_below


def program() -> Graph:
    """x -> sin -> exp -> y = exp(sin x) + cos x, and y * table."""
    table = np.arange(3.0, dtype="float32")

    def fn(x):
        y = jnp.exp(jnp.sin(x)) + jnp.cos(x)
        return y, y * table

    return Graph(jax.make_jaxpr(fn)(jnp.ones(3)))


def prims(graph, values):
    nodes = map(graph.node_of, values)
    return [n.prim if n is not None else "" for n in nodes]


def test_the_nearest_come_first_and_each_value_once():
    graph = program()
    (y, _) = graph.results
    found = list(values_above(graph, [y], lambda _: True))
    assert prims(graph, found) == ["add", "exp", "cos", "sin", ""]
    assert len(set(found)) == len(found)


def test_a_walk_passes_what_it_is_told_to():
    graph = program()
    (y, _) = graph.results
    names = [n.prim for n in equations_above(graph, [y], frozenset({"add", "exp"}))]
    assert names == ["add", "exp", "cos", "sin"]  # not below sin: it is not passed
    only = [n.prim for n in equations_above(graph, [y], lambda n: n.prim == "add")]
    assert only == ["add", "exp", "cos"]


def test_a_walk_stays_within_some_values():
    graph = program()
    (y, _) = graph.results
    inside = {v for v in range(len(graph.avals)) if prims(graph, [v]) != ["cos"]}
    found = values_above(graph, [y], lambda _: True, inside)
    assert "cos" not in prims(graph, found)


def test_constants_do_not_count():
    graph = program()
    (_, z) = graph.results
    (table,) = (v for v, c in graph.constants.items() if np.shape(c) == (3,))
    assert table in values_above(graph, [z], lambda _: True, most=5)
    assert not list(values_above(graph, [z], lambda _: True, most=1))


def test_what_is_below():
    graph = program()
    (y, z) = graph.results
    x = graph.top.env[graph.top.jaxpr.invars[0]]
    assert set(values_below(graph, [x], lambda _: True)) >= {y, z}
    assert prims(graph, values_below(graph, [x], {"sin", "cos"})) == ["sin", "cos"]
    assert list(values_below(graph, [x], lambda _: True, most=1)) == []
