"""RMSNorm: x / sqrt(mean(x²) + eps) · scale, over the last axis."""

from __future__ import annotations

from rewriter.kernels.norms import rows_hopper, rows_tpu
from rewriter.kernels.norms.rms_norm import xla
from rewriter.kernels.norms.rms_norm.cost import cost
from rewriter.kernels.norms.rms_norm.estimate import estimate
from rewriter.kernels.norms.rms_norm.reference import reference, sample
from rewriter.ops.kernel import PLATFORMS, Kernel, pays_on_cpu
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

KERNELS = (
    rows_tpu.kernel("rms_norm", centred=False, estimate=estimate),
    rows_hopper.kernel("rms_norm", centred=False, by_xla=xla, estimate=estimate),
    Kernel(
        name="memory_bounded",
        op="rms_norm",
        platforms=PLATFORMS,
        version=1,
        supports=xla.supports,
        forward=xla.forward,
        backward=xla.backward,
        memory_bounded=True,
        saves_out=False,
        profitable=pays_on_cpu,
        estimate=estimate,
    ),
)
