"""The share of rows without keys in gradients, computed beside that of other rows.

Such a row gives the mean of all values: it weighs every key alike, by 1 / s. After the
blocks that a tile sees, it meets those with rows without keys, with these weights. So
rows that masks of data may leave without keys cost a comparison of two numbers for a
tile, where there are none.

`rewriter.kernels.attention.empty_rows` says what such rows pass back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from rewriter.kernels.attention.empty_rows import NAN, PASSES, PASSING, ZERO
from rewriter.kernels.attention.hopper import pallas

if TYPE_CHECKING:
    from jax import Array

    from rewriter.kernels.attention.hopper.use import Use


@dataclass(frozen=True)
class Averages:
    """How rows without keys weigh keys.

    Attributes:
        weight: That of each key, or NaN where such a row gives NaN.
        passes: Whether a gradient reaches its scores.
        finite: Whether that gradient is not NaN throughout.
    """

    weight: float
    passes: bool
    finite: bool

    def weights(self, lse: Array) -> Array:
        """Returns the weights of rows without keys, and 0 in other rows.

        Args:
            lse: What scores' exponentials are divided by, float32 [64, n]. It is
                infinite in rows without keys.
        """
        each, none = pallas.zeros(lse.shape, self.weight), pallas.zeros(lse.shape)
        return jnp.where(lse == jnp.inf, each, none)


def averages_of(use: Use, may_be_empty: bool) -> Averages | None:
    """Returns how rows without keys weigh keys; None if they pass nothing back.

    Args:
        use: The use.
        may_be_empty: Whether there may be such rows.
    """
    passes = use.empty_rows in PASSES and use.sinks is None
    if not may_be_empty or not (passes or use.empty_rows not in ZERO):
        return None
    weight = math.nan if use.empty_rows in NAN else 1.0 / use.lengths[1]
    return Averages(weight, passes, use.empty_rows == PASSING)


def delta_of(use: Use, empty: Array, delta: Array) -> Array:
    """Returns what changes of weights are reduced by, in rows without keys too.

    Where their gradient is NaN, that makes it so.

    Args:
        use: The use.
        empty: The rows without keys, bool [b, n, t].
        delta: The sum of the result times its cotangent, float32 [b, n, t].
    """
    if use.empty_rows == PASSING:
        return delta
    return jnp.where(empty, jnp.nan if use.empty_rows in PASSES else 0.0, delta)


def spans_of(empty: Array) -> Array:
    """Returns where rows without keys are in each batch entry: int32 [2 b].

    They are the first such row of any head, and the row behind the last one. Both are
    0 where there is none.

    Args:
        empty: bool [b, n, t].
    """
    some, t = empty.any(1), empty.shape[2]
    rows = jnp.arange(t, dtype=jnp.int32)
    first = jnp.where(some, rows, t).min(1)
    end = jnp.where(some, rows + 1, 0).max(1)
    return jnp.stack([jnp.where(end > 0, first, 0), end], 1).reshape(-1)


def blocks(spans: Any, b: Any, block: int) -> tuple[Any, Any]:
    """Returns the first block of rows without keys, and that behind the last.

    Args:
        spans: Global memory of `spans_of`.
        b: The batch entry.
        block: Rows of a block.
    """
    first, end = (pallas.scalar(spans, 2 * b + i) for i in range(2))
    size = jnp.int32(block)
    return lax.div(first, size), lax.div(end + (size - 1), size)


def meets(spans: Any, b: Any, first: Any, rows: int) -> Any:
    """Returns whether a tile of rows reaches into those without keys.

    Args:
        spans: Global memory of `spans_of`.
        b: The batch entry.
        first: The tile's first row.
        rows: Rows of a tile.
    """
    start, end = (pallas.scalar(spans, 2 * b + i) for i in range(2))
    return (first < end) & (first + rows > start)
