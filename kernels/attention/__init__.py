"""Attention: softmax(scale · q kᵀ + bias) v."""

from __future__ import annotations

from rewriter.kernels.attention import (
    cudnn,
    hopper,
    hopper_decode,
    tpu,
    tpu_pages,
    xla,
)
from rewriter.kernels.attention.hopper_decode import paged
from rewriter.kernels.attention.op import OP as OP
from rewriter.kernels.attention.op import PAGED as PAGED
from rewriter.kernels.attention.xla import gathered

OPS = (OP, PAGED)

KERNELS = (
    cudnn.KERNEL, hopper.KERNEL, hopper_decode.KERNEL, tpu.KERNEL, xla.KERNEL,
    paged.KERNEL, tpu_pages.KERNEL, gathered.KERNEL,
)  # fmt: skip
