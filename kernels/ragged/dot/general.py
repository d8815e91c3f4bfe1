"""Ragged dot by whole groups, for the transformations that JAX's own lacks.

`jax.lax.ragged_dot_general` has no second derivatives in one of its modes and
batches over leading axes alone. This form supports every transformation. Its
work grows with the number of groups, so it serves derivatives and unusual batch
axes only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rewriter.kernels.ragged.dot.ranges import as_ragged_dot_has
from rewriter.kernels.ragged.dot.use import Use
from rewriter.kernels.shared.products import unturned

if TYPE_CHECKING:
    from jax import Array


def general(*operands: Array, **given: Any) -> Array:
    """Computes `rewriter.kernels.ragged.dot.reference.reference`.

    Args:
        *operands: The first fields of `Use`.
        **given: The others.
    """
    use = Use(*operands, **given)
    bounds = as_ragged_dot_has(use.group_sizes, use.lhs.shape[0])

    def dot(a: Array, b: Array) -> Array:
        return jnp.matmul(
            unturned(a), b, precision=use.precision, preferred_element_type=use.dtype
        )

    # Only the operands are kept for a gradient, not one product per group.
    if use.contracting:
        return _per_group(jax.checkpoint(dot), use.lhs, use.rhs, bounds)
    turn = jnp.swapaxes if use.transposed else lambda x, *_: x
    product = jax.checkpoint(lambda a, b: dot(a, turn(b, -1, -2)))
    return _by_row(product, use.lhs, use.rhs, bounds, use.dtype)


def _rows(bounds: tuple[Array, Array], m: int) -> Array:
    row = jnp.arange(m)
    return ((row >= bounds[0]) & (row < bounds[1]))[:, None]


def _per_group(
    product: Callable[[Array, Array], Array],
    lhs: Array,
    rhs: Array,
    bounds: tuple[Array, Array],
) -> Array:
    def one(group: tuple[Array, Array]) -> Array:
        own = _rows(group, lhs.shape[0])
        return product(jnp.where(own, lhs, 0).T, jnp.where(own, rhs, 0))

    return jax.lax.map(jax.checkpoint(one), bounds)


def _by_row(
    product: Callable[[Array, Array], Array],
    lhs: Array,
    rhs: Array,
    bounds: tuple[Array, Array],
    dtype: jnp.dtype,
) -> Array:
    @jax.checkpoint
    def part(matrix: Array, group: tuple[Array, Array]) -> Array:
        own = _rows(group, lhs.shape[0])
        return jnp.where(own, product(jnp.where(own, lhs, 0), matrix), 0)

    def step(total: Array, one: tuple[Array, tuple[Array, Array]]):
        return total + part(*one), None

    width = jax.eval_shape(product, lhs, rhs[0]).shape[-1]
    start = jnp.zeros((lhs.shape[0], width), dtype)
    return jax.lax.scan(step, start, (rhs, bounds))[0]
