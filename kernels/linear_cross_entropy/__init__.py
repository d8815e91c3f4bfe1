"""Linear cross-entropy: log Σ exp y - y[label], with y = x·w + bias."""

from __future__ import annotations

import math

from rewriter.kernels.cross_entropy.sharding import sharding
from rewriter.kernels.linear_cross_entropy import hopper, tpu, xla
from rewriter.kernels.linear_cross_entropy.cost import cost
from rewriter.kernels.linear_cross_entropy.reference import reference, sample
from rewriter.ops.op import Op, Operand, unsaid

OP = Op(
    name="linear_cross_entropy",
    operands=(
        Operand("x", "... k", True, "The rows that logits are made of."),
        Operand("w", "k v", True, "The weights, with a column for each class."),
        Operand("labels", "...", True, "The class of each row, int."),
        Operand("bias", "v", doc="Added to the logits; 0 if absent."),
        Operand("other", "...", doc="Another class of each row, int."),
        Operand("share", "...", doc="The part of the target that `other` has."),
        Operand("first", "1", doc="Of a `reduced` result: the first class, int32."),
    ),
    out="...",
    reference=reference,
    flat=True,
    sample=sample,
    defaults={
        "scale": 1.0, "soft_cap": 0.0, "label_smoothing": 0.0, "z_loss": 0.0,
        "outside": "nan", "of_log_probabilities": False, "whole_slopes": False,
        "mixed": False,
        "used": 0, "fill": -math.inf, "reduced": False, "nan_at": "both",
        "precision": None, "logits_dtype": None, "out_dtype": None,
    },
    parallel="...",
    cost=cost,
    sharding=sharding,
    words=dict.fromkeys(
        ("outside", "of_log_probabilities", "whole_slopes", "mixed", "nan_at"), unsaid
    ),
)  # fmt: skip

KERNELS = (xla.KERNEL, hopper.KERNEL, tpu.KERNEL)
