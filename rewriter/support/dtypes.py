"""Kinds of dtypes: which values have gradients."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def is_float(x: Any) -> bool:
    """Returns whether an array, its type, or a number is a real float.

    Example:
        >>> is_float(jnp.ones(3)), is_float(1), is_float(1j)
        (True, False, False)
    """
    return bool(jnp.issubdtype(_dtype(x), jnp.floating))


def is_inexact(x: Any) -> bool:
    """Returns whether it is a float or a complex number: it may have a tangent.

    Example:
        >>> is_inexact(1.0), is_inexact(1j), is_inexact(True)
        (True, True, False)
    """
    return bool(jnp.issubdtype(_dtype(x), jnp.inexact))


def _dtype(x: Any) -> Any:
    dtype = getattr(x, "dtype", None)
    return jnp.result_type(x) if dtype is None else dtype
