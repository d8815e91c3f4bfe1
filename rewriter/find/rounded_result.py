"""Tells results that a region rounds to 16 bits and then only widens.

A kernel keeps what it computes in float32, and so leaves out the roundings inside of a
region. The last one belongs to the result: `f(x).astype(bfloat16).astype(float32)` has
the digits of bfloat16. A site ends there, and the program widens its result itself.
"""

from __future__ import annotations

from collections.abc import Set

import jax.numpy as jnp
import numpy as np

from rewriter.algebra.canonicalize import LAYOUT_PRIMITIVES, TRANSPARENT, is_pick
from rewriter.find.reading import Reading, Refused, leaves_of
from rewriter.program.graph import Graph, Node

MOVING = LAYOUT_PRIMITIVES | TRANSPARENT
CAST = "convert_element_type"


def require_own_rounding(graph: Graph, reading: Reading) -> None:
    """Refuses a reading whose result is rounded, and behind that only widened.

    Raises:
        Refused: If that is so; there is a reading that ends at the rounding.
    """
    if is_only_widened(graph, reading.value, {*leaves_of(reading)}):
        text = "the result is rounded to fewer digits, and only widened behind that"
        raise Refused("rounded", text)


def is_only_widened(graph: Graph, value: int, leaves: Set[int]) -> bool:
    """Whether a result is a narrower float of its region, widened and laid out.

    It may be multiplied by a number, too. What the region does not compute, such as a
    narrow array of which it takes rows, is no such float.

    Args:
        graph: The program.
        value: The result.
        leaves: What the region is computed from.
    """
    whole = _bits(graph, value)
    while whole and value not in leaves:
        if _bits(graph, value) < whole:
            return _is_computed(graph, value, leaves)
        below = _below(graph, graph.node_of(value))
        if below is None:
            return False
        value = below
    return False


def _bits(graph: Graph, value: int) -> int:
    """The size of a float; 0 of what is none."""
    dtype = graph.dtype(value)
    return np.dtype(dtype).itemsize if jnp.issubdtype(dtype, jnp.floating) else 0


def _below(graph: Graph, node: Node | None) -> int | None:
    """What a value is moved, cast or multiplied by a number of."""
    if node is None:
        return None
    if node.prim in ("mul", "div"):
        numbers = [graph.scalar(i) is not None for i in node.ins]
        if numbers[1]:
            return node.ins[0]
        return node.ins[1] if numbers[0] and node.prim == "mul" else None
    moved = node.prim in MOVING or node.prim in (CAST, "neg")
    return node.ins[0] if moved else None


def _is_computed(graph: Graph, value: int, leaves: Set[int]) -> bool:
    """Whether a narrow value is more than one of the leaves, laid out otherwise."""
    while value not in leaves:
        node = graph.node_of(value)
        if node is None:
            return False
        if node.prim not in MOVING and not is_pick(node):
            return True
        value = node.ins[0]
    return False
