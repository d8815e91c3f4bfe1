"""Paged attention: attention over keys and values in pages that a table names."""

from __future__ import annotations

from rewriter.kernels import attention
from rewriter.kernels.attention.paged import hopper, tpu, xla
from rewriter.kernels.attention.paged.cost import cost
from rewriter.kernels.attention.paged.reference import distributions, reference, sample
from rewriter.kernels.attention.paged.sharding import operands, sharding
from rewriter.ops.op import Op

OP = Op(
    name="paged_attention",
    form_of="attention",
    operands=operands(),
    out=attention.OP.out,
    reference=reference,
    sample=sample,
    defaults={
        **attention.OP.defaults, "heads_axis": 2, "wraps": True, "fills": False,
    },
    parallel="b",
    cost=cost,
    distributions=distributions,
    sharding=sharding,
)  # fmt: skip

KERNELS = (hopper.KERNEL, tpu.KERNEL, xla.KERNEL)
