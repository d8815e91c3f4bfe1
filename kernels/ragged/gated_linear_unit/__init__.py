"""The gated linear unit of experts: act(x·w_gate[group]) · (x·w_up[group])."""

from __future__ import annotations

from rewriter.kernels.ragged.dot.rows import FIRST, from_any_row
from rewriter.kernels.ragged.gated_linear_unit import (
    hopper,
    hopper_by_parts,
    tpu,
    tpu_by_parts,
)
from rewriter.kernels.ragged.gated_linear_unit.cost import cost
from rewriter.kernels.ragged.gated_linear_unit.reference import (
    distributions,
    general,
    reference,
    sample,
)
from rewriter.kernels.ragged.gated_linear_unit.sharding import sharding
from rewriter.ops.op import Op

OP = Op(
    name="ragged_gated_linear_unit",
    operands=("x", "w", "w_up", "group_sizes", FIRST),
    required=("x", "w", "group_sizes"),
    dims={
        "x": "m k", "w": "g k f", "w_up": "g k f", "group_sizes": "g", FIRST: "",
        "out": "m f",
    },
    reference=from_any_row(reference, "x"),
    sample=sample,
    defaults={
        "activation": "silu", "beta": 1.0, "halves": None, "precision": None,
        "out_dtype": None,
    },
    general=from_any_row(general, "x"),
    cost=cost,
    distributions=distributions,
    sharding=sharding,
    parts="ragged_dot",
)  # fmt: skip

KERNELS = (tpu.KERNEL, hopper.KERNEL, tpu_by_parts.KERNEL, hopper_by_parts.KERNEL)
