"""Rows that overflow in programs which take exponentials without their maximum.

Such a program computes ``exp(x) / sum(exp(x))``. Where a score is above the logarithm
of the largest float, its exponential is infinite. Where all are below that of the
smallest, the sum is zero. Both make the row NaN. Kernels subtract the maximum, and
would give numbers. Their log-sum-exp says which rows these are, within the logarithm of
the number of keys.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.support.verdict import Verdict, no

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jax import Array

    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Kernel, Spec

PARAM = "unshifted"
"""The op's parameter: the dtype of such exponentials, or None."""


def overflows(log_sum_exp: Array, dtype: Any) -> Array:
    """Whether a row's exponentials leave the range of a dtype.

    The machine's own exponential says so: GPUs keep subnormal numbers, CPUs and TPUs
    flush them to zero.

    Args:
        log_sum_exp: The row's logarithm of the sum of exponentials, of any shape; -inf
            in a row without keys, which does not count.
        dtype: That of the program's exponentials.
    """
    wide = jnp.promote_types(dtype, jnp.float32)  # as XLA computes narrow ones
    total = jnp.exp(log_sum_exp.astype(wide)).astype(dtype)
    return jnp.isinf(total) | ((total == 0) & (log_sum_exp > -jnp.inf))


def with_overflow(kernel: Kernel) -> Kernel:
    """Returns an attention kernel that gives NaN in rows that overflow as written.

    A kernel whose residual is not the log-sum-exp refuses such uses.
    """
    if not kernel.traits.merges:
        limits = kernel.limits
        return replace(
            kernel,
            supports=_refusing(limits.supports),
            supports_on=limits.supports_on and _refusing(limits.supports_on),
        )
    first, second = kernel.forward, kernel.backward
    assert second is not None

    @functools.wraps(first)
    def forward(*operands: Array, **given: Any) -> Any:
        dtype = given.pop(PARAM, None)
        if dtype is None:
            return first(*operands, **given)
        asked = given.pop("residuals", False)
        out, saved = _marked(*first(*operands, **given, residuals=True), dtype)
        return (out, saved) if asked else out

    @functools.wraps(second)
    def backward(*operands: Array, **given: Any) -> Mapping[str, Array]:
        given.pop(PARAM, None)  # NaN in residuals reach the gradients
        return second(*operands, **given)

    return replace(kernel, forward=forward, backward=backward)


def _marked(
    out: Array, saved: Sequence[Array], dtype: Any
) -> tuple[Array, tuple[Array, ...]]:
    """Puts NaN into rows of a result [b, t, n, e] and its log-sum-exp [b, n, t]."""
    b, t, n, _ = out.shape
    first, *rest = saved
    total = sum((x.reshape(b, n, t) for x in rest), first.reshape(b, n, t))
    bad = overflows(total, dtype)
    out = jnp.where(bad.swapaxes(1, 2)[..., None], jnp.nan, out)
    first = jnp.where(bad.reshape(first.shape), jnp.nan, first)
    return out, (first, *rest)


def _refusing(supports: Callable[..., Verdict]) -> Callable[..., Verdict]:
    @functools.wraps(supports)
    def checked(spec: Spec, *device: Device) -> Verdict:
        if spec.param(PARAM) is not None:
            return no(
                PARAM,
                "it cannot tell which rows overflow without the maximum of the scores",
            )
        return supports(spec, *device)

    return checked
