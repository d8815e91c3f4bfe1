"""Quantized dot: rows times a matrix of few bits with scales."""

from __future__ import annotations

from rewriter.kernels.quantized_dot import (
    by_blocks_few_rows,
    by_blocks_hopper,
    by_blocks_xla,
    eight_bits,
    few_rows,
    hopper,
    packed,
    packed_few_rows,
    xla,
)
from rewriter.kernels.quantized_dot.by_blocks import BLOCKS as BLOCKS
from rewriter.kernels.quantized_dot.op import OP as OP
from rewriter.kernels.quantized_dot.op import PACKED as PACKED

OPS = (OP, PACKED, BLOCKS)

KERNELS = (
    eight_bits.KERNEL, few_rows.KERNEL, hopper.KERNEL, xla.KERNEL,
    packed_few_rows.KERNEL, packed.KERNEL,
    by_blocks_few_rows.KERNEL, by_blocks_hopper.KERNEL, by_blocks_xla.KERNEL,
)  # fmt: skip
