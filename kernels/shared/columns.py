"""Loops over blocks of columns, of which a kernel in plain JAX holds one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from rewriter.kernels.shared.loops import fori_loop, scan

if TYPE_CHECKING:
    from jax import Array

Block = Callable[[Any, int], "Array"]
"""``block(first, size)`` computes something from some columns."""


def ranges(columns: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yields (first column, columns, count) of equal blocks; fewer columns come last.

    Two blocks and less are one.

    Example:
        >>> list(ranges(10, 3)), list(ranges(6, 3))
        ([(0, 3, 3), (9, 1, 1)], [(0, 6, 1)])
    """
    count = columns // size if columns > 2 * size else 0
    if count:
        yield 0, size, count
    if count * size < columns:
        yield count * size, columns - count * size, 1


def joined(block: Block, columns: int, size: int) -> Array:
    """Returns the blocks' results [..., size] behind each other: [..., columns]."""
    parts = []
    for first, own, count in ranges(columns, size):
        if count == 1:
            parts.append(block(first, own))
            continue
        starts = first + own * jnp.arange(count, dtype=jnp.int32)
        step = lambda _, at, own=own: (None, block(at, own))
        made = jnp.moveaxis(scan(step, None, starts)[1], 0, -2)
        parts.append(made.reshape(*made.shape[:-2], -1))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, -1)


def added(block: Block, start: Array, columns: int, size: int) -> Array:
    """Returns `start` plus the blocks' results, all of its shape."""
    total = start
    for first, own, count in ranges(columns, size):
        step = lambda i, sums, first=first, own=own: sums + block(first + i * own, own)
        total = fori_loop(0, count, step, total) if count > 1 else step(0, total)
    return total


def taken(x: Array, first: Any, size: int, axis: int = -1) -> Array:
    """Returns some columns of an array, or its only one."""
    if x.shape[axis] == 1 != size:
        return x
    return lax.dynamic_slice_in_dim(x, first, size, axis)
