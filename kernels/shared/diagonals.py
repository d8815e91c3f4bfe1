"""Squares of numbers that depend on the distance of row and column alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def along_diagonals(x: jax.Array) -> jax.Array:
    """Returns the sums along the diagonals of [..., t, s], in float32 at least.

    Result ``j - i + t - 1`` is that of row i and column j. With as many zeros behind
    each row as there are rows, cutting it one shorter moves the next by one place.

    Example:
        >>> import jax.numpy as jnp
        >>> along_diagonals(jnp.array([[1, 2], [3, 4]], jnp.float32))
        Array([3., 5., 2.], dtype=float32)
    """
    *lead, t, s = x.shape
    wide = jnp.promote_types(x.dtype, jnp.float32)
    padded = jnp.pad(lax.rev(x, (x.ndim - 2,)), [(0, 0)] * (x.ndim - 1) + [(0, t)])
    flat = padded.reshape(*lead, t * (s + t))[..., : t * (s + t - 1)]
    sums = flat.reshape(*lead, t, s + t - 1).sum(-2, dtype=wide)
    return lax.optimization_barrier(sums)  # XLA is slow at it within other kernels


def spread(numbers: jax.Array, t: int) -> jax.Array:
    """Returns [..., t, s] of a number for each distance, [..., t + s - 1].

    The number of row i and column j is ``j - i + t - 1``.

    Example:
        >>> import jax.numpy as jnp
        >>> spread(jnp.arange(3), 2)
        Array([[1, 2],
               [0, 1]], dtype=int32)
    """
    *lead, size = numbers.shape
    padded = jnp.pad(numbers, [(0, 0)] * len(lead) + [(0, 1)])
    rows = jnp.broadcast_to(padded[..., None, :], (*lead, t, size + 1))
    flat = rows.reshape(*lead, t * (size + 1))[..., : t * size]
    return flat.reshape(*lead, t, size)[..., t - 1 :]
