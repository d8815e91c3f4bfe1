"""Rows of an array that a gather takes in turn, each equally often.

    x[arange(n) // c]    →    repeat(x, c)

Scales of groups are written so, and key heads that queries share.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rewriter.algebra.canonicalize.computed_positions import computed
from rewriter.program.graph import Graph
from rewriter.program.values import Node


class Repeats(NamedTuple):
    """Rows of an array, each taken several times in turn.

    Attributes:
        axis: The axis of rows.
        each: How often each is taken.
    """

    axis: int
    each: int


def repeated_rows(graph: Graph, node: Node) -> Repeats | None:
    """The rows that a gather takes so; None for other gathers.

    Args:
        graph: The program.
        node: The gather.
    """
    numbers = node.params["dimension_numbers"]
    rows, axes = graph.shape(node.ins[0]), numbers.start_index_map
    taken, places = node.params["slice_sizes"], graph.shape(node.ins[1])
    if len(axes) != 1 or len(places) != 2 or numbers.operand_batching_dims:
        return None
    (axis,) = axes
    others = all(
        n == m or d == axis for d, (n, m) in enumerate(zip(rows, taken, strict=True))
    )
    if not others or tuple(numbers.collapsed_slice_dims) != (axis,):
        return None
    each = graph.known("repeats", node.ins[1], lambda: _each(graph, node.ins[1]))
    inside = each is not None and (places[0] - 1) // each < rows[axis]
    return Repeats(axis, each) if each is not None and inside else None


def _each(graph: Graph, places: int) -> int | None:
    """How often each number is repeated, of integers 0, 0, ..., 1, 1, ...; or None."""
    array = computed(graph, places)
    if array is None or not array.size:
        return None
    flat = array.reshape(-1)
    each = int(np.argmax(flat > 0)) or len(flat)
    return each if np.array_equal(flat, np.arange(len(flat)) // each) else None
