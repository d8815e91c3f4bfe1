"""Quantized dot: rows times a matrix of few bits with scales."""

from __future__ import annotations

from rewriter.kernels.quantized_dot import hopper, xla
from rewriter.kernels.quantized_dot.op import OP as OP

KERNELS = (hopper.KERNEL, xla.KERNEL)
