"""Group norm and instance norm: statistics of positions and the channels of a group.

One op has both: an instance norm has one channel in each group. Positions may stand in
front of the channels or behind them, so that no layout of images needs a transposition.
"""

from __future__ import annotations

from rewriter.kernels.group_norm import hopper, xla
from rewriter.kernels.group_norm.cost import cost
from rewriter.kernels.group_norm.reference import reference, sample
from rewriter.ops.op import Op, Operand, Sharding, unsaid

OP = Op(
    name="group_norm",
    about="(x − mean) / sqrt(var + eps) · scale + bias, over positions and the "
    "channels of a group.",
    operands=(
        Operand(
            "x",
            "... m g c n",
            True,
            "Channels c of groups g, at positions m in front of them and n behind: "
            "mean and variance are over m, c and n.",
        ),
        Operand("scale", "g c", doc="Multiplies the channels; 1 if absent."),
        Operand("bias", "g c", doc="Added to the channels; 0 if absent."),
        Operand("epsilon", "", doc="Added to `eps`, if known only at run time."),
    ),
    out="... m g c n",
    reference=reference,
    flat=True,
    sample=sample,
    defaults={"eps": 0.0, "out_dtype": None, "of_squares": False},
    parallel="...",
    sharding=lambda params: Sharding(frozenset({"...", "g"})),
    words={"of_squares": unsaid},
    cost=cost,
)

KERNELS = (hopper.KERNEL, xla.KERNEL)
