"""The gated linear unit of experts: act(x·w_gate[group]) · (x·w_up[group])."""

from __future__ import annotations

from rewriter.kernel import Kernel
from rewriter.kernels.ragged_gated_linear_unit.cost import cost
from rewriter.kernels.ragged_gated_linear_unit.reference import (
    distributions,
    general,
    reference,
    sample,
)
from rewriter.kernels.ragged_gated_linear_unit.sharding import sharding
from rewriter.op import Op

OP = Op(
    name="ragged_gated_linear_unit",
    operands=("x", "w", "w_up", "group_sizes"),
    required=("x", "w", "group_sizes"),
    dims={
        "x": "m k", "w": "g k f", "w_up": "g k f", "group_sizes": "g", "out": "m f",
    },
    reference=reference,
    sample=sample,
    defaults={
        "activation": "silu", "beta": 1.0, "halves": None, "precision": None,
        "out_dtype": None,
    },
    general=general,
    cost=cost,
    distributions=distributions,
    sharding=sharding,
    parts="ragged_dot",
)  # fmt: skip

KERNELS: tuple[Kernel, ...] = ()
