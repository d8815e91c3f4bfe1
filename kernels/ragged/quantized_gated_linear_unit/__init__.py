"""Quantized gated linear unit of experts: the unit with scaled 8-bit matrices."""

from __future__ import annotations

from rewriter.kernels.ragged import gated_linear_unit as plain
from rewriter.kernels.ragged.dot.rows import anywhere, from_any_row
from rewriter.kernels.ragged.quantized_gated_linear_unit import hopper
from rewriter.kernels.ragged.quantized_gated_linear_unit.estimate import estimate
from rewriter.kernels.ragged.quantized_gated_linear_unit.reference import (
    cost,
    distributions,
    general,
    reference,
    sample,
)
from rewriter.kernels.ragged.quantized_gated_linear_unit.sharding import sharding
from rewriter.ops.kernel import Kernel, Space
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

KERNELS = (
    anywhere(
        Kernel(
            name="hopper",
            op="quantized_ragged_gated_linear_unit",
            platforms=("cuda",),
            version=1,
            supports=hopper.supports,
            runs_on=hopper.runs_on,
            forward=hopper.forward,
            backward=hopper.backward,
            memory_bounded=True,
            profitable=hopper.profitable,
            estimate=estimate,
            saves_out=False,
            space=Space(hopper.Tiles, hopper.default, hopper.configs, hopper.fits),
        ),
        "x",
    ),
)
