"""Ragged dot as JAX has it: each group of rows times its own matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jax import Array

CONTRACT = {
    "forward": ((1,), (1,)),
    "transposed": ((1,), (2,)),
    "contracting": ((0,), (0,)),
}
"""The contracted axes of lhs and rhs by mode."""


def reference(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    mode: str = "forward",
    out_dtype: str | None = None,
    precision: str | None = None,
) -> Array:
    """Returns `jax.lax.ragged_dot_general` in one of its three modes.

    Row i of lhs belongs to the group whose range of rows holds it, the ranges
    following one another; rows past ``sum(group_sizes)`` belong to none and
    give zeros.

    Args:
        lhs: [m, k].
        rhs: [g, k, n]; [g, n, k] if transposed; [m, n] if contracting.
        group_sizes: int [g].
        mode: "forward", "transposed" (rhs's last axis is contracted) or
            "contracting" (the rows are: one product per group).
        out_dtype: The result's dtype, that of the operands by default.
        precision: As in `jax.lax.dot`.

    Returns:
        [m, n], or [g, k, n] if contracting.
    """
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(CONTRACT[mode], ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[] if mode == "contracting" else [0],
    )
    return lax.ragged_dot_general(
        lhs,
        rhs,
        group_sizes,
        numbers,
        precision=precision,
        preferred_element_type=None if out_dtype is None else jnp.dtype(out_dtype),
    )


def sample(
    key: Array, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, Array]:
    """Returns normal matrices and uneven group sizes that sum to the rows.

    Args:
        key: A PRNG key.
        operands: Shapes and dtypes by operand name.
        params: The op's parameters; unused.
    """
    del params
    left, right, sizes = jax.random.split(key, 3)
    (m, _), (g,) = operands["lhs"].shape, operands["group_sizes"].shape
    of_row = jax.random.randint(sizes, (m,), 0, g)
    counts = jnp.zeros(g, operands["group_sizes"].dtype).at[of_row].add(1)
    result = {"group_sizes": counts}
    for name, sub in (("lhs", left), ("rhs", right)):
        x = operands[name]
        result[name] = jax.random.normal(sub, x.shape).astype(x.dtype)
    return result
