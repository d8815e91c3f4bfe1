"""Rows times a matrix of few bits, where products of parts of the sum have scales.

Programs with a scale for each block of numbers, as with 1 x 128 numbers of rows and 128
x 128 of the matrix, multiply part by part. They scale each product, and add them up::

    out[..., n] = Σ_z rows[..., z] scale[z, n] Σ_k x[..., z, k] w[z, k, n]

Source: DeepSeek-V3 technical report (arXiv 2412.19437), section 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.kernels.quantized_dot.cost import cost
from rewriter.kernels.quantized_dot.op import MATRIX
from rewriter.kernels.quantized_dot.reference import sample as sample_of_dot
from rewriter.ops.op import Op, Operand, Sharding
from rewriter.ops.stored import levels_of
from rewriter.ops.widening import applied

NAME = "block_scaled_dot"


@dataclass(frozen=True)
class Blocks:
    """One use of the op.

    Attributes:
        x: [..., k].
        w: [k, n]; [n, k] if transposed.
        groups: The number z of equal parts of k whose products are scaled.
        x_scale: [..., z] or [..., 1]. Factors of rows of each part's product.
        w_scale: [z, c], where each n / c columns have one; either may be 1. Factors of
            columns of each part's product.
        widen: The casts of the matrix, see `rewriter.ops.widening`.
        mode: "forward", or "transposed" for a matrix [n, k].
        inside: The steps from a part's product to what is summed.
        behind: The steps from the sum to the result: casts.
        sums: The dtype of a part's product; that of JAX by default.
        precision: As in `jax.lax.dot`.
    """

    x: jax.Array
    w: jax.Array
    groups: int
    x_scale: jax.Array | None = None
    w_scale: jax.Array | None = None
    widen: str = ""
    mode: str = "forward"
    inside: str = ""
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
    def parts(self) -> tuple[jax.Array, jax.Array]:
        """Rows [..., z, k / z], and the matrix [z, k / z, n] or [n, z, k / z]."""
        z, n = self.groups, self.columns
        rows = self.x.reshape(*self.x.shape[:-1], z, -1)
        return rows, self.w.reshape((n, z, -1) if self.transposed else (z, -1, n))

    @property
    def of_columns(self) -> jax.Array | None:
        """[z or 1, n or 1] factors of columns."""
        if self.w_scale is None:
            return None
        count = self.w_scale.shape[1]
        return self.w_scale if count == 1 else jnp.repeat(
            self.w_scale, self.columns // count, 1
        )  # fmt: skip

    def scaled(self, product: jax.Array, columns: Any, rows: Any) -> jax.Array:
        """Returns what is summed of the product of one part.

        Args:
            product: [..., n].
            columns: [n] or [1], or None.
            rows: [...], or None.
        """
        rows = None if rows is None else rows[..., None]
        return applied(product, self.inside, columns, None, rows)


def computed(**given: Any) -> jax.Array:
    """Returns the sum of the scaled products of all parts.

    Args:
        **given: The fields of `Blocks`.

    Returns:
        [..., n].
    """
    use = Blocks(**given)
    rows, matrix = use.parts
    axis = rows.ndim - 2
    summed, part = (2, 1) if use.transposed else (1, 0)
    dims = ((axis + 1,), (summed,)), ((axis,), (part,))
    product = jax.lax.dot_general(
        rows, applied(matrix, use.widen), dims, precision=use.precision,
        preferred_element_type=use.sums,
    )  # fmt: skip
    columns, of_rows = use.of_columns, use.x_scale
    if columns is not None:
        columns = columns.reshape(len(columns), *(1,) * axis, -1)
    if of_rows is not None:
        of_rows = jnp.moveaxis(of_rows, -1, 0)
    scaled = use.scaled(product, columns, of_rows)
    return applied(jnp.sum(scaled, 0), use.behind)


def sample(
    key: jax.Array, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Returns rows and a matrix as of a quantized dot, and scales of both."""
    dot = {n: operands[n] for n in ("x", "w")}
    made = dict(sample_of_dot(key, dot, params))
    for i, name in enumerate(n for n in ("x_scale", "w_scale") if n in operands):
        own = operands[name]
        size = levels_of(operands[name[0]].dtype)
        one = jax.random.fold_in(key, i)
        each = jax.random.uniform(one, own.shape, minval=0.5, maxval=1.5)
        made[name] = (each / size).astype(own.dtype)
    return made


BLOCKS = Op(
    name=NAME,
    about="rows times a matrix of few bits, with scales of blocks of both.",
    operands=(
        Operand("x", "... k", True, "The rows: floats, or numbers of few bits."),
        Operand("w", "k n", True, "The matrix: [n, k] if transposed. Of few bits."),
        Operand("x_scale", "... z|1", doc="A factor of each part of each row."),
        Operand("w_scale", "z|1 c|1",
                doc="A factor of each part of k, and of n / c columns."),
    ),
    out="... n",
    reference=computed,
    flat=True,
    sample=sample,
    defaults={
        "groups": None, "widen": "", "mode": "forward", "inside": "", "behind": "",
        "sums": None, "precision": None,
    },
    parallel="...",
    cost=cost,
    stays=True,
    sharding=lambda params: Sharding(
        frozenset({"..."}),
        dims={"x": "... k", "w": MATRIX[params["mode"]], "x_scale": "... z|1",
              "w_scale": "z|1 c|1", "out": "... n"},
    ),
)  # fmt: skip


def sizes(spec: Any) -> tuple[int, int, int]:
    """Returns rows, the summed axis, and columns of a use."""
    *rows, k = spec.shape("x")
    n = spec.shape("w")[0 if spec.param("mode") == "transposed" else 1]
    return math.prod(rows), k, n
