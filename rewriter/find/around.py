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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from rewriter import _jax
from rewriter.algebra.canonicalize import is_local
from rewriter.program.graph import Graph, Scope

GIVES = frozenset({"remat", "scan", "while", "cond", "shard_map"})
"""Bodies that can be given more: rules of derivatives count what they are given."""
MADE_OF = 120
"""Of how many values what a body is given may be made."""


@dataclass(frozen=True, eq=False)
class Around:
    """A value that a body could be given.

    Attributes:
        var: The body's variable of it, once it is given.
        outside: The value around the body; another one only where that is split.
        spec: How a shard_map splits it; None of other bodies.
    """

    var: Any
    outside: int
    spec: Any = None


def around(
    graph: Graph, scope: Scope, defined: Mapping[int, Any], call: tuple[float, ...]
) -> dict[int, Around]:
    """Values that a body is not given, and could be.

    Args:
        graph: The program.
        scope: The body.
        defined: What the body around has, with the path to where it is made.
        call: The path to the equation that holds the body.
    """
    if scope.kind not in GIVES or _jax.counts_inputs(scope.jaxpr):
        return {}
    parts = _parts(graph, scope) if scope.kind == "shard_map" else None
    over = _over_borders(graph)
    found: dict[int, Around] = {}
    for whole, (at, _) in scope.first_var.items():
        if at >= 0 or not (parts is not None or whole in defined):
            continue
        for value in _made_of(graph, whole, over):
            if value in scope.first_var or value in found:
                continue
            outside, spec = (value, None) if parts is None else parts.get(value, NONE)
            early = outside in defined and defined[outside][0] < call
            if early and _is_no_larger(graph, value, outside, whole):
                found[value] = Around(_jax.new_var(graph.avals[value]), outside, spec)
    return found


NONE = None, None


def _parts(graph: Graph, scope: Scope) -> dict[int, tuple[int, Any]]:
    """What each device has of values that are split as a shard_map splits: of which."""
    mesh = _jax.parts_of(scope.parent.jaxpr.eqns[scope.call])[2]
    found: dict[int, tuple[int, Any]] = {}
    for (value, spec, other), part in graph.per_device.items():
        if other == mesh:
            found.setdefault(part, (value, spec))
    return found


def _over_borders(graph: Graph) -> dict[int, int]:
    """What each device is given to of what, and what is put together to its parts."""
    found: dict[int, int] = {}
    for (value, _, _), part in graph.per_device.items():
        node = graph.node_of(value)
        if node is not None and node.prim == "shard_map":
            found.setdefault(value, part)
        elif graph.node_of(part) is None:
            found.setdefault(part, value)
    return found


def _made_of(graph: Graph, whole: int, over: Mapping[int, int]) -> tuple[int, ...]:
    """Whole numbers and booleans that a mask or a bias is made of; of others, none.

    What products or other layers gave is no mask.

    Args:
        graph: The program.
        whole: The mask.
        over: Values that are others on the other side of a shard_map's border.
    """
    if len(graph.shape(whole)) < 2 or not _has_size(graph, whole):
        return ()
    seen, queue, found = {whole}, [whole], []
    while queue:
        value = queue.pop()
        ins = _ins(graph, value, over)
        floats = jnp.issubdtype(graph.dtype(value), jnp.inexact)
        if ins is None and floats and len(graph.shape(value)) > 1:
            return ()
        for i in ins or ():
            if i in seen or graph.scalar(i) is not None:
                continue
            seen.add(i)
            queue.append(i)
            if not jnp.issubdtype(graph.dtype(i), jnp.inexact):
                found.append(i)
        if len(seen) > MADE_OF:
            return ()
    return tuple(found)


def _ins(graph: Graph, value: int, over: Mapping[int, int]) -> Sequence[int] | None:
    """What a value is made of by one equation that a region can hold, or by none."""
    if value in over:
        return (over[value],)
    node = graph.node_of(value)
    return node.ins if node is not None and is_local(node) else None


def _has_size(graph: Graph, value: int) -> bool:
    return all(isinstance(d, int) for d in graph.shape(value))


def _is_no_larger(graph: Graph, value: int, outside: int, whole: int) -> bool:
    """Whether a value takes no more memory than what is made of it."""
    if not _has_size(graph, value) or _jax.is_key(graph.avals[value]):
        return False
    argument = graph.top.first_var.get(outside, (0,))[0] < 0
    return argument or _bytes(graph, value) <= _bytes(graph, whole)


def _bytes(graph: Graph, value: int) -> int:
    return math.prod(graph.shape(value)) * graph.dtype(value).itemsize
