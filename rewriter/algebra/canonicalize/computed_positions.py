"""Positions that a program computes from no input, by steps that have no rule.

Libraries gather from a row of counted positions, or add up where a row is not counted,
to build masks. Such integers are the same in each run. They are computed once, as the
machine does, and counted rows are recognised among the results.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from rewriter.algebra.canonicalize.dtypes import kind_of
from rewriter.program.constant_tables import affine_constant
from rewriter.program.graph import Graph

STEPS = frozenset({
    "gather", "scatter", "scatter-add", "cumsum", "cumprod", "cummax", "cummin", "sort",
    "dynamic_slice", "dynamic_update_slice", "reduce_sum", "reduce_max", "reduce_min",
    "argmax", "argmin",
})  # fmt: skip
"""Primitives without a rule, whose results are computed if they depend on no input."""

BEHIND = STEPS | {
    "add", "sub", "mul", "div", "rem", "neg", "abs", "sign", "max", "min", "clamp",
    "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "select_n", "iota",
    "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "rev",
    "concatenate", "pad", "slice", "split", "convert_element_type", "copy",
    "stop_gradient", "floor_divide", "remainder",
}  # fmt: skip
"""Primitives that may lie behind them; all give the same integers on every device."""

MOST = 1 << 16
"""The most elements of an array, ..."""

DEPTH = 64
"""... and the most equations in a row, that are computed."""


def counted(graph: Graph, value: int) -> tuple[float, tuple[float, ...]] | None:
    """(offset, slope per axis) of integers that are computed from no input, or None."""
    node = graph.node_of(value)
    if node is None or node.prim not in STEPS or kind_of(graph.dtype(value)) != "i":
        return None

    def find() -> Any:
        array = _array(graph, value, DEPTH)
        return None if array is None else affine_constant(array)

    return graph.known("computed and affine", value, find)


def computed(graph: Graph, value: int) -> np.ndarray | None:
    """The integers of a value that depends on no input; None for others."""
    return _array(graph, value, DEPTH)


def _array(graph: Graph, value: int, depth: int) -> np.ndarray | None:
    """The elements of a value that depends on no input; None for others."""
    return graph.known("computed", value, lambda: _computed(graph, value, depth))


def _computed(graph: Graph, value: int, depth: int) -> np.ndarray | None:
    shape = graph.shape(value)
    if not all(isinstance(n, int) for n in shape) or math.prod(shape) > MOST:
        return None
    if kind_of(graph.dtype(value)) not in ("i", "b"):
        return None
    if value in graph.constants:
        return np.asarray(graph.constants[value], graph.dtype(value))
    node = graph.node_of(value)
    if node is None or depth == 0 or node.prim not in BEHIND:
        return None
    operands = []
    for i in node.ins:
        array = _array(graph, i, depth - 1)
        if array is None:
            return None
        operands.append(array)
    with jax.ensure_compile_time_eval():
        found = node.eqn.primitive.bind(*operands, **node.eqn.params)
    found = found if node.eqn.primitive.multiple_results else [found]
    return np.asarray(found[node.outs.index(value)])
