"""One use of a ragged dot, and the forward pass around what a kernel computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import Array


@dataclass(frozen=True)
class Use:
    """The operands and parameters of the op.

    Attributes:
        lhs: [m, k].
        rhs: [g, k, n]; [g, n, k] if transposed; [m, n] if contracting.
        group_sizes: int [g].
        mode: "forward", "transposed" (rhs's last axis is summed) or "contracting" (the
            rows are: one product per group).
        out_dtype: The result's dtype, that of the operands by default.
        precision: As in `jax.lax.dot`.
    """

    lhs: Array
    rhs: Array
    group_sizes: Array
    mode: str = "forward"
    out_dtype: str | None = None
    precision: str | None = None

    @property
    def dtype(self) -> Any:
        """The result's dtype."""
        return jnp.dtype(self.out_dtype or jnp.result_type(self.lhs, self.rhs))

    @property
    def transposed(self) -> bool:
        """Whether the last axis of the matrices is summed."""
        return self.mode == "transposed"

    @property
    def contracting(self) -> bool:
        """Whether rows are summed."""
        return self.mode == "contracting"

    @property
    def columns(self) -> int:
        """The columns of the result."""
        return self.rhs.shape[1 if self.transposed else -1]


Product = Callable[..., Any]
"""``product(use, config)`` gives the result. The config is None for the default one."""


def forward(
    product: Product,
    *operands: Array,
    residuals: bool = False,
    config: Any = None,
    first_row: Array | None = None,
    **given: Any,
) -> Any:
    """Returns the ragged dot, as `reference` does; there are no residuals.

    Args:
        product: What the kernel computes.
        *operands: The first fields of `Use`.
        residuals: Whether to return ``(result, ())``.
        config: The kernel's.
        first_row: Where the rows of the first group begin; handed on if given.
        **given: The other fields of `Use`.
    """
    more = {} if first_row is None else {"first_row": first_row}
    out = product(Use(*operands, **given), config, **more)
    return (out, ()) if residuals else out
