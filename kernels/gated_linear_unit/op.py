"""Gated linear units as ops: with matrices of floats, and with stored ones."""

from __future__ import annotations

from rewriter.kernels.gated_linear_unit.cost import cost
from rewriter.kernels.gated_linear_unit.reference import reference, sample, usual
from rewriter.kernels.gated_linear_unit.stored_form import unit_of_stored
from rewriter.ops.op import Op, Operand, Sharding, Stored, unsaid
from rewriter.ops.slopes import params_once_differentiated
from rewriter.ops.stored import FEW_BITS

_MATRIX = Stored(FEW_BITS, "k", by_steps=True)

OP = Op(
    name="gated_linear_unit",
    operands=(
        Operand("x", "... k", True, "The rows."),
        Operand("w_gate", "k f", True, "The branch that goes through the activation.",
                _MATRIX),
        Operand("w_up", "k f", True, "The other branch.", _MATRIX),
        Operand("b_gate", "f", doc="Added to the gate branch; 0 if absent."),
        Operand("b_up", "f", doc="The same for the other branch."),
        Operand("rows_gate", "... f", doc="Added to the gate branch row by row, as a "
                "low-rank adapter is; 0 if absent."),
        Operand("rows_up", "... f", doc="The same for the other branch."),
    ),
    out="... f",
    reference=reference,
    flat=True,
    sample=sample,
    usual=usual,
    defaults={
        "activation": "silu", "beta": 1.0, "clip_gate": (None, None),
        "clip_up": (None, None), "up_shift": 0.0, "slopes": (), "slopes_up": (),
        "precision": None, "out_dtype": None,
    },
    parallel="...",
    cost=cost,
    sharding=lambda params: Sharding(frozenset({"...", "f"})),
    differentiated=params_once_differentiated,
    words={"activation": str, "slopes": unsaid, "slopes_up": unsaid},
)  # fmt: skip

STORED = unit_of_stored(
    OP, "quantized_gated_linear_unit", "the unit with matrices of few bits and scales."
)
