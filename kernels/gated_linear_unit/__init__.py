"""Gated linear unit: act(x·w_gate + b_gate) · (x·w_up + b_up)."""

from __future__ import annotations

from rewriter.kernels.gated_linear_unit import hopper, tpu, xla
from rewriter.kernels.gated_linear_unit.cost import cost
from rewriter.kernels.gated_linear_unit.reference import reference, sample, usual
from rewriter.ops.op import Op, Sharding

OP = Op(
    name="gated_linear_unit",
    operands=("x", "w_gate", "w_up", "b_gate", "b_up", "rows_gate", "rows_up"),
    required=("x", "w_gate", "w_up"),
    dims={
        "x": "... k", "w_gate": "k f", "w_up": "k f", "b_gate": "f", "b_up": "f",
        "rows_gate": "... f", "rows_up": "... f", "out": "... f",
    },
    reference=reference,
    sample=sample,
    usual=usual,
    defaults={
        "activation": "silu", "beta": 1.0, "clip_gate": (None, None),
        "clip_up": (None, None), "up_shift": 0.0, "precision": None,
        "out_dtype": None,
    },
    parallel="...",
    cost=cost,
    sharding=lambda params: Sharding(frozenset({"...", "f"})),
)  # fmt: skip

KERNELS = (tpu.KERNEL, hopper.KERNEL, xla.KERNEL)
