"""Operators of PyTorch that torchax lacks, in JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def grouped_mm(rows: Any, matrices: Any, offs: Any, out_dtype: Any = None) -> jax.Array:
    """Returns products of groups of rows with one matrix each, as ``_grouped_mm`` does.

    Args:
        rows: ``[rows, k]``, sorted by group.
        matrices: ``[groups, k, n]``.
        offs: ``[groups]`` integers: the row behind each group. Rows behind the last
            group are zeros.
        out_dtype: The result's dtype; that of the rows if None.
    """
    sizes = jnp.diff(offs, prepend=0).astype(jnp.int32)
    return jax.lax.ragged_dot(
        rows, matrices, sizes, preferred_element_type=out_dtype or rows.dtype
    )


def missing(torchax: Any) -> dict[Any, Callable[..., Any]]:
    """Returns PyTorch's operators that torchax has not, with what computes each."""
    import torch

    env = torchax.default_env()
    found: dict[Any, Callable[..., Any]] = {}

    def grouped(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype=None):
        if offs is None or bias is not None or a.ndim != 2 or b.ndim != 3:
            raise NotImplementedError("grouped_mm of rows and matrices, without a bias")
        rows, matrices, ends = env.t2j_iso((a, b, offs))
        dtype = torchax.interop.jax_view(out_dtype) if out_dtype is not None else None
        return env.j2t_iso(grouped_mm(rows, matrices, ends, dtype))

    operator = getattr(torch.ops.aten, "_grouped_mm", None)
    if operator is not None and operator.default not in env._ops:
        found[operator.default] = grouped
    return found
