"""Derivatives of a function at single numbers, such as the kink of a relu.

JAX has a derivative there by convention, and each way to write a function has its own.
At 0 that of ``max(y, 0)`` is 1/2, and that of ``where(y < 0, 0, y)`` is 1. The square
of the function then has a second derivative of 1/2 or 2 there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Slopes = tuple[tuple[float | str, ...], ...]
"""For each number, the derivative there. NaN is ``"nan"``, which equals itself.

An entry is ``(number, slope)``, or ``(number, slope, again, bend)``. What a derivative
computes may be differentiated again. Then `again` is the derivative of the function's
value, and `bend` that of its slope. By default these are `slope` and 0. A derivative
rule of the program's own may compute the value in another way: then `again` is not
`slope`."""


SLOPES = ("slopes", "slopes_up")
"""The parameters of ops that hold slopes."""


def with_slopes(
    function: Callable[[jax.Array], jax.Array], slopes: Slopes
) -> Callable[[jax.Array], jax.Array]:
    """Returns a function with other derivatives at some numbers.

    Args:
        function: A function of each number of an array.
        slopes: The numbers, and the derivatives at each.

    Example:
        >>> relu = with_slopes(lambda y: jnp.maximum(y, 0), ((0.0, 1.0),))
        >>> jax.grad(relu)(0.0).item()
        1.0
    """
    if not slopes:
        return function
    after = once_differentiated(slopes)

    @jax.custom_jvp
    def same(y: jax.Array) -> jax.Array:
        return function(y)

    @same.defjvp
    def derivative(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        (y,), (tangent,) = primals, tangents
        _, out = jax.jvp(function, (y,), (tangent,))
        for point, slope, *more in slopes:
            here = y != y if point == "nan" else y == float(point)
            bend = float(more[1]) if more else 0.0
            if not slope and not bend:
                out = jnp.where(here, 0.0, out)
                continue
            # A factor of 1 elsewhere: the transpose multiplies zeros by it.
            factor = jnp.where(here, float(slope), 1.0).astype(y.dtype)
            if bend:
                bends = jnp.where(here, bend, 0.0).astype(y.dtype)
                factor = factor + zero_with_slope(y, bends)
            out = jnp.where(here, factor * tangent, out)
        value = same if after == slopes else with_slopes(function, after)
        return value(y), out

    return same


def once_differentiated(slopes: Slopes) -> Slopes:
    """Returns the slopes of the value that a derivative computes beside its own."""
    return tuple(k if len(k) == 2 or k[1] == k[2] else (k[0], k[2]) for k in slopes)


def params_once_differentiated(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns an op's parameters with the slopes of `once_differentiated`."""
    slopes = {n: params[n] for n in SLOPES if params.get(n)}
    return {**params, **{n: once_differentiated(s) for n, s in slopes.items()}}


@jax.custom_jvp
def zero_with_slope(x: jax.Array, slopes: jax.Array) -> jax.Array:
    """Returns zeros like x, with derivatives `slopes` by x, whatever x is."""
    return jnp.zeros_like(x)


@zero_with_slope.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    x, slopes = primals
    return jnp.zeros_like(x), slopes * tangents[0]
