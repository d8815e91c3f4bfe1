"""Gradients of a region whose parameter holds the region's own equations.

A function of scores is such a parameter. The program computes the derivative from what
these equations gave: ``1 - y**2`` for ``y = tanh(x)``. The reference does so too, since
both are differentiated by JAX. So the results ``y`` are given to both sides, and only
the equations of the derivative are compared. They need no rule of algebra.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax

from rewriter import _jax
from rewriter.find.match import Match
from rewriter.find.reading import Reading, leaves_of
from rewriter.program.graph import Graph

PREFIX = "taken_"


def with_results(reading: Reading) -> Reading:
    """Returns a reading that has the results of its parameter as operands too."""
    assert reading.taken is not None
    more = {f"{PREFIX}{i}": o for i, o in enumerate(reading.taken.results.values())}
    return dataclasses.replace(reading, operands={**reading.operands, **more})


def traced_with_results(graph: Graph, match: Match) -> Any:
    """The code of a reading with its parameter's results given, traced.

    Its inputs are the leaves of the reading `with_results`.
    """
    reading, op = with_results(match.reading), match.op
    taken = reading.taken
    assert taken is not None
    names = leaves_of(reading)

    def reference(**given: Any) -> jax.Array:
        results = {
            name: given.pop(f"{PREFIX}{i}") for i, name in enumerate(taken.results)
        }
        function = functools.partial(given.pop(taken.param), given=results)
        return op.reference(**given, **{taken.param: function})

    def code(*arrays: jax.Array) -> jax.Array:
        return reading.build(
            reference,
            dict(zip(names, arrays, strict=True)),
            graph.shape(reading.value),
            graph.dtype(reading.value),
            {**reading.params, **reading.check_params},
        )

    return _jax.trace_flat(code, [graph.avals[v] for v in names])


def results_here(graph: Graph, match: Match) -> Mapping[int, int]:
    """The results of a reading's parameter, and the values that they are at a match.

    A match may be an equal region elsewhere. Those that are leaves are left out.
    """
    reading = match.reading
    if reading.taken is None:
        return {}
    leaves = dict(match.leaves)
    wanted = {*leaves_of(with_results(reading))} - leaves.keys()
    found: dict[int, int] = {reading.value: match.value}
    stack = [reading.value]
    while stack:
        value = stack.pop()
        first, second = graph.node_of(value), graph.node_of(found[value])
        if first is None or second is None or value in leaves:
            continue
        for a, b in zip(first.ins, second.ins, strict=True):
            if a not in found:
                found[a] = b
                stack.append(a)
    return {v: found[v] for v in wanted if v in found}
