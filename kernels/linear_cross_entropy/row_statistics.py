"""Statistics of a row's logits from which its loss follows: three numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rewriter.kernels.linear_cross_entropy import chunks
from rewriter.kernels.linear_cross_entropy.head import Head

Reduced = tuple[jax.Array, jax.Array, jax.Array]
"""Log-sum-exps, picked logits and sums of logits, each [n]."""


def of_product(head: Head, product: jax.Array, labels: jax.Array) -> Reduced:
    """What is reduced over the classes of rows, given their product [n, v]."""
    y = head.logits(product)
    picked = jnp.where(head.hits(labels), y, 0).sum(1)
    return jax.nn.logsumexp(y, axis=1), picked, head.total(y)


def reduced(head: Head, x: jax.Array, labels: jax.Array, columns: int) -> Reduced:
    """The same of rows [n, k], over chunks of classes."""
    if columns == head.classes:
        return of_product(head, head.product(x), labels)

    def step(start: Any, size: int, carry: Any) -> Any:
        top, weight, picked, total = carry
        some = head.chunk(start, size)
        y = some.logits(some.product(x))
        new = jnp.maximum(top, y.max(1))
        shift = jnp.where(jnp.isfinite(new), new, 0)
        kept = jnp.where(weight == 0, 0, weight * jnp.exp(top - shift))
        weight = kept + jnp.exp(y - shift[:, None]).sum(1)
        picked = picked + jnp.where(some.hits(labels), y, 0).sum(1)
        return new, weight, picked, total + some.total(y)

    zero = jnp.zeros(x.shape[:1], head.wide)
    carry = (jnp.full_like(zero, -jnp.inf), zero, zero, zero)
    top, weight, picked, total = chunks.over_chunks(step, carry, head.classes, columns)
    lse = jnp.log(weight) + jnp.where(jnp.isfinite(top), top, 0)
    return lse, picked, total
