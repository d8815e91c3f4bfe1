"""Rows times a matrix that is stored in few bits, as programs write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from rewriter.ops.stored import usual_steps
from rewriter.ops.widening import applied, by_steps


def product(
    *,
    x: jax.Array,
    w: jax.Array,
    mode: str = "forward",
    behind: str = "",
    sums: str | None = None,
    precision: str | None = None,
) -> jax.Array:
    """Returns the product of rows and a matrix that is not stored in few bits.

    Args:
        x: [..., k].
        w: [k, n]; [n, k] if transposed.
        mode: "forward" or "transposed".
        behind: Casts of the product.
        sums: The product's dtype; that of JAX by default.
        precision: As in `jax.lax.dot`.
    """
    axes = (x.ndim - 1,), (int(mode == "transposed"),)
    out = jax.lax.dot_general(
        x, w, (axes, ((), ())), precision=precision, preferred_element_type=sums
    )
    return applied(out, behind)


def computed(
    *,
    x: jax.Array,
    w: jax.Array,
    w_scale: jax.Array | None = None,
    w_zero: jax.Array | None = None,
    widen: str | None = None,
    mode: str = "forward",
    behind: str = "",
    sums: str | None = None,
    precision: str | None = None,
) -> jax.Array:
    """Returns the product, with each rounding of the program.

    Operands are documented where the op is declared.

    Args:
        widen: The steps from the stored numbers to the matrix, see
            `rewriter.ops.widening`. By default they are scaled in float32, and rounded
            to the dtype of x.
        mode: "forward", or "transposed" for a matrix [n, k].
        behind: The steps from the product to the result. Scales in them are [1, n] or
            [1, 1].
        sums: The product's dtype; that of JAX by default.
        precision: As in `jax.lax.dot`.

    Returns:
        [..., n].
    """
    steps = usual_steps(w_scale, w_zero, x.dtype) if widen is None else widen
    matrix = by_steps(w, steps, w_scale, w_zero, int(mode == "transposed"))
    out = product(x=x, w=matrix, mode=mode, sums=sums, precision=precision)
    return applied(out, behind, None if w_scale is None else w_scale[0])


def sample(
    key: jax.Array, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Returns normal rows, and a matrix that keeps their size."""
    x, w = operands["x"], operands["w"]
    rows, matrix = jax.random.split(key)
    spread = x.shape[-1] ** -0.5
    return {
        "x": jax.random.normal(rows, x.shape).astype(x.dtype),
        "w": (spread * jax.random.normal(matrix, w.shape)).astype(w.dtype),
    }
