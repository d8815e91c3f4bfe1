"""LayerNorm: (x − mean) / sqrt(var + eps) · scale + bias, over the last axis."""

from __future__ import annotations

from rewriter.kernels.norms.layer_norm import hopper, tpu, xla
from rewriter.kernels.norms.layer_norm.cost import cost
from rewriter.kernels.norms.layer_norm.reference import reference, sample
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

KERNELS = (tpu.KERNEL, hopper.KERNEL, xla.KERNEL)
