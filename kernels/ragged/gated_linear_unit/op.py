"""Gated linear units of experts as ops: with matrices of floats, and stored ones."""

from __future__ import annotations

from rewriter.kernels.ragged.dot.op import OP as RAGGED_DOT
from rewriter.kernels.ragged.dot.rows import FIRST, from_any_row
from rewriter.kernels.ragged.gated_linear_unit.cost import cost
from rewriter.kernels.ragged.gated_linear_unit.reference import (
    distributions,
    general,
    reference,
    sample,
)
from rewriter.kernels.ragged.gated_linear_unit.sharding import sharding
from rewriter.ops.op import Op, Operand, Stored, unsaid
from rewriter.ops.slopes import params_once_differentiated
from rewriter.ops.stored import EIGHT_BITS, stored_form

_MATRICES = Stored(EIGHT_BITS, "k")

OP = Op(
    name="ragged_gated_linear_unit",
    operands=(
        Operand("x", "m k", True, "Rows: those of one group lie together."),
        Operand("w", "g k f", True, "The matrices of the branch that goes through the "
                "activation. [g, k, 2f] with those of both, if `halves` is set.",
                _MATRICES),
        Operand("w_up", "g k f", doc="The matrices of the other branch, if separate.",
                stored=_MATRICES),
        RAGGED_DOT.operand("group_sizes"),
        RAGGED_DOT.operand(FIRST),
    ),
    out="m f",
    reference=from_any_row(reference, "x"),
    sample=sample,
    defaults={
        "activation": "silu", "beta": 1.0, "halves": None, "slopes": (),
        "precision": None, "out_dtype": None,
    },
    general=from_any_row(general, "x"),
    cost=cost,
    distributions=distributions,
    sharding=sharding,
    differentiated=params_once_differentiated,
    words={"activation": str, "slopes": unsaid, "slopes_up": unsaid},
    parts="ragged_dot",
)  # fmt: skip

STORED = stored_form(
    OP, "quantized_ragged_gated_linear_unit", "the unit with scaled 8-bit matrices."
)
