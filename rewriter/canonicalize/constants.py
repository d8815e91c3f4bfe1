"""Constants: folded scalars, affine and banded arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

FOLD_FLAGS: dict[str, Callable[..., Any]] = {
    "eq": np.equal, "ne": np.not_equal, "gt": np.greater, "ge": np.greater_equal,
    "lt": np.less, "le": np.less_equal, "and": np.logical_and, "or": np.logical_or,
    "not": np.logical_not, "convert_element_type": lambda a: a != 0,
}  # fmt: skip
FOLD: dict[str, Callable[..., float]] = {
    "sqrt": lambda a, p: math.sqrt(a),
    "rsqrt": lambda a, p: 1 / math.sqrt(a),
    "mul": lambda a, b, p: a * b,
    "add": lambda a, b, p: a + b,
    "sub": lambda a, b, p: a - b,
    "div": lambda a, b, p: a / b,
    "neg": lambda a, p: -a,
    "pow": lambda a, b, p: a**b,
    "integer_pow": lambda a, p: a ** p["y"],
    "log": lambda a, p: math.log(a),
    "exp": lambda a, p: math.exp(a),
    "max": lambda a, b, p: max(a, b),
    "min": lambda a, b, p: min(a, b),
    "square": lambda a, p: a * a,
}


def affine_constant(array: np.ndarray) -> tuple[float, tuple[float, ...]] | None:
    """(offset, slope per axis) of an array that is affine in its indices."""
    if array.size > 1 << 20 or array.ndim == 0 or array.dtype.kind not in "iuf":
        return None
    origin = float(array.flat[0])
    slopes = []
    for d, n in enumerate(array.shape):
        at = [0] * array.ndim
        at[d] = 1 if n > 1 else 0
        slopes.append(float(array[tuple(at)]) - origin)
    whole = all(float(s).is_integer() for s in (origin, *slopes))
    if array.dtype.kind == "f" and not whole:
        return None
    built = np.full(array.shape, origin)
    for d, slope in enumerate(slopes):
        shape = [1] * array.ndim
        shape[d] = array.shape[d]
        built = built + slope * np.arange(array.shape[d]).reshape(shape)
    return (origin, tuple(slopes)) if (built == array).all() else None


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
    diff = np.arange(plane.shape[1])[None] - np.arange(plane.shape[0])[:, None]
    kept = diff[plane]
    if kept.size == 0:
        return None
    lower, upper = int(kept.min()), int(kept.max())
    if not np.array_equal(plane, (diff >= lower) & (diff <= upper)):
        return None
    return (
        rows, cols,
        None if lower <= int(diff.min()) else lower,
        None if upper >= int(diff.max()) else upper,
    )  # fmt: skip
