"""Sums of rows by their ids, added up in float32 with instructions of the GPU.

XLA adds 16-bit numbers with a loop of compare-and-swap, which takes a round for each
row that collides. It adds numbers of 32 bits with one instruction. If the table has
more rows than are given, there is one row of float32 sums for each given row. The last
row of each id owns its sum, and the others are added to the owner's. If the table has
very few rows, there are several tables of sums, so that fewer collide.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax

from rewriter.kernels.embedding import forms, lookup, sums
from rewriter.kernels.embedding.estimate import estimate
from rewriter.ops.kernel import PLATFORMS, Kernel, Limits, Speed, Traits
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.kernel import Spec


def supports(spec: Spec) -> Verdict:
    """Returns whether the rows have ids of their own."""
    return all_of(forms.supports(spec), forms.ids_given(spec))


def deterministic(config: Any) -> Verdict:
    """Returns no: rows of one id are added in the order in which they come."""
    del config
    return no("order", "rows of one id are added up in any order")


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns yes for 16-bit rows on a GPU."""
    if platform not in ("cuda", "rocm"):
        return no("platform", f"not measured to be faster than XLA on {platform}")
    if spec.dtype("rows") == "float32":
        return no("dtype", "XLA adds float32 as fast")
    return YES


def forward(
    *,
    rows: jax.Array,
    ids: jax.Array,
    table: jax.Array | None = None,
    size: int,
    outside: str = "drop",
    start: int = 0,
    period: int = 0,
    residuals: bool = False,
) -> Any:
    """Returns the sums, as `reference` does.

    Operands are those of the op, and parameters are as in `reference`.

    Args:
        residuals: Whether to return ``(result, ())``.
    """
    del start, period
    *lead, _, d = rows.shape
    flat, of_row, total = forms.flattened(rows, ids, size, outside)
    if table is not None:
        out = sums.into(table.reshape(total, d), flat, of_row)
    elif total > math.prod(rows.shape[:-1]):
        out = sums.by_owner(flat, of_row, total)
    else:
        out = sums.in_parts(flat, of_row, total)
    out = out.reshape(*lead, size, d)
    return (out, ()) if residuals else out


KERNEL = Kernel(
    name="in_float32",
    op="embedding",
    platforms=PLATFORMS,
    version=1,
    forward=forward,
    backward=forms.backward,
    limits=Limits(supports, deterministic=deterministic),
    speed=Speed(profitable, estimate=estimate),
    traits=Traits(memory_bounded=True, saves_out=False),
)
LOOKUP = lookup.with_sums(KERNEL, forms.ids_given)
KERNELS = (KERNEL, LOOKUP)
