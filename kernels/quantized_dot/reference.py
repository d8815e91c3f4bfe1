"""Rows times a matrix that is stored in few bits, as programs write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from rewriter.kernels.quantized_dot.use import Use
from rewriter.ops.stored import FEW_BITS, numbers_of


def product(**given: Any) -> jax.Array:
    """Returns the product of rows and a matrix that is not stored in few bits.

    Args:
        **given: The fields of `Use`, without scales and zero points.
    """
    use = Use(**given)
    return use.finished(use.times(use.w))


def computed(**given: Any) -> jax.Array:
    """Returns the product, with each rounding of the program.

    Args:
        **given: The fields of `Use`.

    Returns:
        [..., n].
    """
    use = Use(**given)
    return use.finished(use.times(use.matrix()))


def sample(
    key: jax.Array, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Returns normal rows, and a matrix that keeps their size."""
    x, w = operands["x"], operands["w"]
    rows, matrix, beside = jax.random.split(key, 3)
    drawn = jax.random.normal(rows, x.shape)
    spread, narrow = x.shape[-1] ** -0.5, str(x.dtype) in FEW_BITS
    made = {
        "x": numbers_of(drawn, x.dtype) if narrow else drawn.astype(x.dtype),
        "w": (spread * jax.random.normal(matrix, w.shape)).astype(w.dtype),
    }
    for name, least in (("x_scale", 0.5), ("bias", -1.0)):
        if name in operands:
            own = operands[name]
            each = jax.random.uniform(beside, own.shape, minval=least, maxval=1.5)
            made[name] = each.astype(own.dtype)
    return made
