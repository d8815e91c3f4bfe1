"""Quantized ragged dot: each group of rows times its scaled 8-bit matrix."""

from __future__ import annotations

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
from rewriter.ops.op import Op

OP = Op(
    name="quantized_ragged_dot",
    form_of="ragged_dot",
    operands=("lhs", "rhs", "group_sizes", "rhs_scale", FIRST),
    required=("lhs", "rhs", "group_sizes"),
    dims={
        "lhs": "m k", "rhs": "g k n", "group_sizes": "g", "rhs_scale": "g n",
        FIRST: "", "out": "m n",
    },
    reference=from_any_row(reference),
    sample=sample,
    defaults={"mode": "forward", "out_dtype": None, "precision": None},
    general=from_any_row(general),
    cost=cost,
    distributions=distributions,
    sharding=sharding,
)  # fmt: skip

KERNELS = (hopper.KERNEL,)
