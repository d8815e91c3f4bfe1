"""Arrays compared by their bits: to NumPy, NaNs of bfloat16 are not alike."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def assert_same(first: Any, second: Any) -> None:
    """Fails unless two trees of arrays have the same bits."""
    jax.tree.map(_assert_same, first, second)


def _assert_same(x: Any, y: Any) -> None:
    x, y = np.asarray(x), np.asarray(y)
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    np.testing.assert_array_equal(_bits(x), _bits(y))


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")
