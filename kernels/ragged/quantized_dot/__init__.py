"""Quantized ragged dot: each group of rows times its scaled 8-bit matrix."""

from __future__ import annotations

from rewriter.kernels.ragged import dot as plain
from rewriter.kernels.ragged.dot.rows import FIRST, from_any_row
from rewriter.kernels.ragged.quantized_dot import hopper
from rewriter.kernels.ragged.quantized_dot.cost import cost
from rewriter.kernels.ragged.quantized_dot.reference import (
    distributions,
    general,
    reference,
    sample,
)
from rewriter.kernels.ragged.quantized_dot.sharding import sharding
from rewriter.ops.op import Op, Operand

OP = Op(
    name="quantized_ragged_dot",
    form_of="ragged_dot",
    operands=(
        Operand("lhs", "m k", True, "Rows: those of one group lie together."),
        Operand("rhs", "g k n", True, "The groups' 8-bit matrices: int8, float8_e4m3fn "
                "or float8_e5m2. [g, n, k] if transposed."),
        plain.OP.operand("group_sizes"),
        Operand("rhs_scale", "g n", doc="A factor for each column of a matrix; 1 if "
                "absent."),
        plain.OP.operand(FIRST),
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

KERNELS = (hopper.KERNEL,)
