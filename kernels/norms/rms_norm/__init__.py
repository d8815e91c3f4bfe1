"""RMSNorm: x / sqrt(mean(x²) + eps) · scale, over the last axis."""

from __future__ import annotations

from rewriter.kernels.norms.rms_norm import hopper, tpu, xla
from rewriter.kernels.norms.rms_norm.cost import cost
from rewriter.kernels.norms.rms_norm.reference import reference, sample
from rewriter.ops.op import Op, Operand

OP = Op(
    name="rms_norm",
    operands=(
        Operand("x", "... d", True, "The rows: the mean square is over d."),
        Operand("scale", "d", doc="Multiplies the rows; 1 if absent."),
        Operand("epsilon", "", doc="Added to `eps`, if known only at run time."),
    ),
    out="... d",
    reference=reference,
    sample=sample,
    defaults={"eps": 0.0, "out_dtype": None},
    parallel="...",
    cost=cost,
)  # fmt: skip

KERNELS = (tpu.KERNEL, hopper.KERNEL, xla.KERNEL)
