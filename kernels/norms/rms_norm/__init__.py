"""RMSNorm: x / sqrt(mean(x²) + eps) · scale, over the last axis."""

from __future__ import annotations

from rewriter.kernels.norms.rms_norm import hopper, tpu, xla
from rewriter.kernels.norms.rms_norm.cost import cost
from rewriter.kernels.norms.rms_norm.reference import reference, sample
from rewriter.ops.op import Op

OP = Op(
    name="rms_norm",
    operands=("x", "scale", "epsilon"),
    required=("x",),
    dims={"x": "... d", "scale": "d", "epsilon": "", "out": "... d"},
    reference=reference,
    sample=sample,
    defaults={"eps": 0.0, "out_dtype": None},
    parallel="...",
    cost=cost,
)

KERNELS = (tpu.KERNEL, hopper.KERNEL, xla.KERNEL)
