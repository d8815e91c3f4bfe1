"""Finds formulas of constant arrays: positions, one number, bands of a mask."""

from __future__ import annotations

from typing import Any

import numpy as np

EXACT = 2.0**53
"""Integers are exact in float64 up to here."""


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
