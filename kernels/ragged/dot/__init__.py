"""Ragged dot: each group of rows times its own matrix."""

from __future__ import annotations

from rewriter.kernels.ragged.dot import hopper, tiled, tpu, xla
from rewriter.kernels.ragged.dot.cost import cost
from rewriter.kernels.ragged.dot.general import general
from rewriter.kernels.ragged.dot.reference import distributions, reference, sample
from rewriter.kernels.ragged.dot.rows import FIRST, from_any_row
from rewriter.kernels.ragged.dot.sharding import sharding
from rewriter.ops.op import Op

OP = Op(
    name="ragged_dot",
    operands=("lhs", "rhs", "group_sizes", FIRST),
    required=("lhs", "rhs", "group_sizes"),
    dims={"lhs": "m k", "rhs": "g k n", "group_sizes": "g", FIRST: "", "out": "m n"},
    reference=from_any_row(reference),
    sample=sample,
    defaults={"mode": "forward", "out_dtype": None, "precision": None},
    general=from_any_row(general),
    cost=cost,
    distributions=distributions,
    sharding=sharding,
)

KERNELS = (tpu.KERNEL, hopper.KERNEL, xla.KERNEL, tiled.KERNEL)
