"""Paged attention: attention over keys and values in pages that a table names."""

from __future__ import annotations

from rewriter.kernels import attention
from rewriter.kernels.attention.paged import hopper, tpu, xla
from rewriter.kernels.attention.paged.cost import cost
from rewriter.kernels.attention.paged.estimate import estimate
from rewriter.kernels.attention.paged.reference import distributions, reference, sample
from rewriter.kernels.attention.paged.sharding import dims, sharding
from rewriter.ops.kernel import PLATFORMS, Kernel, Space
from rewriter.ops.op import Op

OP = Op(
    name="paged_attention",
    form_of="attention",
    operands=("q", "k_pages", "v_pages", "table", *attention.OP.operands[3:]),
    required=("q", "k_pages", "v_pages", "table"),
    dims=dims(),
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

KERNELS = (
    Kernel(
        name="hopper_decode",
        op="paged_attention",
        platforms=("cuda",),
        version=1,
        supports=hopper.supports,
        runs_on=hopper.runs_on,
        forward=hopper.forward,
        memory_bounded=True,
        profitable=hopper.profitable,
        estimate=estimate,
        space=Space(hopper.Split, hopper.default, hopper.configs, hopper.fits),
    ),
    Kernel(
        name="mosaic_tpu",
        op="paged_attention",
        platforms=("tpu",),
        version=1,
        supports=tpu.supports,
        tried=False,
        forward=tpu.forward,
        memory_bounded=True,
        profitable=tpu.profitable,
        space=Space(tpu.Chunk, tpu.default, tpu.configs, tpu.fits),
    ),
    Kernel(
        name="gathered",
        op="paged_attention",
        platforms=PLATFORMS,
        version=1,
        supports=xla.supports,
        forward=xla.forward,
        memory_bounded=True,
        profitable=xla.profitable,
    ),
)
