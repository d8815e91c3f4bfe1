"""The gated linear unit of experts: act(x·w_gate[group]) · (x·w_up[group])."""

from __future__ import annotations

from rewriter.kernels.ragged import dot as ragged_dot
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
from rewriter.ops.op import Op, Operand

OP = Op(
    name="ragged_gated_linear_unit",
    operands=(
        Operand("x", "m k", True, "Rows: those of one group lie together."),
        Operand("w", "g k f", True, "The matrices of the branch that goes through the "
                "activation. [g, k, 2f] with those of both, if `halves` is set."),
        Operand("w_up", "g k f", doc="The matrices of the other branch, if separate."),
        ragged_dot.OP.operand("group_sizes"),
        ragged_dot.OP.operand(FIRST),
    ),
    out="m f",
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
