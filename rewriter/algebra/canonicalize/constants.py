"""Constants: folded scalars, affine and banded arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rewriter.algebra.normal_form import EXACT

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


def affine_constant(array: np.ndarray) -> tuple[float, tuple[float, ...]] | None:
    """(offset, slope per axis) of an array that is affine in its indices."""
    if array.size > 1 << 20 or array.ndim == 0 or array.dtype.kind not in "iuf":
        return None
    if array.dtype.kind != "f" and not _are_exact(array):
        return None
    origin = float(array.flat[0])
    slopes = []
    for d, n in enumerate(array.shape):
        at = [0] * array.ndim
        at[d] = 1 if n > 1 else 0
        slopes.append(float(array[tuple(at)]) - origin)
    last = origin + sum(s * (n - 1) for s, n in zip(slopes, array.shape, strict=True))
    if array.flat[-1] != last:
        return None
    whole = all(float(s).is_integer() for s in (origin, *slopes))
    if array.dtype.kind == "f" and not whole:
        return None
    built = np.full(array.shape, origin)
    for d, slope in enumerate(slopes):
        shape = [1] * array.ndim
        shape[d] = array.shape[d]
        built = built + slope * np.arange(array.shape[d]).reshape(shape)
    return (origin, tuple(slopes)) if (built == array).all() else None


def _are_exact(array: np.ndarray) -> bool:
    """Whether float64 holds all integers of an array."""
    if array.dtype.itemsize < 8 or not array.size:
        return True
    return int(array.min()) > -EXACT and int(array.max()) < EXACT


def one_number(array: np.ndarray) -> float | None:
    """The number that all elements of an array of moderate size are, or None."""
    if not 0 < array.size <= 1 << 16 or not (array == array.flat[0]).all():
        return None
    if array.dtype.kind in "iu" and not _are_exact(array):
        return None
    return float(array.flat[0])


def two_numbers(array: np.ndarray) -> tuple[float, float, Any] | None:
    """(lower, higher, `pattern_of` the higher) of an array of two numbers."""
    if array.dtype.kind != "f" or array.size > 1 << 22:
        return None
    if not array.size or len(np.unique(array.flat[:256])) > 2:
        return None
    low, high = array.min(), array.max()
    if not low < high:  # one number, or not a number
        return None
    highest = array == high
    if not (highest | (array == low)).all():
        return None
    pattern = pattern_of(highest)
    return None if pattern is None else (float(low), float(high), pattern)


def pattern_of(mask: np.ndarray) -> Any:
    """A mask that is equal everywhere as a bool, a banded one's bands, or None."""
    if mask.ndim == 0 or (mask == mask.flat[0]).all():
        return bool(mask.flat[0])
    return banded_constant(mask)


def banded_constant(mask: np.ndarray):
    """(row axis, column axis, lower, upper) of a mask lower <= col - row <= upper."""
    wide = [d for d, n in enumerate(mask.shape) if n > 1]
    varying = [d for d in wide if not (mask == mask.take([0], axis=d)).all()]
    if not 1 <= len(varying) <= 2 or mask.size > 1 << 27:
        return None
    at = tuple(slice(None) if d in varying else 0 for d in range(mask.ndim))
    plane = mask[at]
    if len(varying) == 1:
        plane = plane[None]
        rows, cols = None, varying[0]
    else:
        rows, cols = varying
    row, width = np.arange(plane.shape[0]), plane.shape[1]
    first, last = plane.argmax(1), width - 1 - plane[:, ::-1].argmax(1)
    seen = np.count_nonzero(plane, axis=1)
    some = seen > 0
    if not some.any():
        return None
    lower, upper = int((first - row)[some].min()), int((last - row)[some].max())
    start, end = np.maximum(row + lower, 0), np.minimum(row + upper, width - 1)
    alike = (first == start) & (last == end) & (seen == end - start + 1)
    if not np.where(some, alike, start > end).all():
        return None
    return (
        rows, cols,
        None if lower <= 1 - len(row) else lower,
        None if upper >= width - 1 else upper,
    )  # fmt: skip
