"""Embedding: rows of a table that ids name, taken from it or added to it."""

from __future__ import annotations

from rewriter.kernels.embedding import by_distance, consecutive_ids, in_order, xla
from rewriter.kernels.embedding.cost import cost, of_lookup
from rewriter.kernels.embedding.lookup import NAME as LOOKUP
from rewriter.kernels.embedding.reference import looked_up, reference, sample
from rewriter.kernels.embedding.sharding import of_sums
from rewriter.ops.op import Op, Operand, unsaid

SUMS = Op(
    name="embedding",
    operands=(
        Operand("rows", "... m d", True, "The rows that are added."),
        Operand("ids", "... m", False, "The row of the table for each, int."),
        Operand("table", "... v d", False, "What they are added to; zeros if absent."),
    ),
    out="... v d",
    about="Rows added to the rows of a table that ids name: the gradient of a lookup.",
    reference=reference,
    sample=sample,
    defaults={"outside": "drop", "start": 0, "period": 0, "across": 0},
    parallel="...",
    words={"outside": unsaid},
    cost=cost,
    sharding=of_sums,
)  # fmt: skip

TAKEN = Op(
    name=LOOKUP,
    operands=(
        Operand("table", "... v d", True, "The table."),
        Operand("ids", "... m", False, "The row of the table for each result, int."),
    ),
    out="... m d",
    about="Rows of a table that ids name: a lookup, for the sake of its gradient.",
    reference=looked_up,
    sample=sample,
    defaults={"outside": "nan", "start": 0, "period": 0, "count": 0},
    parallel="...",
    words={"outside": unsaid},
    cost=of_lookup,
    sharding=lambda params: None,
    found_on=("cuda", "rocm"),
)  # fmt: skip

OPS = (SUMS, TAKEN)

KERNELS = (
    *consecutive_ids.KERNELS, by_distance.KERNEL, *xla.KERNELS, *in_order.KERNELS,
)  # fmt: skip
