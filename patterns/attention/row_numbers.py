"""Primitives on the numbers of one row, and their derivatives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rewriter.program.numeric import NUMERIC as ON_NUMBERS

NUMERIC: dict[str, Any] = {
    name: ON_NUMBERS[name]
    for name in (
        "add", "sub", "mul", "div", "neg", "abs", "sign", "max", "min", "exp", "exp2",
        "log", "tanh", "integer_pow", "logaddexp", "is_finite", "eq", "ne", "gt", "lt",
        "ge", "le", "and", "or", "not",
    )
}  # fmt: skip
"""What a primitive gives for numbers and its parameters, if its derivative is known."""

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
