"""The arguments that kernels of ragged dots take, around what each of them computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import Array

Product = Callable[..., Any]
"""``product(lhs, rhs, group_sizes, mode, dtype, precision, config)`` gives the result.

The dtype is the result's. The config is None for the default one.
"""


def forward(
    product: Product,
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    mode: str = "forward",
    out_dtype: str | None = None,
    precision: str | None = None,
    residuals: bool = False,
    config: Any = None,
    **more: Array,
) -> Any:
    """Returns the ragged dot, as `reference` does; there are no residuals.

    Operands are those of the op, and parameters are as in `reference`.

    Args:
        product: What the kernel computes.
        mode: "forward", "transposed" or "contracting".
        out_dtype: The result's dtype, that of the operands by default.
        residuals: Whether to return ``(result, ())``.
        config: The kernel's.
        **more: Other operands that the kernel takes.
    """
    dtype = jnp.dtype(out_dtype or jnp.result_type(lhs, rhs))
    out = product(lhs, rhs, group_sizes, mode, dtype, precision, config, **more)
    return (out, ()) if residuals else out
