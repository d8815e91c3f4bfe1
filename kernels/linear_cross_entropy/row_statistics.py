"""Statistics of a row's logits from which its loss follows: four numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rewriter.kernels.cross_entropy.rows import Sum, finite, summed
from rewriter.kernels.linear_cross_entropy import chunks
from rewriter.kernels.linear_cross_entropy.head import Head

Reduced = tuple[Sum, jax.Array, jax.Array]
"""Sums of exponentials, picked logits, and sums of logits less their top: [n] each."""


def of_product(head: Head, product: jax.Array, labels: jax.Array) -> Reduced:
    """What is reduced over the classes of rows, given their product [n, v].

    Labels are [n], or [2, n] of two for each row; so are picked logits.
    """
    y = head.logits(product)
    picked = jnp.where(head.hits(labels), y, 0).sum(-1)
    row = summed(y)
    return row, picked, head.total(y - row.top[:, None])


def reduced(head: Head, x: jax.Array, labels: jax.Array, columns: int) -> Reduced:
    """The same of rows [n, k], over chunks of classes."""
    if columns == head.classes:
        return of_product(head, head.product(x), labels)

    def step(start: Any, size: int, carry: Any) -> Any:
        top, weight, picked, below = carry
        some = head.chunk(start, size)
        y = some.logits(some.product(x))
        new = jnp.maximum(top, y.max(1))
        shift = finite(new)
        kept = jnp.where(weight == 0, 0, weight * jnp.exp(top - shift))
        weight = kept + jnp.exp(y - shift[:, None]).sum(1)
        picked = picked + jnp.where(some.hits(labels), y, 0).sum(-1)
        below = below + _before(head, start) * (finite(top) - shift)
        return new, weight, picked, below + some.total(y - shift[:, None])

    zero = jnp.zeros(x.shape[:1], head.wide)
    none = jnp.zeros(labels.shape, head.wide)
    carry = (jnp.full_like(zero, -jnp.inf), zero, none, zero)
    top, weight, picked, below = chunks.over_chunks(step, carry, head.classes, columns)
    return Sum(finite(top), weight), picked, below


def _before(head: Head, start: Any) -> Any:
    """The number of classes before a column that have logits."""
    return start if head.end is None else jnp.clip(head.end - head.start, 0, start)
