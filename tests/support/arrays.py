"""Arrays for tests, drawn by NumPy.

``jax.random`` compiles a program for each shape. At import, each process of pytest
would pay for it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def normal(
    *shape: int, seed: int = 0, dtype: Any = np.float32, size: float = 1.0
) -> jax.Array:
    """Returns normal numbers of a size; those of another shape or seed are others."""
    draw = np.random.default_rng((seed, *shape))
    return jax.device_put((size * draw.standard_normal(shape)).astype(dtype))


def stored(draw: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Returns normal numbers as they are stored: a third of the range of integers."""
    x = draw.standard_normal(shape).astype("float32")
    if not jnp.issubdtype(dtype, jnp.integer):
        return x.astype(dtype)
    least, most = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
    deviation = 40 * 2.0 ** (jnp.iinfo(dtype).bits - 8)
    levels = np.round(deviation * x) + (least + most + 1) // 2
    return np.clip(levels, max(least, -most), most).astype(dtype)
