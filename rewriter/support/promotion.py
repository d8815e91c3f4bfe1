"""Fixes how dtypes and ranks are promoted inside the engine, whatever the user sets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def as_usual() -> Iterator[None]:
    """Unsets ``jax_numpy_dtype_promotion`` and ``jax_numpy_rank_promotion`` in a block.

    Kernels, references and the code around them rely on both promotions. A user's
    program that forbids them is traced outside the block.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> with jax.numpy_rank_promotion("raise"), as_usual():
        ...     (jnp.ones((2, 3)) + jnp.ones(3)).shape
        (2, 3)
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
