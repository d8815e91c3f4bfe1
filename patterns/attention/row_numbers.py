"""Primitives on the numbers of one row, and their derivatives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

NUMERIC: dict[str, Any] = {
    "add": lambda a, b, p: a + b,
    "sub": lambda a, b, p: a - b,
    "mul": lambda a, b, p: a * b,
    "div": lambda a, b, p: float(np.float64(a) / np.float64(b)),
    "neg": lambda a, p: -a,
    "max": lambda a, b, p: max(a, b) if a == a and b == b else math.nan,
    "min": lambda a, b, p: min(a, b) if a == a and b == b else math.nan,
    "exp": lambda a, p: float(np.exp(np.float64(a))),
    "exp2": lambda a, p: float(np.exp2(np.float64(a))),
    "log": lambda a, p: float(np.log(np.float64(a))),
    "tanh": lambda a, p: math.tanh(a),
    "integer_pow": lambda a, p: float(np.float64(a) ** p["y"]),
    "logaddexp": lambda a, b, p: float(np.logaddexp(a, b)),
    "is_finite": lambda a, p: math.isfinite(a),
    "eq": lambda a, b, p: a == b,
    "ne": lambda a, b, p: a != b,
    "gt": lambda a, b, p: a > b,
    "lt": lambda a, b, p: a < b,
    "ge": lambda a, b, p: a >= b,
    "le": lambda a, b, p: a <= b,
    "and": lambda a, b, p: bool(a) and bool(b),
    "or": lambda a, b, p: bool(a) or bool(b),
    "not": lambda a, p: not a,
}
"""What a primitive gives for numbers and its parameters."""

_SLOPES: dict[str, Any] = {
    "mul": lambda a, b, out, p: (b, a),
    "div": lambda a, b, out, p: (1 / b, a / b / b),
    "exp": lambda a, out, p: (out,),
    "exp2": lambda a, out, p: (out,),
    "log": lambda a, out, p: (1 / a,),
    "integer_pow": lambda a, out, p: (p["y"] * a ** (p["y"] - 1),),
    "logaddexp": lambda a, b, out, p: (np.exp(a - out), np.exp(b - out)),
}


def slopes_are_finite(
    prim: str, args: Sequence[Any], out: Any, params: Any, live: Sequence[bool]
) -> bool:
    """Whether a primitive's derivatives by its live operands are numbers.

    Args:
        prim: The primitive. One without an entry has finite derivatives.
        args: Its operands, as numbers.
        out: Its result, rounded to its dtype.
        params: Its parameters.
        live: Which operands pass a gradient on.
    """
    of = _SLOPES.get(prim)
    if of is None:
        return True
    with np.errstate(all="ignore"):
        slopes = of(*map(np.float64, args), np.float64(out), params)
    pairs = zip(slopes, live, strict=True)
    return all(math.isfinite(slope) for slope, counts in pairs if counts)
