"""Gated linear unit: act(x·w_gate + b_gate) · (x·w_up + b_up)."""

from __future__ import annotations

from rewriter.kernels.gated_linear_unit import (
    hopper,
    hopper_few_rows,
    hopper_stored,
    stored,
    tpu,
    xla,
)
from rewriter.kernels.gated_linear_unit.op import OP as OP
from rewriter.kernels.gated_linear_unit.op import STORED as STORED

OPS = (OP, STORED)

OF_FLOATS = (tpu.KERNEL, hopper.KERNEL, xla.KERNEL)
OF_STORED = (hopper_few_rows.KERNEL, hopper_stored.KERNEL, stored.KERNEL)

KERNELS = (*OF_FLOATS, *OF_STORED)
