"""How paged attention is split over devices: sequences, and heads with their pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rewriter.kernels import attention
from rewriter.kernels.attention.paged.reference import AXES
from rewriter.ops.op import OUT, Operand, Sharding


def operands(heads_axis: int = 2) -> tuple[Operand, ...]:
    """Returns the operands for pools with heads at an axis."""
    pool = " ".join(AXES[heads_axis]).replace("p", "y")
    q, _, _, *others = attention.OP.operands
    return (
        q,
        Operand("k_pages", pool, True, "A pool of pages of z keys each."),
        Operand(
            "v_pages", pool.replace("h", "e"), True,
            "A pool of pages of values, with the same axes and pages.",
        ),
        Operand("table", "b|1 p", True, "int: the pages of each sequence, in order."),
        *others,
    )  # fmt: skip


def sharding(params: Mapping[str, Any]) -> Sharding:
    """Returns how a use may be split; every device has all pages of its heads."""
    axes = {o.name: o.axes for o in operands(params.get("heads_axis", 2))}
    axes |= {OUT: attention.OP.out}
    return Sharding(frozenset("bn"), follows={"k": "n"}, dims=axes)
