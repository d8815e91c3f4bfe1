"""Constants: folded scalars, affine and banded arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

FOLD_FLAGS: dict[str, Callable[..., Any]] = {
    "eq": np.equal, "ne": np.not_equal, "gt": np.greater, "ge": np.greater_equal,
    "lt": np.less, "le": np.less_equal, "and": np.logical_and, "or": np.logical_or,
    "not": np.logical_not, "convert_element_type": lambda a: a != 0,
}  # fmt: skip


def folded(
    prim: str, values: Sequence[np.generic], params: Mapping[str, Any], dtype: Any
) -> np.generic | None:
    """The result of an equation on numbers, in its dtypes.

    Integers wrap around and are divided as JAX does. Functions of floats that a
    processor approximates are rounded once, from float64.

    Args:
        prim: The primitive's name.
        values: The operands, each of its own dtype.
        params: The equation's parameters.
        dtype: The result's dtype.

    Returns:
        The number, or None if it is unknown or undefined.
    """
    rule = FOLD.get(prim)
    if rule is None or any(_is_nan(v) for v in values):
        return None
    with np.errstate(all="ignore"):
        try:
            out = rule(*values, params)
        except (ValueError, ZeroDivisionError, OverflowError, TypeError):
            return None
        if out is None or _is_nan(out):
            return None
        return in_dtype(out, dtype)


def in_dtype(number: Any, dtype: Any) -> np.generic:
    """A number rounded to a dtype; too large ones become infinite."""
    with np.errstate(all="ignore"):
        return np.asarray(number).astype(dtype)[()]


def _is_nan(x: Any) -> bool:
    return bool(x != x)


def cast(value: np.generic, new: Any) -> np.generic | None:
    """A number cast to another dtype; None if the result depends on the machine.

    Floats become integers by dropping their fraction, if the dtype holds the result.
    """
    old = np.asarray(value).dtype
    if np.dtype(new).kind in "iu" and old.kind not in "iub":
        whole = math.trunc(float(value)) if math.isfinite(float(value)) else None
        info = np.iinfo(new)
        if whole is None or not info.min <= whole <= info.max:
            return None
        return np.dtype(new).type(whole)
    return in_dtype(value, new)


def _is_whole(x: np.generic) -> bool:
    return np.asarray(x).dtype.kind in "iu"


def _divide(a: np.generic, b: np.generic, params: Mapping[str, Any]) -> Any:
    """A / b, of integers rounded towards zero as `lax.div` does."""
    if not _is_whole(a):
        return a / b
    if b == 0:
        return None
    quotient = abs(int(a)) // abs(int(b))
    return _wrapped(quotient if (a < 0) == (b < 0) else -quotient, a.dtype)


def _remainder(a: np.generic, b: np.generic, params: Mapping[str, Any]) -> Any:
    """The remainder of `lax.rem`, with the sign of a."""
    if not _is_whole(a):
        return np.fmod(a, b)
    if b == 0:
        return None
    rest = abs(int(a)) % abs(int(b))
    return _wrapped(-rest if a < 0 else rest, a.dtype)


def _floor(a: np.generic, b: np.generic, f: Callable[..., Any]) -> Any:
    """A quotient of integers rounded down, or its remainder."""
    return _wrapped(int(f(int(a), int(b))), a.dtype) if _is_whole(a) and b else None


def _power(a: np.generic, e: Any, params: Mapping[str, Any]) -> Any:
    """A ** e; for integers only with non-negative integer exponents."""
    if _is_whole(a):
        return None if e < 0 else _wrapped(int(a) ** int(e), a.dtype)
    return np.float64(a) ** np.float64(e)


def _wrapped(number: int, dtype: np.dtype) -> np.generic:
    """A whole number as a machine integer, which wraps around."""
    info = np.iinfo(dtype)
    size = int(info.max) - int(info.min) + 1
    return dtype.type((number - int(info.min)) % size + int(info.min))


def _of_floats(f: Callable[[np.float64], Any]) -> Callable[..., Any]:
    return lambda a, p: f(np.float64(a))


FOLD: dict[str, Callable[..., Any]] = {
    "mul": lambda a, b, p: a * b,
    "add": lambda a, b, p: a + b,
    "sub": lambda a, b, p: a - b,
    "div": _divide,
    "rem": _remainder,
    "floor_divide": lambda a, b, p: _floor(a, b, np.floor_divide),
    "remainder": lambda a, b, p: _floor(a, b, np.remainder),
    "neg": lambda a, p: -a,
    "pow": _power,
    "integer_pow": lambda a, p: _power(a, p["y"], p),
    "square": lambda a, p: a * a,
    "max": lambda a, b, p: max(a, b),
    "min": lambda a, b, p: min(a, b),
    "abs": lambda a, p: abs(a),
    "sign": lambda a, p: np.sign(a),
    "sqrt": _of_floats(np.sqrt),
    "rsqrt": _of_floats(lambda a: 1 / np.sqrt(a)),
    "log": _of_floats(np.log),
    "exp": _of_floats(np.exp),
}
"""Functions of numbers by primitive; the last argument is the equation's parameters."""
