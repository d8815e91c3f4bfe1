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
from rewriter.ops.op import Op

OP = Op(
    name="quantized_ragged_gated_linear_unit",
    form_of="ragged_gated_linear_unit",
    parts="ragged_dot",
    operands=(*plain.OP.operands, "w_scale", "w_up_scale"),
    required=plain.OP.required,
    dims={**plain.OP.dims, "w_scale": "g f", "w_up_scale": "g f"},
    reference=from_any_row(reference, "x"),
    sample=sample,
    defaults=plain.OP.defaults,
    general=from_any_row(general, "x"),
    cost=cost,
    distributions=distributions,
    sharding=sharding,
)

KERNELS = (hopper.KERNEL,)
