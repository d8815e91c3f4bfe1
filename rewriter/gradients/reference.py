"""Traces the expected gradients of a match: those of its op's reference."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import jax

from rewriter import _jax
from rewriter.algebra.canonicalize import Evaluator
from rewriter.find.check import replacement_forms, traced_forms
from rewriter.find.match import Match
from rewriter.find.reading import leaves_of
from rewriter.find.reference import gradient_function, settings
from rewriter.gradients.cotangents import is_float
from rewriter.gradients.function_parameters import (
    name_results,
    traced_with_results,
    with_results,
)
from rewriter.program.graph import Graph
from rewriter.program.program_text import written


def traced_gradients(graph: Graph, match: Match, given: bool = False) -> Graph:
    """The gradients of a reading's code: a function of its leaves and a cotangent.

    Args:
        graph: The program.
        match: The match.
        given: Whether results of its parameter are given, see `function_parameters`.
            They are among the leaves then, and have no gradients.
    """
    if given:
        code = traced_with_results(graph, match)
        names, own = leaves_of(with_results(match.reading)), leaves_of(match.reading)
        moving = _moving(graph, names, own)
        return Graph(_gradients(code, tuple(moving)))
    if match.reading.code is None:
        replacement_forms(graph, match.op, match.reading)
    code = match.reading.code
    names = leaves_of(match.reading)
    moving = tuple(_moving(graph, names, names))
    equations = written(code)
    if equations is None:
        return Graph(_gradients(code, moving))
    return Graph(_known_gradients(_Written(code, equations), moving, settings()))


@dataclass(frozen=True)
class _Written:
    """A program as a key, equal to others with the same equations."""

    program: Any = field(compare=False)
    equations: Hashable


@functools.lru_cache(maxsize=256)
def _known_gradients(code: _Written, moving: tuple[int, ...], around: Any) -> Any:
    del around  # as of `settings`
    return _gradients(code.program, moving)


def _gradients(program: Any, moving: tuple[int, ...]) -> Any:
    """The closed jaxpr of a program's gradients by some of its inputs."""

    def code(*arrays: jax.Array) -> jax.Array:
        return _jax.inlined(program, arrays)[0]

    def gradients(*given: jax.Array) -> tuple[jax.Array, ...]:
        *arrays, cotangent = given
        return gradient_function(code, arrays, list(moving))[1](cotangent)

    avals = program.in_avals
    found = _jax.gradients_of(code, avals, moving)
    if found is None:  # it has a loop, for one
        found = _jax.trace_flat(gradients, [*avals, *program.out_avals])
    return found


def wanted_at(
    graph: Graph,
    traced: Graph,
    match: Match,
    cotangent: int,
    known: Evaluator,
    by_value: bool,
    results: Mapping[int, int],
) -> tuple[Evaluator, dict[int, int]]:
    """An evaluator of a match's expected gradients, and its output for each leaf.

    Args:
        graph: The program.
        traced: The gradients of the match's reading.
        match: The match.
        cotangent: The program's value that serves as the cotangent.
        known: Evaluates the program's values.
        by_value: Whether the cotangent has its form in the program, and no name.
        results: The results of its parameter that are given, as of `results_here`.
    """
    own = names = leaves_of(match.reading)
    if results:
        names = leaves_of(with_results(match.reading))
    here = {**results, **dict(match.leaves)}
    values = [*(here[v] for v in names), cotangent]
    ev, outs = traced_forms(traced, match.reading, values, known)
    if results:
        name_results(traced, ev)
    if by_value:
        last = traced.top.env[traced.top.jaxpr.invars[-1]]
        ev.given[last] = functools.partial(known.poly, cotangent)
    ev.strided, ev.congruent = True, True
    moving = _moving(graph, names, own)
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
    outs = zip(_moving(graph, names, names), scope.jaxpr.outvars, strict=True)
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


def _moving(graph: Graph, names: Sequence[int], own: Sequence[int]) -> list[int]:
    """The positions of the values that may have gradients."""
    return [k for k, v in enumerate(names) if v in own and is_float(graph.dtype(v))]
