"""Kinds of dtypes: which values have gradients, and which are numbers of a kind."""

from __future__ import annotations

import functools
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


@functools.lru_cache(maxsize=256)
def number_kind(dtype: Any) -> str:
    """Returns ``"float"``, ``"integer"`` or ``"boolean"``; ``""`` for other dtypes.

    Asking JAX takes longer, and is done for each value of a program.

    Example:
        >>> number_kind(jnp.dtype("bfloat16")), number_kind(jnp.dtype("uint8"))
        ('float', 'integer')
    """
    for name, kind in KINDS.items():
        if jnp.issubdtype(dtype, kind):
            return name
    return ""


KINDS = {"float": jnp.floating, "integer": jnp.integer, "boolean": jnp.bool_}
