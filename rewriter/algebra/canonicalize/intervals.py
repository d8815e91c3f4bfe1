"""Bounds of the integers in an array, as far as they are known.

A law of whole numbers holds for machine integers only where no step wraps around.
These bounds prove that. They are those of the dtype, or narrower ones that equations
such as `clamp`, `rem` and `iota` imply.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from rewriter import _jax
from rewriter.algebra.canonicalize.primitives import LAYOUT_PRIMITIVES, TRANSPARENT
from rewriter.algebra.normal_form import EXACT
from rewriter.program.graph import Graph, Node
from rewriter.program.shard_places import devices_around

Interval = tuple[float, float]
UNKNOWN: Interval = (-math.inf, math.inf)
DEPTH = 12
"""The most equations above a value to examine."""

COUNTED = 1 << 16
"""Constant arrays of more elements have the bounds of their dtype."""


def interval(graph: Graph, value: int, depth: int = DEPTH) -> Interval:
    """Least and greatest number in an array of integers or booleans.

    Args:
        graph: The program.
        value: The array.
        depth: The most equations above it to examine.

    Returns:
        The inclusive bounds; infinite for other arrays.
    """
    whole = of_dtype(graph.dtype(value))
    if whole == UNKNOWN:
        return UNKNOWN
    array = graph.constants.get(value)
    if array is not None and 0 < np.size(array) <= COUNTED:
        numbers = np.asarray(array)
        found = float(numbers.min()), float(numbers.max())
        return found if within(found, held_by(numbers.dtype)) else whole
    node = graph.node_of(value)
    if depth == 0:
        return whole
    if node is None:
        found = _in_a_loop(graph, value, depth - 1)
    else:
        found = _made_by(graph, node, value, depth - 1)
    if found is None or not within(found, held_by(graph.dtype(value))):
        return whole
    return found


def of_dtype(dtype: object) -> Interval:
    """The bounds of a dtype of integers or booleans; infinite for others."""
    if dtype == bool:
        return 0.0, 1.0
    try:
        if not jnp.issubdtype(dtype, jnp.integer):
            return UNKNOWN
    except TypeError:
        return UNKNOWN
    info = jnp.iinfo(dtype)
    return float(info.min), float(info.max)


def held_by(dtype: object) -> Interval:
    """The bounds of sums that do not wrap around in a dtype, and are exact here.

    Forms and bounds hold numbers as float64, which rounds integers beyond 2^53.
    """
    least, most = of_dtype(dtype)
    return max(least, 1 - EXACT), min(most, EXACT - 1)


def within(inner: Interval, outer: Interval) -> bool:
    """Whether one interval is a part of another."""
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _in_a_loop(graph: Graph, value: int, depth: int) -> Interval | None:
    """The bounds of what a loop's body is given at each step."""
    if value in graph.slice_of:
        return interval(graph, graph.slice_of[value], depth)
    if value not in graph.counters.known:
        return None
    first, step, length = graph.counters.known[value]
    lo, hi = interval(graph, first, depth)
    last = step * max(length - 1, 0)
    return lo + min(last, 0), hi + max(last, 0)


def _made_by(graph: Graph, node: Node, value: int, depth: int) -> Interval | None:
    """The bounds of an equation's result over the integers; None if unknown."""
    prim = node.prim
    if prim == "iota":
        return 0.0, float(_most(node.params["shape"][node.params["dimension"]]) - 1)
    if prim == "axis_index":
        return _of_devices(node)
    if prim in ("argmax", "argmin"):
        axes = node.params["axes"]
        return 0.0, float(_most(graph.shape(node.ins[0])[axes[0]]) - 1)
    if prim in TRANSPARENT:
        return interval(graph, node.ins[node.outs.index(value)], depth)
    if prim in SAME_ELEMENTS:
        return interval(graph, node.ins[0], depth)
    if prim == "gather":
        filled = node.params["mode"] == GatherScatterMode.FILL_OR_DROP
        return None if filled else interval(graph, node.ins[0], depth)
    if prim in ("reduce_sum", "cumsum"):
        lo, hi = interval(graph, node.ins[0], depth)
        count = _added(graph, node)
        return min(lo, lo * count), max(hi, hi * count)
    if prim == "dot_general":
        lo, hi = _product(*(interval(graph, i, depth) for i in node.ins))
        count = _multiplied(graph, node)
        return lo * count, hi * count
    if prim in ("select_n", "concatenate", "pad", "stack"):
        parts = node.ins[1:] if prim == "select_n" else node.ins
        found = [interval(graph, i, depth) for i in parts]
        return min(lo for lo, _ in found), max(hi for _, hi in found)
    rule = RULES.get(prim)
    if rule is None:
        return None
    return rule(*(interval(graph, i, depth) for i in node.ins))


