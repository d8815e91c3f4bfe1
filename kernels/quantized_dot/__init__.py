"""Quantized dot: rows times a matrix of few bits with scales."""

from __future__ import annotations

from rewriter.kernels.quantized_dot import few_rows, hopper, xla
from rewriter.kernels.quantized_dot.op import OP as OP

KERNELS = (few_rows.KERNEL, hopper.KERNEL, xla.KERNEL)
