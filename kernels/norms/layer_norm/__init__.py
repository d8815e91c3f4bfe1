"""LayerNorm: (x − mean) / sqrt(var + eps) · scale + bias, over the last axis."""

from __future__ import annotations

from rewriter.kernels.norms import rows_hopper, rows_tpu
from rewriter.kernels.norms.layer_norm import xla
from rewriter.kernels.norms.layer_norm.cost import cost
from rewriter.kernels.norms.layer_norm.estimate import estimate
from rewriter.kernels.norms.layer_norm.reference import reference, sample
from rewriter.ops.kernel import PLATFORMS, Kernel, pays_on_cpu
from rewriter.ops.op import Op

OP = Op(
    name="layer_norm",
    operands=("x", "scale", "bias", "epsilon"),
    required=("x",),
    dims={"x": "... d", "scale": "d", "bias": "d", "epsilon": "", "out": "... d"},
    reference=reference,
    sample=sample,
    defaults={"eps": 0.0, "out_dtype": None, "of_squares": False},
    parallel="...",
    cost=cost,
)

KERNELS = (
    rows_tpu.kernel("layer_norm", centred=True, estimate=estimate),
    rows_hopper.kernel("layer_norm", centred=True, by_xla=xla, estimate=estimate),
    Kernel(
        name="memory_bounded",
        op="layer_norm",
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
