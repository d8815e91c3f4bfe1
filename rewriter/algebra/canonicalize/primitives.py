"""Which primitives a region may contain, and how deep the search follows them."""

from __future__ import annotations

import math
from collections.abc import Callable

from rewriter.algebra.normal_form import OverBudget
from rewriter.program.graph import Node

FULL, LAYOUT = "full", "layout"

LAYOUT_PRIMITIVES = frozenset({
    "transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "slice",
    "rev", "split", "dynamic_slice", "tile", "unstack",
})  # fmt: skip
TRANSPARENT = frozenset({
    "copy", "copy_p", "name", "sharding_constraint", "pvary", "pbroadcast",
    "reshard", "mesh_cast", "optimization_barrier", "with_layout_constraint",
    "layout_constraint",
})  # fmt: skip
MOVING = LAYOUT_PRIMITIVES | TRANSPARENT
ARITHMETIC = frozenset({
    "add", "add_any", "sub", "mul", "div", "neg", "square", "integer_pow", "pow",
    "sqrt", "rsqrt", "cbrt", "exp", "exp2", "log", "log1p", "expm1", "logistic", "tanh",
    "max", "min", "abs", "sign", "erf", "erfc", "sin", "cos", "select_n", "clamp",
    "convert_element_type", "stop_gradient", "is_finite", "ge", "gt", "le", "lt",
    "eq", "ne", "and", "or", "not", "xor", "one_minus_square", "iota",
    "floor_divide", "remainder", "rem", "logaddexp", "exp_neg_sq",
})  # fmt: skip
REDUCTIONS = frozenset({"reduce_sum", "reduce_or", "reduce_and"})
EXTREMES = frozenset({"reduce_max", "reduce_min"})
LOCAL = (
    LAYOUT_PRIMITIVES
    | TRANSPARENT
    | ARITHMETIC
    | REDUCTIONS
    | EXTREMES
    | frozenset({"concatenate", "stack", "pad"})
)


def is_local(node: Node) -> bool:
    """Whether an equation can be inside a region: no contraction over an axis."""
    if node.prim == "dot_general":
        return not node.params["dimension_numbers"][0][0]
    return node.prim in LOCAL


def adds_zero(node: Node, number: Callable[[int], float | None]) -> bool:
    """Whether an equation adds or subtracts zero.

    Args:
        node: The equation.
        number: Returns the number that a value holds at every position, or None.
    """
    if node.prim not in ("add", "sub"):
        return False
    first, second = node.ins
    return number(second) == 0 or (node.prim == "add" and number(first) == 0)


STRUCTURAL = frozenset({"ragged_dot_general", "ragged_dot"})
OPAQUE_LEVEL = 1 << 20
KNOWN_CONSTANTS = (
    math.sqrt(2 / math.pi), 0.044715, 1.702, math.sqrt(0.5), math.log2(math.e),
    math.log(2), 2 * math.sqrt(2 / math.pi), math.sqrt(2), 1 / 3, 1 / 6,
)  # fmt: skip


class NeedSplit(OverBudget):
    """An index runs over several pieces of a concatenation.

    Attributes:
        index: The index.
        cuts: The starts of all pieces but the first.
        stride: Instead of cuts: the pieces interleave with this stride.
    """

    def __init__(self, index: int, cuts: tuple[int, ...], stride: int = 1):
        super().__init__("a value is made of pieces")
        self.index, self.cuts, self.stride = index, cuts, stride
