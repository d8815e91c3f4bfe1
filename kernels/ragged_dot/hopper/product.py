"""Ragged dot in its three modes and its gradients, by the two Hopper kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.ragged_dot import tiled, xla
from rewriter.kernels.ragged_dot.hopper.by_groups import product_of_groups
from rewriter.kernels.ragged_dot.hopper.by_rows import rows_times_matrices
from rewriter.kernels.ragged_dot.hopper.config import Tiles

if TYPE_CHECKING:
    from jax import Array


def forward(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    mode: str = "forward",
    out_dtype: str | None = None,
    precision: str | None = None,
    residuals: bool = False,
    config: Tiles | None = None,
) -> Any:
    """Returns the ragged dot, as `reference` does, for what `config.supports` takes.

    Products of 16-bit numbers are exact in the float32 that they are summed in, so
    that `precision` changes nothing.

    Args:
        lhs: [m, k], bfloat16 or float16.
        rhs: [g, k, n]; [g, n, k] if transposed; [m, n] if contracting.
        group_sizes: int [g].
        mode: "forward", "transposed" or "contracting".
        out_dtype: The result's dtype, that of the operands by default.
        precision: As in `jax.lax.dot`.
        residuals: Whether to return ``(result, ())``.
        config: The tiles.
    """
    del precision
    dtype, tiles = jnp.dtype(out_dtype or lhs.dtype), config or Tiles()
    if mode == "contracting":
        out = product_of_groups(lhs, rhs, group_sizes, dtype, tiles)
    else:
        turned = mode == "transposed"
        out = rows_times_matrices(lhs, rhs, group_sizes, turned, dtype, tiles)
    return (out, ()) if residuals else out


def backward(
    *,
    cotangent: Array,
    config: Tiles | None = None,
    **given: Any,
) -> dict[str, Array]:
    """Returns the cotangents of lhs and rhs, each a ragged dot itself.

    Args:
        cotangent: As the result of `forward`. If it is wider than the operands, which
            tensor cores do not multiply, XLA computes both in `tiled`'s way.
        config: The tiles.
        **given: As for `rewriter.kernels.ragged_dot.xla.backward`.
    """
    if cotangent.dtype != given["lhs"].dtype:
        return tiled.backward(cotangent=cotangent, **given)
    return xla.backward(cotangent=cotangent, config=config, product=forward, **given)
