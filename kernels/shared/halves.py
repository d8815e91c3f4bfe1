"""Float32 numbers as two of bfloat16, which tensor cores multiply.

A number is the sum of its first digits in bfloat16 and of what is left, rounded
likewise: 16 of its 24 digits. A product of two such sums is three products of 16-bit
numbers, added up in float32; that of both small parts is left out. So attention is 10
to 33 times as exact as with TF32, in which XLA multiplies float32 numbers unless a
program asks for the highest precision
(``tests/bench/results/hopper_float32_h200.json``). Source: Henry, Tang, Heinecke,
"Leveraging the bfloat16 artificial intelligence datatype for higher-precision
computations" (arXiv 1904.06376).

Hopper's tensor cores also take TF32. But there the summed axis must be the last one of
both operands in memory, which is not so for weights times values.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rewriter.support.verdict import YES, Verdict, no


class Halves(NamedTuple):
    """Both parts of float32 numbers: arrays in registers, or references to memory.

    It is a tuple, so that JAX passes it on.
    """

    high: Any
    low: Any

    @property
    def at(self) -> _At:
        """Indexes both parts."""
        return _At(self)


PRECISIONS = (None, "default", "high", "TF32_TF32_F32", "BF16_BF16_F32_X3")
"""Precisions of float32 products that XLA computes in TF32, or as here."""

OVERRIDE = "NVIDIA_TF32_OVERRIDE"
"""An environment variable of NVIDIA's libraries: they use no TF32 if it is 0."""


def reach(precision: str | None) -> Verdict:
    """Returns whether halves are as exact as XLA's products of float32 on a GPU.

    Args:
        precision: That of the program's products.

    Example:
        >>> reach("high").ok, reach("highest").ok
        (True, False)
    """
    text, kept = "float32 products", "16 of their 24 digits are kept"
    if precision not in PRECISIONS:
        return no("precision", f"{text} at precision {precision}: {kept}")
    if precision != "BF16_BF16_F32_X3" and os.environ.get(OVERRIDE) == "0":
        return no("precision", f"{text} without TF32, as {OVERRIDE}=0 asks: {kept}")
    return YES


@dataclass(frozen=True)
class _At:
    """Returns parts of halves by an index."""

    whole: Halves

    def __getitem__(self, index: Any) -> Halves:
        return Halves(self.whole.high.at[index], self.whole.low.at[index])


def pairs(left: Any, right: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the pairs whose products add up to a product, the small ones first.

    Args:
        left: An operand, or its halves.
        right: The same.

    Example:
        >>> list(pairs(Halves("q", "q'"), Halves("k", "k'")))
        [("q'", 'k'), ('q', "k'"), ('q', 'k')]
    """
    if isinstance(left, Halves):
        yield from pairs(left.low, right.high if isinstance(right, Halves) else right)
        left = left.high
    if isinstance(right, Halves):
        yield left, right.low
        right = right.high
    yield left, right


TINY = 2.0**-126
"""The smallest number of bfloat16 that tensor cores do not take for 0."""


def split(x: jax.Array) -> jax.Array:
    """Returns float32 numbers in two parts, bfloat16 [2, ...], by plain JAX.

    Both parts of a number have its sign, and neither is 0 unless the number is. So the
    products of an infinite number's parts are infinite and of one sign, as the number's
    own: an infinite score stays one.

    Example:
        >>> high, low = split(jnp.float32([0.1, 3.0])).astype(jnp.float32)
        >>> bool(abs(high + low - jnp.float32([0.1, 3.0])).max() < 2e-6)
        True
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
    high = lax.bitcast_convert_type(bits, jnp.float32)  # rounded towards 0
    low = lax.reduce_precision(x - high, 8, 7)
    exact = (low == 0) | jnp.isinf(x)
    low = jnp.where(exact, jnp.where(x == 0, x, jnp.copysign(TINY, x)), low)
    return jnp.stack([high, low]).astype(jnp.bfloat16)
