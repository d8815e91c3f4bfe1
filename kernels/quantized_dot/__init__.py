"""Quantized dot: rows times a matrix of few bits with scales."""

from __future__ import annotations

from rewriter.kernels.quantized_dot import (
    eight_bits,
    few_rows,
    hopper,
    packed,
    xla,
)
from rewriter.kernels.quantized_dot.op import OP as OP
from rewriter.kernels.quantized_dot.op import PACKED as PACKED

OPS = (OP, PACKED)

KERNELS = (eight_bits.KERNEL, few_rows.KERNEL, hopper.KERNEL, xla.KERNEL, packed.KERNEL)
