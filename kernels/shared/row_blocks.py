"""A loop over blocks of rows, of a number of rows that may be symbolic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.kernels.shared.loops import scan

Rows = dict[str, jax.Array]
"""Arrays by name, rows first."""


def in_parts(count: int, rows: int) -> bool:
    """Whether there may be several blocks of rows; so if the count is symbolic."""
    return not isinstance(count, int) or rows < count


def over_blocks(
    block: Callable[[Rows, Any], tuple[Any, Rows]], rows: Rows, sums: Any, size: int
) -> tuple[Any, Rows]:
    """Runs a function over blocks of rows, handing on its first results.

    The last row is repeated where the last block is not full. Repeated rows have no
    cotangent, and no results.
    """
    count = rows["x"].shape[0]
    if not in_parts(count, size):
        sums, made = block(rows, sums)
        return sums, made
    blocks = -(-count // size)
    missing = blocks * size - count

    def parts(name: str, a: jax.Array) -> jax.Array:
        if not isinstance(missing, int) or missing:
            last = jnp.broadcast_to(a[-1:], (missing, *a.shape[1:]))
            if name == "cotangent":
                last = jnp.zeros_like(last)
            a = jnp.concatenate([a, last])
        return a.reshape(blocks, size, *a.shape[1:])

    own = {n: parts(n, a) for n, a in rows.items()}
    sums, made = scan(lambda s, part: block(part, s), sums, own)
    whole = lambda y: y.reshape(blocks * size, *y.shape[2:])[:count]
    return sums, jax.tree.map(whole, made)
