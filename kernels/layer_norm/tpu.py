"""LayerNorm on TPUs, in Pallas Mosaic TPU."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.kernels.norm_rows import Rows, smallest
from rewriter.kernels.norm_rows import configs as configs
from rewriter.kernels.norm_rows import default as default
from rewriter.kernels.norm_rows import fits as fits
from rewriter.kernels.norm_rows import profitable as profitable
from rewriter.kernels.norm_rows import profitable_backward as profitable_backward
from rewriter.kernels.norm_rows import supports as supports


def forward(
    *,
    x: jax.Array,
    eps: float = 0.0,
    out_dtype: str | None = None,
    residuals: bool = False,
    config: Rows | None = None,
    **given: jax.Array,
) -> Any:
    """Returns the result, as `reference` does; there are no residuals.

    Args:
        x: [..., d], bfloat16 or float32.
        eps: As for `reference`.
        out_dtype: The result's dtype; x's by default.
        residuals: Whether to return ``(result, ())``.
        config: The blocks.
        **given: scale [d], bias [d] and epsilon [], where there are.
    """
    from rewriter.kernels.norm_rows_tpu import normalized

    norm, rows = _rows(x, eps)
    dtype = jnp.dtype(out_dtype or x.dtype)
    out = normalized(norm, rows, given, dtype, config or smallest(x.shape[-1])).reshape(
        x.shape
    )
    return (out, ()) if residuals else out


def backward(
    *,
    x: jax.Array,
    out: None,
    residuals: tuple[()],
    cotangent: jax.Array,
    eps: float = 0.0,
    out_dtype: str | None = None,
    config: Rows | None = None,
    **given: jax.Array,
) -> dict[str, jax.Array]:
    """Returns the cotangents of every operand.

    Args:
        x: [..., d], bfloat16 or float32.
        out: Not needed.
        residuals: Empty.
        cotangent: As the result.
        eps: As in `forward`.
        out_dtype: As in `forward`.
        config: The blocks.
        **given: As in `forward`.
    """
    from rewriter.kernels.norm_rows_tpu import cotangents

    del out, residuals, out_dtype
    norm, rows = _rows(x, eps)
    up = cotangent.reshape(rows.shape)
    made = cotangents(norm, rows, up, given, config or smallest(x.shape[-1]))
    made["x"] = made["x"].reshape(x.shape)
    return {n: y.astype({"x": x, **given}[n].dtype) for n, y in made.items()}


def _rows(x: jax.Array, eps: float) -> tuple[Any, jax.Array]:
    """What is computed, and x as rows."""
    from rewriter.kernels.norm_rows_tpu import Norm

    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return Norm(True, eps, *rows.shape), rows
