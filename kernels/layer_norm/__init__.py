"""LayerNorm: (x − mean) / sqrt(var + eps) · scale + bias, over the last axis."""

from __future__ import annotations

from rewriter.kernel import PLATFORMS, Kernel, pays_on_cpu
from rewriter.kernels import norm_rows, norm_rows_hopper
from rewriter.kernels.layer_norm import xla
from rewriter.kernels.layer_norm.cost import cost
from rewriter.kernels.layer_norm.estimate import estimate
from rewriter.kernels.layer_norm.reference import reference, sample
from rewriter.op import Op

OP = Op(
    name="layer_norm",
    operands=("x", "scale", "bias", "epsilon"),
    required=("x",),
    dims={"x": "... d", "scale": "d", "bias": "d", "epsilon": "", "out": "... d"},
    reference=reference,
    sample=sample,
    defaults={"eps": 0.0, "out_dtype": None},
    parallel="...",
    cost=cost,
)

KERNELS = (
    norm_rows.kernel("layer_norm", centred=True, estimate=estimate),
    norm_rows_hopper.kernel("layer_norm", centred=True, by_xla=xla, estimate=estimate),
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
