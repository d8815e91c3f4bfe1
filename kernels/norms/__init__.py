"""Layer norm and RMS norm: one family, told apart by whether rows are centred.

`forms.CENTRED` names both. Each file beside it has what both share, and what differs.
"""

from __future__ import annotations

import functools

from rewriter.kernels.norms import hopper, tpu, xla
from rewriter.kernels.norms.cost import cost
from rewriter.kernels.norms.forms import CENTRED
from rewriter.kernels.norms.reference import reference, sample
from rewriter.ops.op import Op, Operand, unsaid


def _op(name: str) -> Op:
    """The norm of a name: a bias, and its own parameter, belong to centred rows."""
    centred = CENTRED[name]
    of_rows = "mean and variance are" if centred else "the mean square is"
    operands = [
        Operand("x", "... d", True, f"The rows: {of_rows} over d."),
        Operand("scale", "d", doc="Multiplies the rows; 1 if absent."),
        Operand("bias", "d", doc="Added to the rows; 0 if absent."),
        Operand("epsilon", "", doc="Added to `eps`, if known only at run time."),
    ]
    formula = "x / sqrt(mean(x²) + eps) · scale"
    if centred:
        formula = "(x − mean) / sqrt(var + eps) · scale + bias"
    return Op(
        name=name,
        about=f"{formula}, over the last axis.",
        operands=tuple(o for o in operands if centred or o.name != "bias"),
        out="... d",
        reference=functools.partial(reference, centred=centred),
        flat=True,
        sample=functools.partial(sample, centred=centred),
        defaults={"eps": 0.0, "out_dtype": None}
        | ({"of_squares": False} if centred else {}),
        parallel="...",
        words={"of_squares": unsaid},
        cost=functools.partial(cost, centred=centred),
    )


OPS = tuple(map(_op, CENTRED))

KERNELS = (*tpu.KERNELS, *hopper.KERNELS, *xla.KERNELS)
