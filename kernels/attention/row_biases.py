"""The cotangent of a bias that is the same for all keys of a row.

Such a bias cancels in the weights, and its cotangent is 0: the changes of a row's
scores add up to nothing. Kernels add them up from a result that is rounded to the dtype
of the queries. That leaves an error of these digits, where the program leaves one of
float32.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jax import Array

    from rewriter.ops.kernel import Kernel


def with_row_biases(kernel: Kernel) -> Kernel:
    """Returns an attention kernel whose biases of rows have a cotangent of exactly 0.

    It is NaN where the kernel's is not finite. With sinks it is that of the kernel, as
    the weights of keys do not add up to 1 then. So it is if a function of scores reads
    the bias.
    """
    if kernel.backward is None:
        return kernel
    computed = kernel.backward

    @functools.wraps(computed)
    def backward(*operands: Array, **given: Any) -> Mapping[str, Array]:
        grads, bias = computed(*operands, **given), given.get("bias")
        changed = given.get("sinks") is not None or given.get("score") is not None
        if bias is None or bias.shape[3] != 1 or changed or "bias" not in grads:
            return grads
        return {**grads, "bias": 0 * grads["bias"]}

    return replace(kernel, backward=backward)
