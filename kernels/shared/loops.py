"""Loops of kernels that are traced without the calls of `jax.jit` in them.

`jax.disable_jit` is what leaves out the calls, and it unrolls the loops of `jax.lax`.
These stay loops. See `flat` in `rewriter.ops.kernel.Traits`.

`zero_after` is what their first carries are made of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from rewriter.kernels.shared.slices import part, starts_along, with_part


def fori_loop(start: Any, end: Any, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """Returns the result of `jax.lax.fori_loop`."""
    inside = _inside(body)
    with jax.disable_jit(False):
        return lax.fori_loop(start, end, inside, carry)


def scan(step: Callable[[Any, Any], Any], carry: Any, parts: Any) -> tuple[Any, Any]:
    """Returns the results of `jax.lax.scan`.

    `jax.lax.scan` puts the results of turns into zeros that need no array, which is
    what `zero_after` is for. Here they are carried instead. Inside `jax.shard_map`,
    where they would have to vary as the results do, it is that of JAX. So it is for a
    symbolic number of turns.
    """
    inside, count = _inside(step), jax.tree.leaves(parts)[0].shape[0]
    if jax.sharding.get_abstract_mesh().manual_axes or not isinstance(count, int):
        with jax.disable_jit(False):
            return lax.scan(inside, carry, parts)
    at = lambda i: jax.tree.map(lambda a: _taken(a, i), parts)
    traced, (_, made) = jax.make_jaxpr(inside, return_shape=True)(carry, at(0))
    body = jaxpr_as_fun(traced)
    leaves, made = jax.tree.flatten(made)
    zero = zero_after(*jax.tree.leaves(parts))
    start = [jnp.full((count, *y.shape), zero.astype(y.dtype)) for y in leaves]

    def turn(i: Any, state: Any) -> Any:
        carry, results = state
        outs = body(*jax.tree.leaves((carry, at(i))))
        kept, new = outs[: len(outs) - len(leaves)], outs[len(outs) - len(leaves) :]
        put = [_put(a, y, i) for a, y in zip(results, new, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(carry), kept), put

    with jax.disable_jit(False):
        carry, results = lax.fori_loop(0, count, turn, (carry, start))
    return carry, jax.tree.unflatten(made, results)


def _taken(a: jax.Array, i: Any) -> jax.Array:
    """Returns the entry of an array along its first axis."""
    return part(a, starts_along(a.ndim, 0, i), (1, *a.shape[1:])).reshape(a.shape[1:])


def _put(a: jax.Array, entry: jax.Array, i: Any) -> jax.Array:
    """Returns an array with an entry along its first axis."""
    return with_part(a, entry[None], starts_along(a.ndim, 0, i))


def zero_after(*arrays: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Returns a zero that is made after the arrays are, to start a loop's carry with.

    Zeros that need no array may be made at any time. XLA makes them at the very start
    of a program on a CPU: those of all layers, which are then held at once.

    Inside `jax.shard_map` a loop's first carry must vary over mesh axes as its last
    does. There the zero varies as the arrays do.

    Args:
        *arrays: What the loop reads; those that are made last are enough.
        dtype: The zero's dtype.
    """
    zero = jnp.zeros((), dtype)
    if jax.sharding.get_abstract_mesh().manual_axes:
        for x in arrays:
            first = x[(0,) * x.ndim]
            zero = zero + jnp.where(first == first, jnp.zeros((), dtype), 0)
    return lax.optimization_barrier((zero, arrays))[0]


def _inside(body: Callable[..., Any]) -> Callable[..., Any]:
    """The body of a loop, traced as what is around the loop."""
    around = jax.config.jax_disable_jit

    def traced(*args: Any) -> Any:
        with jax.disable_jit(around):
            return body(*args)

    return traced
