"""How much longer XLA's 16-bit products take on NVIDIA GPUs where rows are unaligned.

Kernels load and store 16 bytes at once, which are 8 numbers. Rows of another multiple
need smaller loads. The figures are fitted to an H100
(``tests/bench/results/aligned_products_h100.json``): 50257 classes, by what of a
product is unaligned.

an operand   the result   times as long, measured and here
none         yes          1.5   1.5
one          no           3.4   3.0
one          yes          2.9   3.0
both         no           6.2   6.0
one of 30522 yes          1.8   1.8
"""

from __future__ import annotations

import math

PLATFORMS = ("cuda",)
"""Where XLA does not pad such products itself, or has no need to."""

EVEN = 8
"""Rows of a multiple of this many numbers are aligned."""

RESULT, ONE, BOTH = 0.5, 2.0, 5.0
"""What is added to 1 where the result alone, an operand or both operands are unaligned,
if rows have an odd number of numbers."""

SHARE = {1: 1.0, 2: 0.4, 4: 0.15}
"""The share of it, by the largest power of two that divides a row."""


def slower(left: int, right: int, result: int) -> float:
    """Returns how many times longer a product takes than an aligned one.

    Args:
        left: The numbers in a row of the first operand, as it lies in memory.
        right: Those of the second one.
        result: Those of the result.

    Example:
        >>> slower(768, 50304, 50304), slower(768, 50257, 50257)
        (1.0, 3.0)
        >>> round(slower(768, 30522, 30522), 1)
        1.8
    """
    operands = [_share(n) for n in (left, right) if n % EVEN]
    if not operands:
        return 1.0 + RESULT * _share(result) if result % EVEN else 1.0
    more = ONE if len(operands) == 1 else BOTH
    return 1.0 + more * max(operands)


def _share(size: int) -> float:
    return SHARE[math.gcd(size, EVEN // 2)]
