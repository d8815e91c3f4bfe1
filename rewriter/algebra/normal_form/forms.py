"""Types of normal forms, their size budgets, and the errors for exceeding them."""

from __future__ import annotations

import math
from typing import Any

Index = Any
Monomial = tuple[tuple[int, Any], ...]
Poly = dict[tuple[int, Monomial], float]

TRUE, FALSE = 0, 1
TERM_BUDGET = 128
LITERAL_BUDGET = 12
SNAP = 1e-6
"""Numbers of programs in up to 32 bits that are relatively closer are equal."""
SNAP_64 = 1e-13
"""The same for programs in 64 bits."""
SAME = 1e-12
"""Closer numbers differ only by rounding inside this algebra."""
ODD = ("erf", "sin")


class OverBudget(Exception):
    """The form would grow beyond its budget, or a rule does not apply."""


def real(c: Any) -> float:
    """A number as a coefficient.

    Raises:
        OverBudget: If it is a symbolic size, which cannot be a coefficient.
    """
    try:
        return float(c)
    except TypeError:
        raise OverBudget(f"arithmetic with the symbolic size {c}") from None


class TooMuchWork(OverBudget):
    """One region took more steps than it may."""


WORK_BUDGET = 8000


def term_order(item: Any) -> Any:
    """The sort key of a polynomial's term."""
    (flag, mono), c = item
    return flag, len(mono), [(a, float(e)) for a, e in mono], c


def is_frozen(value: tuple[Any, ...]) -> bool:
    """Whether a tuple is a frozen polynomial, as atoms hold it."""
    return not value or (
        isinstance(value[0], tuple)
        and len(value[0]) == 2
        and isinstance(value[0][0], tuple)
        and len(value[0][0]) == 2
        and isinstance(value[0][1], float)
    )


def exact(c: float) -> Any:
    """Converts a whole number to int."""
    if not math.isfinite(c):
        raise OverBudget("a number that is not finite")
    return int(c) if c == int(c) else c
