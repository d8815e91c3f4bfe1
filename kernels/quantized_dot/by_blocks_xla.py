"""Products of blocks one after the other: none but the sum is kept in memory.

XLA writes the products of all parts of the sum, as large as the result each.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rewriter.kernels.quantized_dot.by_blocks import NAME, Blocks, sizes
from rewriter.kernels.quantized_dot.by_blocks_estimate import estimate
from rewriter.kernels.shared.kinds import XLA
from rewriter.kernels.shared.limits import SYMBOLIC
from rewriter.kernels.shared.loops import fori_loop
from rewriter.ops.kernel import Spec, Speed
from rewriter.ops.widening import applied
from rewriter.support.verdict import YES, Verdict, no


def supports(spec: Spec) -> Verdict:
    """Takes uses of known sizes."""
    return SYMBOLIC if spec.symbolic else YES


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns yes on a CPU where products of parts take much memory."""
    m, _, n = sizes(spec)
    size = 4 * m * n * int(spec.param("groups"))
    if platform == "cpu" and size >= LEAST:
        return YES
    return no("small", f"products of {size >> 20} MiB on {platform}")


LEAST = 2 << 20
"""Bytes of all products from which on they are not kept."""


def forward(*, residuals: bool = False, **given: Any) -> Any:
    """Returns the result, each part rounded as by `computed`; there are no residuals.

    Args:
        residuals: Whether to return ``(result, ())``.
        **given: The fields of `Blocks`.
    """
    given.pop("config", None)
    use = Blocks(**given)
    columns = use.of_columns
    rows, matrix = use.parts
    dims = (((rows.ndim - 2,), (1 if use.transposed else 0,)), ((), ()))

    def part(array: Any, i: Any, axis: int) -> Any:
        if array is None:
            return None
        at = i if array.shape[axis] > 1 else 0
        return jax.lax.dynamic_index_in_dim(array, at, axis, keepdims=False)

    def product(i: Any) -> Any:
        own = applied(part(matrix, i, 1 if use.transposed else 0), use.widen)
        made = jax.lax.dot_general(
            part(rows, i, rows.ndim - 2), own, dims, precision=use.precision,
            preferred_element_type=use.sums,
        )  # fmt: skip
        of_rows = part(use.x_scale, i, rows.ndim - 2)
        return use.scaled(made, part(columns, i, 0), of_rows)

    like = jax.eval_shape(product, jnp.int32(0))
    wide = like.dtype if like.dtype.itemsize > 2 else jnp.float32
    add = lambda i, total: total + product(i).astype(wide)
    total = fori_loop(1, use.groups, add, product(jnp.int32(0)).astype(wide))
    out = applied(total.astype(like.dtype), use.behind)
    return (out, ()) if residuals else out


KERNEL = XLA.kernel(NAME, forward, None, supports, Speed(profitable, estimate=estimate))
