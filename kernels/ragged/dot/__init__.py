"""Ragged dot: each group of rows times its own matrix."""

from __future__ import annotations

from rewriter.kernels.ragged.dot import hopper, tiled, tpu, xla
from rewriter.kernels.ragged.dot.hopper import eight_bits, stored
from rewriter.kernels.ragged.dot.op import OP as OP
from rewriter.kernels.ragged.dot.op import STORED as STORED

OPS = (OP, STORED)

KERNELS = (
    tpu.KERNEL, hopper.KERNEL, xla.KERNEL, tiled.KERNEL, stored.KERNEL,
    eight_bits.KERNEL,
)  # fmt: skip