def _of_devices(node: Node) -> Interval | None:
    """The bounds of a device's number along an axis of a mesh."""
    around = devices_around(node.scope, node.eqn)
    if around is None:
        return None
    mesh, _, _ = around
    return 0.0, float(mesh.shape[node.params["axis_name"]] - 1)


def _added(graph: Graph, node: Node) -> int:
    """The greatest number of elements summed into one."""
    shape = graph.shape(node.ins[0])
    if node.prim == "cumsum":
        return _most(shape[node.params["axis"]])
    return math.prod(_most(shape[int(a)]) for a in node.params["axes"])


def _multiplied(graph: Graph, node: Node) -> int:
    """The number of products summed into one."""
    (axes, _), _ = node.params["dimension_numbers"]
    return math.prod(_most(graph.shape(node.ins[0])[int(a)]) for a in axes)


def _most(size: Any) -> int:
    """The greatest value of a size, which may be symbolic."""
    return _jax.size_range(size)[1]


def _product(a: Interval, b: Interval) -> Interval:
    ends = [x * y if x and y else 0.0 for x, y in itertools.product(a, b)]
    return min(ends), max(ends)


def _remainder(a: Interval, b: Interval) -> Interval | None:
    """Bounds of `rem`, whose sign is that of the dividend."""
    if b[0] <= 0:
        return None
    most = b[1] - 1
    return (0.0 if a[0] >= 0 else -most), (0.0 if a[1] <= 0 else most)


def _bits(a: Interval, b: Interval) -> Interval | None:
    """Bounds of `and` with a non-negative number."""
    most = [hi for lo, hi in (a, b) if lo >= 0]
    return (0.0, min(most)) if most else None


def _shifted(a: Interval, b: Interval) -> Interval | None:
    """Bounds of numbers without their lowest bits, some or more."""
    if b[0] < 0 or math.isinf(b[0]):
        return None
    least, most = (math.floor(x / 2.0 ** min(b[0], 64.0)) for x in a)
    return min(least, 0), max(most, -1 if a[1] < 0 else 0)


def _quotient(a: Interval, b: Interval) -> Interval | None:
    """Bounds of `div`, which rounds towards zero."""
    if b[0] <= 0:
        return None
    return (a[0] if a[0] < 0 else 0.0), (a[1] if a[1] > 0 else 0.0)


SAME_ELEMENTS = LAYOUT_PRIMITIVES | {
    "convert_element_type", "stop_gradient", "reduce_max", "reduce_min", "sort",
    "cummax", "cummin",
}  # fmt: skip
"""Primitives whose results are elements of their first operand, or equal integers. A
cast changes an element only if the new dtype does not hold it."""

RULES: dict[str, Callable[..., Interval | None]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _product,
    "neg": lambda a: (-a[1], -a[0]),
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "clamp": lambda lo, x, hi: (
        min(max(lo[0], x[0]), hi[0]), min(max(lo[1], x[1]), hi[1]),
    ),
    "rem": _remainder,
    "remainder": lambda a, b: (0.0, b[1] - 1) if b[0] > 0 else None,
    "floor_divide": lambda a, b: (
        (math.floor(min(a[0], 0.0)), max(a[1], 0.0)) if b[0] > 0 else None
    ),
    "div": _quotient,
    "and": _bits,
    "shift_right_arithmetic": _shifted,
    "shift_right_logical": lambda a, b: _shifted(a, b) if a[0] >= 0 else None,
    "sign": lambda a: (-1.0 if a[0] < 0 else 0.0, 1.0 if a[1] > 0 else 0.0),
}  # fmt: skip
