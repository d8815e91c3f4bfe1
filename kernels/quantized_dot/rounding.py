"""Which steps from stored numbers to a matrix round once, after a single factor.

A kernel that multiplies in float32 and rounds once to 16 bits gives the same numbers as
a program that multiplies in these 16 bits: a product of a number of 8 bits and a factor
of 16 bits is exact in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

EXACT = frozenset({"float32", "int32", "int16"})
"""Dtypes that hold all numbers of 8 bits."""

SIXTEEN = frozenset({"bfloat16", "float16"})


@dataclass(frozen=True)
class Once:
    """Numbers times a factor in float32, rounded once.

    Attributes:
        factor: ``"scale"``, a number as text, or None for numbers that are only cast.
        dtype: The dtype in which the program multiplies: that of the factor.
    """

    factor: str | None
    dtype: str


def scaled_once(widen: str | None, dtype: str, scaled: bool) -> Once | None:
    """Returns how steps round once to a dtype, or None if they do not.

    Args:
        widen: The steps; None for the usual ones.
        dtype: The dtype of the rows, bfloat16 or float16.
        scaled: Whether there are scales, for the usual steps.

    Example:
        >>> scaled_once("bfloat16 *scale", "bfloat16", True)
        Once(factor='scale', dtype='bfloat16')
        >>> scaled_once("float32 *0.5 bfloat16", "bfloat16", False)
        Once(factor='0.5', dtype='float32')
        >>> scaled_once("bfloat16", "bfloat16", False)
        Once(factor=None, dtype='bfloat16')
        >>> scaled_once("bfloat16 -zero *scale", "bfloat16", True)
    """
    if dtype not in SIXTEEN:
        return None
    if widen is None:
        return Once("scale" if scaled else None, "float32")
    held, factor = "", None
    for step in widen.split():
        if (step in EXACT and factor is None) or step == dtype:
            held = step
        elif step[0] == "*" and factor is None and held in ("float32", dtype):
            factor, multiplied = step[1:], held
        else:
            return None
    if factor is None:
        return Once(None, dtype) if held in ("", dtype) else None
    return Once(factor, multiplied) if held == dtype else None
