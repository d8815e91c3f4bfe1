"""Dtypes that the Hopper kernels take, and the parts into which they round weights.

Tensor cores multiply 16-bit floats, and add up in float32. So q, k and v are exact, and
weights are rounded: that is what programs do, too, unless they multiply weights of
float32 and keep the result in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.attention.weights import PARAM
from rewriter.support.verdict import YES, Verdict, no

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.kernel import Spec

TYPES = ("bfloat16", "float16")

WIDER = ("bfloat16", "float32")
"""Operands and a wider result. Numbers that are rounded to bfloat16 keep the range of
float32. In float16 cotangents might become infinite or zero."""


def takes_dtypes(spec: Spec) -> Verdict:
    """Returns whether a use has operands of one 16-bit float, and a fitting result."""
    kinds = {name: str(jnp.dtype(spec.dtype(name))) for name in "qkv"}
    one = kinds["q"]
    if set(kinds.values()) != {one} or one not in TYPES:
        every = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
        every = one if set(kinds.values()) == {one} else every
        text = f"tensor cores take q, k and v of one 16-bit float, not {every}"
        return no("dtype", f"{text}: a cast would round what the program does not")
    out = str(jnp.dtype(spec.param("out_dtype") or one))
    if out != one and (one, out) != WIDER:
        text = f"a result of {out} where q, k and v are {one}"
        return no("dtype", f"{text}: cotangents are rounded to {one}")
    if spec.param(PARAM) == "highest":
        text = "weights of float32 times v at the highest precision"
        return no("precision", f"{text}: 16 of their 24 digits are kept")
    return YES


def parts(weights: str | None) -> int:
    """Returns how many 16-bit floats add up to a weight.

    One has the digits of v. Two are needed where the program's result shows more.

    Args:
        weights: The op's parameter.
    """
    return 1 if weights is None else 2


def in_parts(weights: Array, dtype: Any, count: int) -> tuple[Array, ...]:
    """Returns float32 weights as 16-bit floats: one, or two that add up to them.

    Two of bfloat16 have 16 digits together, more than the 11 of TF32.
    """
    first = weights.astype(dtype)
    if count == 1:
        return (first,)
    return first, (weights - first.astype(jnp.float32)).astype(dtype)
