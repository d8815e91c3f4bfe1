"""Quantized dot as an op: rows times a matrix that is stored in few bits."""

from __future__ import annotations

import dataclasses

from rewriter.kernels.quantized_dot.cost import cost
from rewriter.kernels.quantized_dot.packed_form import packed_form
from rewriter.kernels.quantized_dot.reference import computed, product, sample
from rewriter.ops.op import Op, Operand, Sharding, Stored
from rewriter.ops.stored import FEW_BITS, stored_form
from rewriter.ops.widening import BIAS, reads

MATRIX = {"forward": "k n", "transposed": "n k"}
"""The axes of the matrix by mode."""

DOT = Op(
    name="dot",
    operands=(
        Operand("x", "... k", True, "The rows."),
        Operand("w", "k n", True, "The matrix: [n, k] if transposed.",
                Stored(FEW_BITS, "k", by_steps=True)),
        Operand("x_scale", "...", doc="A factor for each row of the product."),
        Operand("bias", "n", doc="An addend for each column of the product."),
    ),
    out="... n",
    reference=product,
    flat=True,
    sample=sample,
    defaults={"mode": "forward", "behind": "", "sums": None, "precision": None},
    parallel="...",
    cost=cost,
    sharding=lambda params: Sharding(
        frozenset({"...", "n"}),
        sums=frozenset() if reads(params["behind"], BIAS) else frozenset({"k"}),
        dims={"x": "... k", "w": MATRIX[params["mode"]], "out": "... n"},
    ),
)  # fmt: skip
"""The product of float matrices, which is left to XLA: it is no site."""

OP = dataclasses.replace(
    stored_form(DOT, "quantized_dot", "rows times a matrix of few bits with scales."),
    form_of="",
    stays=True,
    reference=computed,
    flat=True,
    defaults={"widen": None, **DOT.defaults},
)

PACKED = packed_form(
    OP, "packed_dot", "rows times a matrix of 4-bit numbers packed in bytes or words."
)
