"""The precision of a program's float32 products, and of its weights times v.

Most programs round weights to v's 16 bits, or round the result to 16 bits, which is as
coarse. Some do neither: weights of float32 times v, and a result of float32. Their
result has the digits that the product keeps, by its precision in JAX.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from collections.abc import Callable

    from rewriter.ops.kernel import Kernel

PRECISION = "precision"
"""The op's parameter: the precision of all its products, if operands are float32."""

PARAM = "weights"
"""The op's parameter: the precision of that product, ``"default"``, ``"high"`` or
``"highest"``, in such a program; else absent."""

EXACT = ("high", "highest")
"""Precisions above that in which XLA multiplies float32 numbers unasked."""


def in_float32(kernel: Kernel) -> Kernel:
    """Returns a kernel in plain JAX, or with cotangents in it, that keeps such digits.

    Its weights are in float32. Products are as exact as JAX's precision says.
    """

    def exactly(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def precise(*operands: Any, **given: Any) -> Any:
            of_all, of_weights = given.pop(PRECISION, None), given.pop(PARAM, None)
            asked = of_all or (of_weights if of_weights in EXACT else None)
            if asked is None:
                return run(*operands, **given)
            with jax.default_matmul_precision(asked):
                return run(*operands, **given)

        return precise

    second = kernel.backward
    return replace(
        kernel,
        forward=exactly(kernel.forward),
        backward=second and exactly(second),
    )
