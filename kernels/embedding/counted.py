"""Sums of rows whose ids count up, as positions do: one over the batch, no scatter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rewriter.kernels.embedding import forms, lookup
from rewriter.kernels.embedding.estimate import estimate
from rewriter.ops.kernel import PLATFORMS, Kernel, Limits, Speed, Traits
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.kernel import Spec


def supports(spec: Spec) -> Verdict:
    """Returns whether the ids of a use count up."""
    return all_of(forms.supports(spec), forms.counted_only(spec))


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns yes on a GPU, where the rows of a scatter collide."""
    del spec
    if platform in ("cuda", "rocm"):
        return YES
    return no("platform", f"not measured to be faster than XLA on {platform}")


def forward(
    *,
    rows: jax.Array,
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
    del outside
    *lead, m, d = rows.shape
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    sums = rows.astype(wide).reshape(*lead, m // period, period, d).sum(-3)
    if table is None:
        around = [(0, 0)] * len(lead)
        around += [(start, size - start - period), (0, 0)]
        out = jnp.pad(sums.astype(rows.dtype), around)
    else:
        place = (..., slice(start, start + period), slice(None))
        sums = sums + table[place].astype(wide)
        out = table.at[place].set(sums.astype(table.dtype))
    return (out, ()) if residuals else out


KERNEL = Kernel(
    name="counted",
    op="embedding",
    platforms=PLATFORMS,
    version=1,
    forward=forward,
    backward=forms.backward,
    limits=Limits(supports),
    speed=Speed(profitable, estimate=estimate),
    traits=Traits(memory_bounded=True, saves_out=False),
)
LOOKUP = lookup.with_sums(KERNEL, forms.counted_only)
KERNELS = (KERNEL, LOOKUP)
