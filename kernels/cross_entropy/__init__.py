"""Cross-entropy: log Σ exp y - y[label], of each row of logits y."""

from __future__ import annotations

import math

from rewriter.kernels.cross_entropy import xla
from rewriter.kernels.cross_entropy.cost import cost
from rewriter.kernels.cross_entropy.reference import reference, sample
from rewriter.kernels.cross_entropy.sharding import sharding
from rewriter.ops.op import Op, Operand, unsaid

OP = Op(
    name="cross_entropy",
    operands=(
        Operand("logits", "... v", True, "The rows, over the classes v."),
        Operand("labels", "...", True, "The class of each row, int."),
        Operand("other", "...", doc="Another class of each row, int."),
        Operand("share", "...", doc="The part of the target that `other` has."),
        Operand("first", "1", doc="Of a `reduced` result: the first class, int32."),
    ),
    out="...",
    reference=reference,
    flat=True,
    sample=sample,
    defaults={
        "label_smoothing": 0.0, "z_loss": 0.0, "outside": "nan",
        "of_log_probabilities": False, "whole_slopes": False,
        "mixed": False,
        "used": 0, "fill": -math.inf, "reduced": False, "nan_at": "both",
        "out_dtype": None,
    },
    parallel="...",
    cost=cost,
    sharding=sharding,
    words=dict.fromkeys(
        ("outside", "of_log_probabilities", "whole_slopes", "mixed", "nan_at"), unsaid
    ),
)  # fmt: skip

KERNELS = (xla.KERNEL,)
