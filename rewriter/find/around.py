"""A body in, what its masks are made of around it out.

A mask is often made once and read by every layer: it is a constant of a loop over
layers, an argument of a checkpoint, or a residual that JAX took out of a loop. A
replacement in the body says more with what the mask is made of: positions, which are
made anew, and segments, lengths or booleans of keys, which the body can be given
instead of the mask.

What a body is given so is not larger than what it has of it, or one of the program's
arguments, which are there anyway; and it is whole numbers and booleans, so that nothing
that has a gradient crosses a body's border in another way than before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from rewriter import _jax
from rewriter.algebra.canonicalize import is_local
from rewriter.program.graph import Graph, Scope

GIVES = frozenset({"remat", "scan", "while", "cond"})
"""Bodies that can be given more: rules of derivatives count what they are given."""
MADE_OF = 120
"""Of how many values what a body is given may be made."""


def around(
    graph: Graph, scope: Scope, defined: Mapping[int, Any], call: tuple[float, ...]
) -> dict[int, Any]:
    """Values that a body is not given, and could be; with a variable for each.

    Args:
        graph: The program.
        scope: The body.
        defined: What the body around has, with the path to where it is made.
        call: The path to the equation that holds the body.
    """
    if scope.kind not in GIVES or _jax.counts_inputs(scope.jaxpr):
        return {}
    given = [v for v, (at, _) in scope.first_var.items() if at < 0 and v in defined]
    found: dict[int, Any] = {}
    for whole in given:
        for value in _made_of(graph, whole):
            if value in scope.first_var or value in found or value not in defined:
                continue
            early = defined[value][0] < call
            if early and _is_no_larger(graph, value, whole):
                found[value] = _jax.new_var(graph.avals[value])
    return found


def _made_of(graph: Graph, whole: int) -> tuple[int, ...]:
    """Whole numbers and booleans that a mask or a bias is made of; of others, none.

    What products or other layers gave is no mask.
    """
    if len(graph.shape(whole)) < 2 or not _has_size(graph, whole):
        return ()
    seen, queue, found = {whole}, [whole], []
    while queue:
        value = queue.pop()
        node = graph.node_of(value)
        floats = jnp.issubdtype(graph.dtype(value), jnp.inexact)
        if node is None or not is_local(node):
            if floats and len(graph.shape(value)) > 1:
                return ()
            continue
        for i in node.ins:
            if i in seen or graph.scalar(i) is not None:
                continue
            seen.add(i)
            queue.append(i)
            if not jnp.issubdtype(graph.dtype(i), jnp.inexact):
                found.append(i)
        if len(seen) > MADE_OF:
            return ()
    return tuple(found)


def _has_size(graph: Graph, value: int) -> bool:
    return all(isinstance(d, int) for d in graph.shape(value))


def _is_no_larger(graph: Graph, value: int, whole: int) -> bool:
    """Whether a value takes no more memory than what is made of it."""
    if not _has_size(graph, value) or _jax.is_key(graph.avals[value]):
        return False
    argument = graph.top.first_var.get(value, (0,))[0] < 0
    return argument or _bytes(graph, value) <= _bytes(graph, whole)


def _bytes(graph: Graph, value: int) -> int:
    return math.prod(graph.shape(value)) * graph.dtype(value).itemsize
