"""Operators of PyTorch in JAX: those that torchax lacks, or computes in part."""

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


def batch_norm(
    x: jax.Array, mean: jax.Array, variance: jax.Array, eps: float
) -> jax.Array:
    """Returns values less a mean, over a deviation, per channel (axis 1)."""
    along = (1, -1, *[1] * (x.ndim - 2))
    scale = jax.lax.rsqrt(variance + eps).reshape(along)
    return (x - mean.reshape(along)) * scale


def statistics(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns mean, variance and unbiased variance of each channel (axis 1)."""
    axes = (0, *range(2, x.ndim))
    count = x.size // x.shape[1]
    mean, variance = jnp.mean(x, axes), jnp.var(x, axes)
    return mean, variance, variance * (count / max(count - 1, 1))


def added(torchax: Any) -> dict[Any, Callable[..., Any]]:
    """Returns operators of PyTorch, with the functions of tensors that compute them."""
    import torch

    env = torchax.default_env()
    view, jax_view = torchax.interop.torch_view, torchax.interop.jax_view

    def grouped(
        a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
    ) -> Any:
        if offs is None or bias is not None or a.ndim != 2 or b.ndim != 3:
            raise NotImplementedError(
                f"torch grouped_mm of shapes {tuple(a.shape)} and {tuple(b.shape)}:"
                " only rows [m, k] by matrices [g, k, n] with offs= and without bias="
                " are rewritten. Write the others as matmuls of each group"
            )
        rows, matrices, ends = env.t2j_iso((a, b, offs))
        dtype = None if out_dtype is None else jax_view(out_dtype)
        return view(grouped_mm(rows, matrices, ends, dtype))

    def normalized(
        input: Any, running_mean: Any, running_var: Any, weight: Any = None,
        bias: Any = None, training: bool = False, momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:  # fmt: skip
        """Torchax has it, but leaves the running statistics as they are."""
        x = env.t2j_iso(input)
        if training:
            mean, variance, unbiased = statistics(x)
            for kept, new in ((running_mean, mean), (running_var, unbiased)):
                if kept is not None:
                    old, share = env.t2j_iso(kept), jnp.asarray(momentum, new.dtype)
                    mixed = old * (1 - share) + new * share
                    kept.copy_(view(mixed.astype(old.dtype)))
        else:
            mean, variance = env.t2j_iso((running_mean, running_var))
        out = batch_norm(x, mean, variance, eps).astype(x.dtype)
        along = (1, -1, *[1] * (x.ndim - 2))
        if weight is not None:
            out = out * env.t2j_iso(weight).reshape(along)
        return view(out if bias is None else out + env.t2j_iso(bias).reshape(along))

    found: dict[Any, Callable[..., Any]] = {torch.nn.functional.batch_norm: normalized}
    operator = getattr(torch.ops.aten, "_grouped_mm", None)
    if operator is not None and operator.default not in env._ops:
        found[operator.default] = grouped
    return found
