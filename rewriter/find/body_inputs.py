"""Finds the values that a mask is made of, to pass them to a body in its place.

A mask is often made once and read by every layer. In a layer's body it is then a
constant of a loop, an argument of a checkpoint, or a residual that JAX took out of a
loop. From the mask alone no structure can be read. So a replacement may ask for what
the mask was made of: segments, lengths, or booleans of keys. Positions are made anew.

A number that chooses between masks, such as whether a layer is local, is often one of
several in an array. Then a body may ask for the array.

A new input is no larger than the mask, or it is small, or it is an argument of the
program, which is in memory anyway. It holds integers or booleans, or floats of at most
two axes, such as the slopes of heads or a number for each key. Or it is an array whose
blocks, stacked by a loop, the body has: its gradient is then of the array.

A checkpoint may save the scores of each block. Its recomputation then has no keys, but
the loop of its gradients has. So it may ask for what loops beside it read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rewriter import _jax
from rewriter.algebra.canonicalize import MOVING, is_local
from rewriter.program.graph import Graph, Scope
from rewriter.program.stacked_slices import sliced

GIVES = frozenset({"remat", "scan", "while", "cond", "shard_map"})
"""Bodies that can get new inputs. Others have derivative rules that count inputs."""
MADE_OF = 120
"""The most values that a mask may be made of."""
SMALL = 4096
"""Bytes of an array that may be larger than what is made of it."""


@dataclass(frozen=True, eq=False)
class BodyInput:
    """A value that a body could get as a new input.

    Attributes:
        var: The variable that the body reads, if it gets the input.
        outside: The value outside the body. It is the same value, except in a
            shard_map, whose body has a part of it.
        spec: How a shard_map splits it; ``None`` for other bodies.
    """

    var: Any
    outside: int
    spec: Any = None


def body_inputs(
    graph: Graph, scope: Scope, defined: Mapping[int, Any], call: tuple[float, ...]
) -> dict[int, BodyInput]:
    """Returns the values that a body could get as new inputs.

    Args:
        graph: The program.
        scope: The body.
        defined: The values of the body around it, with the path to where each is made.
        call: The path to the equation that holds the body.
    """
    if scope.kind not in GIVES or _jax.counts_inputs(scope.jaxpr):
        return {}
    parts = _parts(graph, scope) if scope.kind == "shard_map" else None
    over = _over_borders(graph)
    found: dict[int, BodyInput] = {}
    for whole, (at, _) in scope.first_var.items():
        if at >= 0 or not (parts is not None or whole in defined):
            continue
        same = parts is None or whole in defined  # whole on every device
        for value in _made_of(graph, whole, over):
            if value in scope.first_var or value in found:
                continue
            given = (value, None if parts is None else PartitionSpec())
            outside, spec = given if same else parts.get(value, NONE)
            early = outside in defined and defined[outside][0] < call
            if early and _is_no_larger(graph, value, outside, whole):
                found[value] = BodyInput(
                    _jax.new_var(graph.avals[value]), outside, spec
                )
    for value in _cut_before(graph, scope):
        asked = value in found or value in scope.first_var
        if not asked and value in defined and defined[value][0] < call:
            found[value] = BodyInput(_jax.new_var(graph.avals[value]), value)
    return found


def _cut_before(graph: Graph, scope: Scope) -> list[int]:
    """What a recomputation's blocks are cut out of, also those of loops beside it."""
    if not scope.runs_again or scope.parent is None:
        return []
    inside = (bodies[0] for bodies in scope.children.values())
    if scope.kind == "remat" and any(body.kind == "scan" for body in inside):
        given = [v for v, (at, _) in scope.first_var.items() if at < 0]
        return [v for whole in given for v in _cut_out_of(graph, whole)]
    found: dict[int, None] = {}
    beside = scope.parent.children.items() if scope.kind == "scan" else ()
    for position, (other, *_) in beside:
        if other.kind != "scan" or other is scope:
            continue
        eqn = scope.parent.jaxpr.eqns[position]
        for atom in eqn.invars:
            value = graph.read(scope.parent, atom)
            found |= dict.fromkeys((value, *_cut_out_of(graph, value)))
    return [v for v in found if v not in graph.constants]


