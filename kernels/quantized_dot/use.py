"""One use of a quantized dot: its operands, its parameters and its three steps."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from rewriter.ops.stored import usual_steps
from rewriter.ops.widening import applied, by_steps


@dataclass(frozen=True)
class Use:
    """The operands and parameters of the op.

    Attributes:
        x: [..., k].
        w: [k, n]; [n, k] if transposed.
        w_scale: Factors of the numbers; see `rewriter.ops.stored`.
        w_zero: Addends of the numbers.
        x_scale: [...]. Factors of the product's rows, joined by `behind`.
        bias: [n]. Addends of the product, joined by `behind`.
        widen: The steps from the stored numbers to the matrix, see
            `rewriter.ops.widening`. By default they are scaled in float32, and rounded
            to the dtype of x.
        mode: "forward", or "transposed" for a matrix [n, k].
        behind: The steps from the product to the result. Scales of the matrix in them
            are [1, n] or [1, 1].
        sums: The product's dtype; that of JAX by default.
        precision: As in `jax.lax.dot`.
    """

    x: jax.Array
    w: jax.Array
    w_scale: jax.Array | None = None
    w_zero: jax.Array | None = None
    x_scale: jax.Array | None = None
    bias: jax.Array | None = None
    widen: str | None = None
    mode: str = "forward"
    behind: str = ""
    sums: str | None = None
    precision: str | None = None

    @property
    def transposed(self) -> bool:
        """Whether the matrix is [n, k]."""
        return self.mode == "transposed"

    @property
    def columns(self) -> int:
        """The columns of the result."""
        return self.w.shape[0 if self.transposed else 1]

    @property
    def steps(self) -> str:
        """The steps from the stored numbers to the matrix."""
        if self.widen is not None:
            return self.widen
        return usual_steps(self.w_scale, self.w_zero, self.x.dtype)

    def matrix(self) -> jax.Array:
        """Returns the widened matrix."""
        summed = int(self.transposed)
        return by_steps(self.w, self.steps, self.w_scale, self.w_zero, summed)

    def times(self, matrix: jax.Array) -> jax.Array:
        """Returns the product of the rows and a matrix."""
        axes = (self.x.ndim - 1,), (int(self.transposed),)
        return jax.lax.dot_general(
            self.x, matrix, (axes, ((), ())), precision=self.precision,
            preferred_element_type=self.sums,
        )  # fmt: skip

    def finished(self, product: jax.Array) -> jax.Array:
        """Returns the result of a product."""
        scale = None if self.w_scale is None else self.w_scale[0]
        rows = None if self.x_scale is None else self.x_scale[..., None]
        return applied(product, self.behind, scale, None, rows, self.bias)
