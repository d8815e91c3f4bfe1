"""Quantized ragged dot: each group of rows times its scaled 8-bit matrix."""

from __future__ import annotations

from rewriter.kernels.ragged.dot.rows import FIRST, anywhere, from_any_row
from rewriter.kernels.ragged.quantized_dot import hopper
from rewriter.kernels.ragged.quantized_dot.cost import cost
from rewriter.kernels.ragged.quantized_dot.estimate import estimate
from rewriter.kernels.ragged.quantized_dot.reference import (
    distributions,
    general,
    reference,
    sample,
)
from rewriter.kernels.ragged.quantized_dot.sharding import sharding
from rewriter.ops.kernel import Kernel, Space
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

KERNELS = (
    anywhere(
        Kernel(
            name="hopper",
            op="quantized_ragged_dot",
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
        )
    ),
)
