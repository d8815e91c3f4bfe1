"""Sums of rows by their ids, sorted first: always added up in the same order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rewriter.kernels.embedding import forms, lookup, sums
from rewriter.kernels.embedding.estimate import estimate
from rewriter.ops.kernel import PLATFORMS, Kernel, Limits, Speed, Traits
from rewriter.support.verdict import Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.kernel import Spec


def supports(spec: Spec) -> Verdict:
    """Returns whether the rows have ids of their own."""
    return all_of(forms.supports(spec), forms.ids_given(spec))


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns no: adding in any order is faster."""
    del spec, platform
    return no("order", "sorting pays only where results must repeat bit for bit")


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
    out = sums.by_scan(flat, of_row, total).reshape(*lead, size, d)
    if table is not None:
        wide = jnp.promote_types(rows.dtype, jnp.float32)
        out = (table.astype(wide) + out.astype(wide)).astype(table.dtype)
    return (out, ()) if residuals else out


KERNEL = Kernel(
    name="in_order",
    op="embedding",
    platforms=PLATFORMS,
    version=1,
    forward=forward,
    backward=forms.backward,
    limits=Limits(supports),
    speed=Speed(profitable, estimate=estimate),
    traits=Traits(memory_bounded=True, saves_out=False),
)
LOOKUP = lookup.with_sums(KERNEL, forms.ids_given)
KERNELS = (KERNEL, LOOKUP)
