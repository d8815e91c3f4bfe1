"""Ragged dots as ops: with matrices of floats, and with stored ones."""

from __future__ import annotations

from rewriter.kernels.ragged.dot.cost import cost
from rewriter.kernels.ragged.dot.general import general
from rewriter.kernels.ragged.dot.reference import distributions, reference, sample
from rewriter.kernels.ragged.dot.rows import FIRST, from_any_row
from rewriter.kernels.ragged.dot.sharding import sharding
from rewriter.ops.op import Op, Operand, Stored
from rewriter.ops.stored import EIGHT_BITS, stored_form

OP = Op(
    name="ragged_dot",
    operands=(
        Operand("lhs", "m k", True, "Rows: those of one group lie together."),
        Operand("rhs", "g k n", True, "The groups' matrices: [g, n, k] if transposed. "
                "If contracting, rows [m, n].", Stored(EIGHT_BITS, "k")),
        Operand("group_sizes", "g", True, "int: the rows of each group. Those past the "
                "sum belong to no group and give zeros."),
        Operand(FIRST, "", doc="int32: the first row of the first group; 0 if absent."),
    ),
    out="m n",
    reference=from_any_row(reference),
    sample=sample,
    defaults={"mode": "forward", "out_dtype": None, "precision": None},
    general=from_any_row(general),
    cost=cost,
    distributions=distributions,
    sharding=sharding,
)  # fmt: skip

STORED = stored_form(
    OP, "quantized_ragged_dot", "each group of rows times its scaled 8-bit matrix."
)
