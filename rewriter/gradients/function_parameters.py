"""Gradients of ops with a function as a parameter, such as a function of scores.

A function of scores is such a parameter. The program computes the derivative from what
these equations gave: ``1 - y**2`` for ``y = tanh(x)``. The reference does so too, since
both are differentiated by JAX. So the results ``y`` have the same names on both sides,
and only the equations of the derivative are compared. They need no rule of algebra.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from rewriter import _jax
from rewriter.algebra.canonicalize import Evaluator, kind_of
from rewriter.find.match import Match
from rewriter.find.reading import Reading, leaves_of
from rewriter.program.graph import Graph

COMPUTED, GIVEN = "rewriter_computed_", "rewriter_given_"
"""Prefixes of names for a result in the reference, and for the program's value."""


def with_results(reading: Reading) -> Reading:
    """Returns a reading that has the results of its parameter as operands too."""
    assert reading.taken is not None
    more = {f"{GIVEN}{i}": o for i, o in enumerate(reading.taken.results.values())}
    return dataclasses.replace(reading, operands={**reading.operands, **more})


def traced_with_results(graph: Graph, match: Match) -> Any:
    """The code of a reading with its parameter's results named, traced.

    Its inputs are the leaves of the reading `with_results`.
    """
    reading, op = with_results(match.reading), match.op
    taken = reading.taken
    assert taken is not None
    names = leaves_of(reading)

    def reference(**given: Any) -> jax.Array:
        values = {
            name: (f"{i}", given.pop(f"{GIVEN}{i}"))
            for i, name in enumerate(taken.results)
        }

        def seen(name: Any, x: Any) -> Any:
            number, value = values.get(name, ("", None))
            if value is None or value.shape != jnp.shape(x):
                return x
            checkpoint_name(value, f"{GIVEN}{number}")
            return checkpoint_name(x, f"{COMPUTED}{number}")

        function = functools.partial(given.pop(taken.param), seen=seen)
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


def name_results(traced: Graph, ev: Evaluator) -> None:
    """Gives results in a traced reference the forms of the program's values.

    Args:
        traced: The gradients of what `traced_with_results` returns.
        ev: Evaluates them.
    """
    nodes = [n for n in traced.nodes if n.prim == "name"]
    named = {n.params["name"]: n.ins[0] for n in nodes}
    for node in nodes:
        name = node.params["name"]
        if name.startswith(COMPUTED):
            value = named[name.replace(COMPUTED, GIVEN)]
            form = ev.flag if kind_of(traced.dtype(value)) == "b" else ev.poly
            ev.given.update(
                (v, functools.partial(form, value)) for v in (*node.ins, *node.outs)
            )


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
