"""Slices at starts that are not negative, and quotients of such numbers.

JAX counts a negative start from the end, and rounds quotients down. Both cost equations
for each start, which are traced, lowered and compiled. Starts of kernels are never
negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax import lax

if TYPE_CHECKING:
    from jax import Array


def part(x: Array, starts: Sequence[Any], sizes: Sequence[int]) -> Array:
    """Returns the part of an array at some starts.

    Args:
        x: The array.
        starts: A start for each axis, int32 or a number of Python.
        sizes: A size for each axis.
    """
    if tuple(sizes) == x.shape:
        return x
    at = _starts(starts)
    return lax.dynamic_slice(x, at, sizes, allow_negative_indices=False)


def with_part(into: Array, new: Array, starts: Sequence[Any]) -> Array:
    """Returns an array with another one written into it, at some starts.

    Args:
        into: The array.
        new: What is written, of as many axes.
        starts: As for `part`.
    """
    if new.shape == into.shape:
        return new
    at = _starts(starts)
    return lax.dynamic_update_slice(into, new, at, allow_negative_indices=False)


def starts_along(ndim: int, axis: int, start: Any) -> list[Any]:
    """Returns the starts of a part along one axis.

    Example:
        >>> starts_along(3, -2, 5)
        [0, 5, 0]
    """
    starts: list[Any] = [0] * ndim
    starts[axis] = start
    return starts


def quotient(x: Any, y: Any) -> Any:
    """Returns x // y of numbers that are not negative: of Python, or int32 arrays.

    Example:
        >>> quotient(7, 2), int(quotient(jnp.int32(7), 2))
        (3, 3)
    """
    if isinstance(x, int) and isinstance(y, int):
        return x // y
    return x if isinstance(y, int) and y == 1 else lax.div(*_alike(x, y))


def remainder(x: Any, y: Any) -> Any:
    """Returns x % y of such numbers.

    Example:
        >>> remainder(7, 2), int(remainder(jnp.int32(7), 2)), remainder(jnp.int32(7), 1)
        (1, 1, 0)
    """
    if isinstance(x, int) and isinstance(y, int):
        return x % y
    return 0 if isinstance(y, int) and y == 1 else lax.rem(*_alike(x, y))


def _starts(starts: Sequence[Any]) -> list[Any]:
    return [np.int32(s) if isinstance(s, int) else s for s in starts]


def _alike(*numbers: Any) -> list[Any]:
    return [jnp.int32(n) if isinstance(n, int) else n for n in numbers]
