"""Functions of JAX with a derivative rule of their own, whose calls JAX has inlined.

Where JAX differentiates a loop, it inlines the calls in it. The derivative stays that
of the rule. So equations that are exactly those of the function count as its call.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from rewriter import _jax
from rewriter.ops.score import NAMED
from rewriter.program.graph import Graph, Node

ENDS = {"logaddexp": "select_n"}
"""Functions of two numbers that are told by their equations, and their last one's
primitive. Those of others are also written without them, as ``max(x, 0)`` is."""


def inlined_call(graph: Graph, node: Node) -> tuple[str, tuple[int, ...]] | None:
    """Returns the function and arguments whose last equation this is; None if none."""
    for name, last in ENDS.items():
        if node.prim == last:
            arguments = _arguments(graph, node, _body(name))
            if arguments is not None:
                return name, arguments
    return None


def _arguments(graph: Graph, node: Node, body: Any) -> tuple[int, ...] | None:
    """The values that are a body's inputs, if its equations lead to this one."""
    makers = {eqn.outvars[0]: eqn for eqn in body.eqns}
    found: dict[Any, int] = {}
    stack = [(body.outvars[0], node.outs[0])]
    while stack:
        var, value = stack.pop()
        if var in found:
            if not _are_same(graph, found[var], value):
                return None
            continue
        found[var] = value
        if var in makers:
            made, eqn = graph.node_of(value), makers[var]
            if made is None or made.prim != eqn.primitive.name:
                return None
            stack += zip(eqn.invars, made.ins, strict=True)
    return tuple(found[var] for var in body.invars)


def _are_same(graph: Graph, one: int, other: int) -> bool:
    """Whether two values are one, or the same number."""
    if one == other:
        return True
    number = graph.scalar(one)
    return number is not None and number == graph.scalar(other)


@functools.cache
def _body(name: str) -> Any:
    """The equations of a function of two numbers, as a jaxpr without calls."""
    number = jax.ShapeDtypeStruct((), jnp.float32)
    traced = _jax.trace_flat(NAMED[name], [number, number])
    (eqn,) = traced.jaxpr.eqns
    return _jax.call_body(eqn).jaxpr
