"""Abstract values of a row without keys, and the result of each equation on them.

A value is a number, the same at every key, or one of a few names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

SCORES, ROW, WEIGHTS, UNKNOWN = "scores", "row", "weights", "unknown"
LOST = "lost"  # of any size: an equation without a rule, a fill under an unknown mask
NEARLY = "nearly"  # a result: the mean of the values but for digits of scores
LARGE = 32.0  # scores are assumed to be below it
SWALLOWS = 1e30  # an addend that absorbs all scores
Abstract = Any  # ("c", number or bool) or one of the names above


@dataclass(frozen=True)
class EmptyRow:
    """The result and the gradients of a program's softmax in a row without keys.

    Attributes:
        gives: ``"nan"``, ``"mean"``, ``"zero"`` or ``"unknown"``. With
            ``"mean_passing"`` it is the mean of the values, and a gradient passes to
            the scores, since a number of their dtype's size was added to them. With
            ``"nan_passing"`` it is a NaN whose gradient passes to them.
        breaks_gradients: Whether gradients of the scores are NaN, whatever it gives: a
            derivative is infinite or NaN there, and a cotangent of zero does not stop
            it (``0 * nan``).
        halves_gradients: Whether half of a gradient passes to the scores: a maximum of
            two equal numbers passes half of it to either.
        passes: Whether a gradient passes to the scores at all.
        score: What every score of such a row is; None if that is not one number.
        adds: Whether it is ``"mean_passing"`` but for digits of the scores, which the
            number that is added to them leaves.
    """

    gives: str
    breaks_gradients: bool = False
    halves_gradients: bool = False
    passes: bool = False
    score: float | None = None
    adds: bool = False


def absorbing(dtype: Any) -> float:
    """The size of a number that absorbs scores in a dtype."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return SWALLOWS
    return 2 * LARGE / float(jnp.finfo(dtype).eps)


def is_large_number(c: float) -> bool:
    """Whether a number is the size of a mask's fill."""
    return math.isfinite(c) and abs(c) > LARGE


def is_large(x: Abstract) -> bool:
    """Whether a number is a fill that an unknown mask may add."""
    return isinstance(x, tuple) and not abs(float(x[1])) <= LARGE


def mixed(prim: str, args: list[Abstract], absorbs: float) -> Abstract:
    """One equation with at least one operand that is not a constant.

    Args:
        prim: Its primitive.
        args: Its operands.
        absorbs: The size of a number beside which its dtype rounds scores away.
    """
    known = [float(x[1]) for x in args if isinstance(x, tuple)]
    others = {x for x in args if not isinstance(x, tuple)}
    if LOST in others:
        return LOST
    if UNKNOWN in others:
        if (
            prim in ("add", "sub")
            and known
            and (math.isinf(known[0]) or abs(known[0]) >= absorbs)
        ):
            sign = -1 if prim == "sub" and not isinstance(args[0], tuple) else 1
            return ("c", sign * known[0])
        return UNKNOWN
    if prim in ("add", "sub") and known:
        c = known[0]
        if math.isnan(c):
            return ("c", c)
        if math.isinf(c) or abs(c) >= absorbs:
            return ("c", -c if prim == "sub" and isinstance(args[1], tuple) else c)
        return SCORES if SCORES in others else ROW
    if prim in ("mul", "div") and known and known[0] not in (0.0,):
        return next(iter(others))
    if prim == "logaddexp" and known and known[0] < 0:
        return next(iter(others))  # the smaller one adds nothing
    if prim in ("max", "min") and known and abs(known[0]) >= absorbs:
        wins = (known[0] > 0) == (prim == "max")
        return ("c", known[0]) if wins else next(iter(others))
    if prim in (
        "max",
        "min",
        "logaddexp",
        "tanh",
        "neg",
        "integer_pow",
        "square",
        "sub",
        "add",
    ):
        return SCORES if SCORES in others else ROW
    return UNKNOWN if prim in ("exp", "exp2", "mul", "div") else LOST
