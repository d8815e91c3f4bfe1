"""Quantized gated linear unit of experts: the unit with scaled 8-bit matrices."""

from __future__ import annotations

from rewriter.kernels.ragged import gated_linear_unit as plain
from rewriter.kernels.ragged.dot.rows import from_any_row
from rewriter.kernels.ragged.quantized_gated_linear_unit import hopper
from rewriter.kernels.ragged.quantized_gated_linear_unit.reference import (
    cost,
    distributions,
    general,
    reference,
    sample,
)
from rewriter.kernels.ragged.quantized_gated_linear_unit.sharding import sharding
from rewriter.ops.op import Op, Operand

OP = Op(
    name="quantized_ragged_gated_linear_unit",
    form_of="ragged_gated_linear_unit",
    parts="ragged_dot",
    operands=(
        *plain.OP.operands,
        Operand("w_scale", "g f", doc="A factor for each column of w, which is int8, "
                "float8_e4m3fn or float8_e5m2; 1 if absent."),
        Operand("w_up_scale", "g f", doc="The same for w_up."),
    ),
    out=plain.OP.out,
    reference=from_any_row(reference, "x"),
    sample=sample,
    defaults=plain.OP.defaults,
    general=from_any_row(general, "x"),
    cost=cost,
    distributions=distributions,
    sharding=sharding,
)  # fmt: skip

KERNELS = (hopper.KERNEL,)
