"""How paged attention is split over devices: sequences, and heads with their pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rewriter.kernels import attention
from rewriter.kernels.attention.paged.reference import AXES
from rewriter.ops.op import Sharding


def dims(heads_axis: int = 2) -> dict[str, str]:
    """Returns the letters of all axes; see `rewriter.ops.op.Op.dims`."""
    pool = " ".join(AXES[heads_axis])
    plain = {n: d for n, d in attention.OP.dims.items() if n not in "kv"}
    values = pool.replace("h", "e").replace("p", "y")
    keys = pool.replace("p", "y")
    return {**plain, "k_pages": keys, "v_pages": values, "table": "b|1 p"}


def sharding(params: Mapping[str, Any]) -> Sharding:
    """Returns how a use may be split; every device has all pages of its heads."""
    axes = dims(params.get("heads_axis", 2))
    return Sharding(frozenset("bn"), follows={"k": "n"}, dims=axes)
