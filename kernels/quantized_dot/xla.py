"""A quantized dot that widens one block of columns at a time.

XLA writes the whole matrix in the dtype of the rows, and reads it again. This one loops
over blocks of columns. A widened block stays in the caches until it is multiplied.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.kernels.quantized_dot.estimate import estimate
from rewriter.kernels.quantized_dot.use import Use
from rewriter.kernels.shared import columns
from rewriter.kernels.shared.columns import Block
from rewriter.kernels.shared.kinds import XLA
from rewriter.kernels.shared.products import unturned
from rewriter.ops.kernel import Spec, Speed
from rewriter.ops.stored import FEW_BITS
from rewriter.support.verdict import Verdict, no

MOST = 1 << 20
"""The most numbers of a block, unless it has 64 columns."""


def _columns(spec: Spec) -> int:
    return spec.shape("w")[0 if spec.param("mode") == "transposed" else 1]


SPACE = columns.space(MOST, _columns, (64, 256, 1024, 4096))


def supports(spec: Spec) -> Verdict:
    """Takes rows of floats, and a matrix of known sizes."""
    if (kind := spec.dtype("x")) in FEW_BITS:
        name = "int8_dot" if jnp.issubdtype(kind, jnp.integer) else "fp8_dot"
        return no(name, f"{name}: XLA multiplies {kind} by {spec.dtype('w')} itself")
    return columns.takes(spec, "w")


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns yes on a CPU for few rows and a large matrix."""
    return columns.pays(spec, platform, math.prod(spec.shape("w")))


def forward(
    *, residuals: bool = False, config: Block | None = None, **given: Any
) -> Any:
    """Returns the result, rounded as by `computed`; there are no residuals.

    Args:
        residuals: Whether to return ``(result, ())``.
        config: The block.
        **given: The fields of `Use`.
    """
    use = Use(**given)

    def block(first: Any, size: int) -> jax.Array:
        part = replace(_part(use, first, size), x=unturned(use.x))
        return part.finished(part.times(part.matrix()))

    out = columns.joined(block, use.columns, config)
    return (out, ()) if residuals else out


def backward(
    *,
    out: None = None,
    residuals: tuple[()] = (),
    cotangent: jax.Array,
    config: Block | None = None,
    **given: Any,
) -> dict[str, jax.Array]:
    """Returns the cotangent of x; the reference computes those of scales.

    Args:
        out: Not needed.
        residuals: Empty.
        cotangent: [..., n].
        config: The block.
        **given: The fields of `Use`.
    """
    del out, residuals
    use = Use(**given)
    x, wide = use.x, jnp.promote_types(use.x.dtype, jnp.float32)
    dims = (((cotangent.ndim - 1,), (0 if use.transposed else 1,)), ((), ()))

    def block(first: Any, size: int) -> jax.Array:
        part, g = _part(use, first, size), columns.taken(cotangent, first, size)
        matrix = part.matrix()
        sums = use.sums or jnp.promote_types(x.dtype, matrix.dtype)
        _, back = jax.vjp(part.finished, jnp.zeros(g.shape, sums))
        (g,) = back(g)
        kind = jnp.promote_types(g.dtype, matrix.dtype)  # as wide as the program's
        return jax.lax.dot_general(
            unturned(g.astype(kind)), matrix.astype(kind), dims,
            precision=use.precision, preferred_element_type=wide,
        )  # fmt: skip

    total = columns.added(block, jnp.zeros(x.shape, wide), use.columns, config)
    return {"x": total.astype(x.dtype)}


def _part(use: Use, first: Any, size: int) -> Use:
    """Some columns of a use."""
    axes = {"w": 0 if use.transposed else 1, "w_scale": 1, "w_zero": 1}
    arrays = {name: getattr(use, name) for name in axes}
    return replace(
        use,
        **{
            name: columns.taken(x, first, size, axes[name])
            for name, x in arrays.items()
            if x is not None
        },
    )


KERNEL = XLA.kernel(
    "quantized_dot", forward, backward, supports,
    Speed(profitable, estimate=estimate), SPACE,
)  # fmt: skip
