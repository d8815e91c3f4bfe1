"""Embedding: rows added to the rows of a table, the gradient of a lookup."""

from __future__ import annotations

from rewriter.kernels.embedding import counted, in_order, xla
from rewriter.kernels.embedding.cost import cost
from rewriter.kernels.embedding.reference import reference, sample
from rewriter.kernels.embedding.sharding import sharding
from rewriter.ops.op import Op, Operand

OP = Op(
    name="embedding",
    operands=(
        Operand("rows", "... m d", True, "The rows that are added, of any float."),
        Operand("ids", "... m", False, "The table's row that each is added to, int."),
        Operand("table", "... v d", False, "What they are added to; zeros if absent."),
    ),
    out="... v d",
    about="Embedding: rows added to the rows of a table, the gradient of a lookup.",
    reference=reference,
    sample=sample,
    defaults={"outside": "drop", "start": 0, "period": 0},
    parallel="...",
    cost=cost,
    sharding=sharding,
)  # fmt: skip

KERNELS = (counted.KERNEL, xla.KERNEL, in_order.KERNEL)
