"""The gated linear unit of experts: act(x·w_gate[group]) · (x·w_up[group])."""

from __future__ import annotations

from rewriter.kernels.ragged.gated_linear_unit import (
    hopper,
    hopper_by_parts,
    hopper_stored,
    tpu,
    tpu_by_parts,
)
from rewriter.kernels.ragged.gated_linear_unit.op import OP as OP
from rewriter.kernels.ragged.gated_linear_unit.op import STORED as STORED

OPS = (OP, STORED)

KERNELS = (
    tpu.KERNEL, hopper.KERNEL, tpu_by_parts.KERNEL, hopper_by_parts.KERNEL,
    hopper_stored.KERNEL,
)  # fmt: skip
