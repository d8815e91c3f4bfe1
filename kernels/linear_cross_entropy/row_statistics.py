"""Statistics of a row's logits from which its loss follows: four numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

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

    def step(start: Any, size: int, carry: Carry) -> Carry:
        some = head.chunk(start, size)
        return _joined(head, some, some.product(x), labels, start, carry)

    carry = _none(head, x, labels)
    return _ended(chunks.over_chunks(step, carry, head.classes, columns))


def reduced_and_held(
    head: Head, x: jax.Array, labels: jax.Array, columns: int, held: jax.Array
) -> tuple[jax.Array, Reduced]:
    """The same, and the product in the first rows of an array with all classes."""

    def step(start: Any, size: int, given: Any) -> Any:
        held, carry = given
        some = head.chunk(start, size)
        product = some.product(x)
        held = lax.dynamic_update_slice(held, product, (0, start))
        return held, _joined(head, some, product, labels, start, carry)

    given = held, _none(head, x, labels)
    held, carry = chunks.over_chunks(step, given, head.classes, columns)
    return held, _ended(carry)


Carry = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""The largest logits so far, and the three sums that are `Reduced`."""


def _none(head: Head, x: jax.Array, labels: jax.Array) -> Carry:
    """What is reduced over no class."""
    zero = jnp.zeros(x.shape[:1], head.wide)
    none = jnp.zeros(labels.shape, head.wide)
    return jnp.full_like(zero, -jnp.inf), zero, none, zero


def _joined(
    head: Head, some: Head, product: jax.Array, labels: jax.Array, start: Any, c: Carry
) -> Carry:
    """What is reduced over the classes before a column and over those of a chunk."""
    top, weight, picked, below = c
    y = some.logits(product)
    new = jnp.maximum(top, y.max(1))
    shift = finite(new)
    kept = jnp.where(weight == 0, 0, weight * jnp.exp(top - shift))
    weight = kept + jnp.exp(y - shift[:, None]).sum(1)
    picked = picked + jnp.where(some.hits(labels), y, 0).sum(-1)
    below = below + _before(head, start) * (finite(top) - shift)
    return new, weight, picked, below + some.total(y - shift[:, None])


def _ended(carry: Carry) -> Reduced:
    top, weight, picked, below = carry
    return Sum(finite(top), weight), picked, below


def _before(head: Head, start: Any) -> Any:
    """The number of classes before a column that have logits."""
    return start if head.end is None else jnp.clip(head.end - head.start, 0, start)
