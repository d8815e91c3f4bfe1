"""LayerNorm: (x − mean) / sqrt(var + eps) · scale + bias, over the last axis."""

from __future__ import annotations

from rewriter.kernels.norms.layer_norm import hopper, tpu, xla
from rewriter.kernels.norms.layer_norm.cost import cost
from rewriter.kernels.norms.layer_norm.reference import reference, sample
from rewriter.ops.op import Op, Operand

OP = Op(
    name="layer_norm",
    operands=(
        Operand("x", "... d", True, "The rows: mean and variance are over d."),
        Operand("scale", "d", doc="Multiplies the rows; 1 if absent."),
        Operand("bias", "d", doc="Added to the rows; 0 if absent."),
        Operand("epsilon", "", doc="Added to `eps`, if known only at run time."),
    ),
    out="... d",
    reference=reference,
    sample=sample,
    defaults={"eps": 0.0, "out_dtype": None, "of_squares": False},
    parallel="...",
    cost=cost,
)  # fmt: skip

KERNELS = (tpu.KERNEL, hopper.KERNEL, xla.KERNEL)
