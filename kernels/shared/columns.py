"""Kernels in plain JAX that widen a stored matrix by some of its columns at a time.

XLA writes the whole matrix in the dtype of the rows, and reads it again. A kernel that
loops over blocks of columns leaves a widened block in the caches until it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from rewriter.kernels.shared.loops import fori_loop, scan
from rewriter.kernels.shared.slices import part, starts_along
from rewriter.ops.kernel import Space
from rewriter.support.verdict import YES, Verdict, no

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec


# ------------------------------------------------------------------ the config
@dataclass(frozen=True)
class Block:
    """The config of both passes.

    Attributes:
        columns: Columns of each matrix that are widened at once.
    """

    columns: int = 256


DEFAULT = Block()


def default_block(k: Any, most: int) -> Block:
    """Returns 256 columns, or fewer if many numbers would be widened at once.

    Args:
        k: Numbers of a column.
        most: The most numbers of a block, unless it has 64 columns.

    Example:
        >>> default_block(1024, 1 << 20), default_block(1 << 14, 1 << 20)
        (Block(columns=256), Block(columns=64))
    """
    if not isinstance(k, int):
        return DEFAULT
    return Block(min(DEFAULT.columns, max(64, most // max(k, 1) // 64 * 64)))


def other_blocks(own: Block, columns: int, sizes: tuple[int, ...]) -> list[Block]:
    """Returns blocks worth measuring: of fewer columns than a matrix has."""
    return [Block(size) for size in sizes if size < columns and size != own.columns]


def space(most: int, columns: Callable[[Spec], int], sizes: tuple[int, ...]) -> Space:
    """Returns the configs of a kernel whose rows are ``x``.

    Args:
        most: As for `default_block`.
        columns: Gives the columns of a use's matrix.
        sizes: Columns of the blocks that are worth measuring.
    """

    def default(spec: Spec, device: Device) -> Block:
        del device
        return default_block(spec.shape("x")[-1], most)

    def configs(spec: Spec, device: Device) -> list[Block]:
        return other_blocks(default(spec, device), columns(spec), sizes)

    return Space(Block, default, configs)


# ------------------------------------------------------------------ where it runs
def takes(spec: Spec, matrix: str) -> Verdict:
    """Returns whether the rows ``x`` are floats, and a matrix's sizes are known."""
    if not jnp.issubdtype(spec.dtype("x"), jnp.floating):
        return no("dtype", f"x is {spec.dtype('x')}, not a float")
    if any(not isinstance(d, int) for d in spec.shape(matrix)):
        return no("symbolic", f"sizes of {matrix} must be known, but some are not")
    return YES


# ------------------------------------------------------------------ where it pays
PAYS_FROM = 1 << 23
"""The fewest numbers of a matrix whose widened copy leaves the caches of a CPU."""

ROWS = 64
"""The most rows for which a CPU spends its time on the matrix, not on products."""


def pays(spec: Spec, platform: str, numbers: int) -> Verdict:
    """Returns yes on a CPU for few rows and a large matrix.

    On other platforms XLA widens the matrix within the product, or as fast.

    Args:
        spec: A use, whose rows are ``x``.
        platform: Where it runs.
        numbers: The numbers of a matrix.
    """
    if platform != "cpu":
        return no("platform", f"not measured to be faster than XLA on {platform}")
    if numbers < PAYS_FROM:
        text = f"a matrix of {numbers >> 10} Ki numbers is so small that XLA is as fast"
        return no("small", text)
    rows = spec.shape("x")[:-1]
    if any(not isinstance(d, int) for d in rows) or math.prod(rows) > ROWS:
        return no("rows", f"more than {ROWS} rows, for which XLA is as fast")
    return YES


# ------------------------------------------------------------------ the loop
OfColumns = Callable[[Any, int], "Array"]
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


def joined(block: OfColumns, columns: int, config: Block | None) -> Array:
    """Returns the blocks' results [..., size] behind each other: [..., columns]."""
    parts = []
    for first, own, count in ranges(columns, (config or DEFAULT).columns):
        if count == 1:
            parts.append(block(first, own))
            continue
        starts = first + own * jnp.arange(count, dtype=jnp.int32)
        step = lambda _, at, own=own: (None, block(at, own))
        made = jnp.moveaxis(scan(step, None, starts)[1], 0, -2)
        parts.append(made.reshape(*made.shape[:-2], -1))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, -1)


def added(block: OfColumns, start: Array, columns: int, config: Block | None) -> Array:
    """Returns `start` plus the blocks' results, all of its shape."""
    total = start
    for first, own, count in ranges(columns, (config or DEFAULT).columns):
        step = lambda i, sums, first=first, own=own: sums + block(first + i * own, own)
        total = fori_loop(0, count, step, total) if count > 1 else step(0, total)
    return total


def taken(x: Array, first: Any, size: int, axis: int = -1) -> Array:
    """Returns some columns of an array, or its only one."""
    if x.shape[axis] in (1, size):
        return x
    if isinstance(first, int):
        return lax.slice_in_dim(x, first, first + size, axis=axis)
    sizes = list(x.shape)
    sizes[axis] = size
    return part(x, starts_along(x.ndim, axis, first), sizes)
