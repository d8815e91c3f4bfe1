"""Dtypes that the Hopper kernels take, and the parts into which they round weights.

Tensor cores multiply 16-bit floats, and add up in float32. So q, k and v are exact, and
weights are rounded: that is what programs do, too, unless they multiply weights of
float32 and keep the result in float32. Operands of float32 are taken as sums of two
numbers of 16 bits; see `halves`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.attention.weights import PARAM, PRECISION
from rewriter.kernels.shared.halves import reach
from rewriter.support.verdict import YES, Verdict, all_of, no

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


HALVED = "float32"
"""The dtype of operands that are taken as sums of two numbers."""


def takes_halves(spec: Spec) -> Verdict:
    """Returns whether a use is one of float32 in a precision that halves reach."""
    kinds = {str(jnp.dtype(spec.dtype(name))) for name in "qkv"}
    kinds.add(str(jnp.dtype(spec.param("out_dtype") or spec.dtype("q"))))
    if kinds != {HALVED}:
        every = ", ".join(sorted(kinds))
        text = f"q, k, v and the result are {every}: with a q of float32, all must be"
        return no("dtype", text)
    return all_of(*(reach(spec.param(name)) for name in (PRECISION, PARAM)))


def is_halved(dtype: Any) -> bool:
    """Returns whether operands of a dtype are taken as sums of two numbers."""
    return jnp.dtype(dtype) == HALVED


def products(weights: str | None, dtype: Any = "bfloat16") -> int:
    """Returns how many products of 16-bit floats make that of weights and v.

    One has the digits of v. Two parts of a weight are needed where the program's result
    shows more. Three are products of two parts each, without that of the small ones.

    Args:
        weights: The op's parameter.
        dtype: That of q, k and v.
    """
    if is_halved(dtype):
        return 3
    return 1 if weights is None else 2


def parts(weights: str | None, dtype: Any = "bfloat16") -> int:
    """Returns how many 16-bit floats add up to a weight; see `products`."""
    return min(2, products(weights, dtype))


def in_parts(weights: Array, dtype: Any, count: int) -> tuple[Array, ...]:
    """Returns float32 weights as 16-bit floats: one, or two that add up to them.

    Two of bfloat16 have 16 digits together, more than the 11 of TF32.
    """
    first = weights.astype(dtype)
    if count == 1:
        return (first,)
    return first, (weights - first.astype(jnp.float32)).astype(dtype)
