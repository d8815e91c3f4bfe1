"""Turns graph values into normal forms: one rule per primitive.

Values are evaluated from the result towards the inputs, at given index arguments.
So layout primitives only rewrite arguments. A value without a rule is a leaf, named
after its value number.
"""

from __future__ import annotations

from rewriter.algebra.canonicalize import arithmetic as arithmetic
from rewriter.algebra.canonicalize import block_updates as block_updates
from rewriter.algebra.canonicalize import contraction as contraction
from rewriter.algebra.canonicalize import dynamic_slices as dynamic_slices
from rewriter.algebra.canonicalize import gather as gather
from rewriter.algebra.canonicalize import gathered_entries as gathered_entries
from rewriter.algebra.canonicalize import predicates as predicates
from rewriter.algebra.canonicalize import row_sums as row_sums
from rewriter.algebra.canonicalize.arithmetic import sigmoid, tanh
from rewriter.algebra.canonicalize.contraction import ragged_axes
from rewriter.algebra.canonicalize.dtypes import is_coarse, is_lossless, kind_of
from rewriter.algebra.canonicalize.evaluator import Evaluator
from rewriter.algebra.canonicalize.gather import Pages, values_named
from rewriter.algebra.canonicalize.gathered_entries import is_pick
from rewriter.algebra.canonicalize.infinities import log_may_be_infinite
from rewriter.algebra.canonicalize.intervals import interval, of_dtype, within
from rewriter.algebra.canonicalize.layout import pieces
from rewriter.algebra.canonicalize.primitives import (
    FULL,
    LAYOUT,
    LAYOUT_PRIMITIVES,
    LOCAL,
    MOVING,
    STRUCTURAL,
    TRANSPARENT,
    NeedSplit,
    adds_zero,
    is_local,
)
from rewriter.algebra.canonicalize.row_axes import row_axes, row_order

__all__ = [
    "FULL",
    "LAYOUT",
    "LAYOUT_PRIMITIVES",
    "LOCAL",
    "MOVING",
    "STRUCTURAL",
    "TRANSPARENT",
    "Evaluator",
    "NeedSplit",
    "Pages",
    "adds_zero",
    "interval",
    "is_coarse",
    "is_local",
    "is_lossless",
    "is_pick",
    "kind_of",
    "log_may_be_infinite",
    "of_dtype",
    "pieces",
    "ragged_axes",
    "row_axes",
    "row_order",
    "sigmoid",
    "tanh",
    "values_named",
    "within",
]  # fmt: skip
