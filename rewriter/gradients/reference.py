"""Traces the expected gradients of a match: those of its op's reference."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import jax

from rewriter import _jax
from rewriter.algebra.canonicalize import Evaluator
from rewriter.find.check import traced_forms
from rewriter.find.match import Match
from rewriter.find.reading import leaves_of
from rewriter.find.reference import gradient_function, referenced
from rewriter.gradients.cotangents import is_float
from rewriter.program.graph import Graph


def traced_gradients(graph: Graph, match: Match) -> Graph:
    """The gradients of a reading's code: a function of its leaves and a cotangent."""
    reading, op = match.reading, match.op
    names = leaves_of(reading)
    moving = _moving(graph, names)
    shape, dtype = graph.shape(reading.value), graph.dtype(reading.value)
    params = {**reading.params, **reading.check_params}

    def reference(**given: Any) -> jax.Array:
        operands = {k: v for k, v in given.items() if k in op.names}
        return referenced(op, operands, params)

    def code(*arrays: jax.Array) -> jax.Array:
        operands = dict(zip(names, arrays, strict=True))
        return reading.build(reference, operands, shape, dtype, params)

    def gradients(*given: jax.Array) -> tuple[jax.Array, ...]:
        *arrays, cotangent = given
        return gradient_function(code, arrays, moving)[1](cotangent)

    avals = [graph.avals[v] for v in names]
    found = _jax.gradients_of(code, avals, moving)
    if found is None:  # it has a loop, for one
        result = jax.ShapeDtypeStruct(shape, dtype)
        found = _jax.trace_flat(gradients, [*avals, result])
    return Graph(found)


def wanted_at(
    graph: Graph, traced: Graph, match: Match, cotangent: int, known: Evaluator
) -> tuple[Evaluator, dict[int, int]]:
    """An evaluator of a match's expected gradients, and its output for each leaf.

    Args:
        graph: The program.
        traced: The gradients of the match's reading.
        match: The match.
        cotangent: The program's value that serves as the cotangent.
        known: Evaluates the program's values.
    """
    names, here = leaves_of(match.reading), dict(match.leaves)
    values = [*(here[v] for v in names), cotangent]
    ev, outs = traced_forms(traced, match.reading, values, known)
    ev.strided = True
    moving = _moving(graph, names)
    by_leaf = zip((here[names[k]] for k in moving), outs, strict=True)
    return ev, dict(by_leaf)


def unread(
    graph: Graph, traced: Graph, match: Match, moving: Set[int]
) -> frozenset[int]:
    """The leaves of a match that some of its expected gradients do not depend on.

    Args:
        graph: The program.
        traced: The gradients of the match's reading.
        match: The match.
        moving: The leaves whose gradients are meant.
    """
    scope, here, names = traced.top, dict(match.leaves), leaves_of(match.reading)
    outs = zip(_moving(graph, names), scope.jaxpr.outvars, strict=True)
    stack = [traced.read(scope, v) for k, v in outs if here[names[k]] in moving]
    reached = set(stack)
    while stack:
        node = traced.node_of(stack.pop())
        new = {*node.ins} - reached if node is not None else ()
        reached.update(new)
        stack += new
    inputs = [scope.env[v] for v in scope.jaxpr.invars]
    pairs = zip(names, inputs, strict=False)  # the last input is the cotangent
    return frozenset(here[name] for name, value in pairs if value not in reached)


def _moving(graph: Graph, names: Sequence[int]) -> list[int]:
    return [k for k, v in enumerate(names) if is_float(graph.dtype(v))]