def _cut_out_of(graph: Graph, value: int) -> Iterator[int]:
    """The arrays of which a value is a layout or a stack of blocks, nearest first."""
    array: int | None = value
    while array is not None:
        node = graph.node_of(array)
        moved = node is not None and node.prim in MOVING
        array = node.ins[0] if moved else sliced(graph, array, MOVING)
        if array is not None:
            yield array


NONE = None, None


def _parts(graph: Graph, scope: Scope) -> dict[int, tuple[int, Any]]:
    """Maps a device's part to the whole value and its spec, for a shard_map's mesh."""
    mesh = _jax.parts_of(scope.parent.jaxpr.eqns[scope.call])[2]
    found: dict[int, tuple[int, Any]] = {}
    for (value, spec, other), part in graph.per_device.items():
        if other == mesh:
            found.setdefault(part, (value, spec))
    return found


def _over_borders(graph: Graph) -> dict[int, int]:
    """Maps a value on one side of a shard_map's border to the one on the other side."""
    found: dict[int, int] = {}
    for (value, _, _), part in graph.per_device.items():
        node = graph.node_of(value)
        if node is not None and node.prim == "shard_map":
            found.setdefault(value, part)
        elif graph.node_of(part) is None:
            found.setdefault(part, value)
    return found


def _made_of(graph: Graph, whole: int, over: Mapping[int, int]) -> tuple[int, ...]:
    """Small values that a mask or a bias is made of; ``()`` for other values.

    A number that chooses between masks may be made of others too. Blocks that a loop
    cut out of an array are made of it. A value made by products or by other layers is
    no mask.

    Args:
        graph: The program.
        whole: The mask.
        over: Values that are others on the other side of a shard_map's border.
    """
    few = len(graph.shape(whole)) < 2
    if few and _is_inexact(graph, whole):
        return ()
    array = sliced(graph, whole, MOVING)
    if array is not None:
        return (array,)
    seen, queue, found = {whole}, [whole], []
    while queue:
        value = queue.pop()
        ins = _ins(graph, value, over)
        if ins is None and not _may_be_of_a_mask(graph, value):
            return ()
        for i in ins or ():
            if i in seen or graph.scalar(i) is not None:
                continue
            seen.add(i)
            queue.append(i)
            if not _is_inexact(graph, i) or len(graph.shape(i)) <= 2:
                found.append(i)
        if len(seen) > MADE_OF:
            return ()
    return tuple(found)


def _ins(graph: Graph, value: int, over: Mapping[int, int]) -> Sequence[int] | None:
    """Inputs of the one equation that makes a value; ``None`` if no region holds it."""
    if value in over:
        return (over[value],)
    node = graph.node_of(value)
    return node.ins if node is not None and is_local(node) else None


def _may_be_of_a_mask(graph: Graph, value: int) -> bool:
    """Whether no products or layers made a value: it is a constant, or holds no table.

    Of a constant its numbers are known, such as those of a triangle.
    """
    few = len(graph.shape(value)) < 2
    return few or value in graph.constants or not _is_inexact(graph, value)


def _is_inexact(graph: Graph, value: int) -> bool:
    return jnp.issubdtype(graph.dtype(value), jnp.inexact)


def _is_no_larger(graph: Graph, value: int, outside: int, whole: int) -> bool:
    """Whether a value takes no more memory than the mask that is made of it.

    That of symbolic sizes must be so whatever numbers they become.
    """
    if _jax.is_key(graph.avals[value]):
        return False
    argument = graph.top.first_var.get(outside, (0,))[0] < 0
    size = _bytes(graph, value)
    return argument or any(
        _jax.never_larger(size, most) for most in (SMALL, _bytes(graph, whole))
    )


def _bytes(graph: Graph, value: int) -> int:
    return math.prod(graph.shape(value)) * graph.dtype(value).itemsize
