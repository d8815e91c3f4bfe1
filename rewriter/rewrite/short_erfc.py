"""The complementary error function by one polynomial, exact to 16 bits.

    y = erfc x    →    t = 1 / (1 + 0.535 |x|)    y = t · Q(t) · exp(-x²)

The result differs from `erfc` by at most 4e-5 of its value, also far from 0. ``x < 0``
gives ``2 - y(-x)``. Infinite numbers and NaN give what `erfc` gives.

Source: the form is that of Abramowitz and Stegun, 7.1.26 (1964). The coefficients are
fitted to ``erfc(x) exp(x²) / t`` for x from 0 to 10, by least squares with weights that
even out the relative error.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

SLOPE = 0.535
COEFFICIENTS = (
    0.30096465450707105, 0.31577148436600355, 0.1775981566699707, 0.38649117008372513,
    -0.18085718373049958,
)  # fmt: skip
"""Of Q, from that of 1 to that of t⁴; `SLOPE` is that of |x| in t."""


def short_erfc(x: jax.Array) -> jax.Array:
    """Returns the complementary error function.

    Args:
        x: float32 of any shape.

    Returns:
        float32 of the same shape, at most 4e-5 of their value beside `erfc`.

    Example:
        >>> round(float(short_erfc(jnp.float32(0.5))), 4)
        0.4795
    """
    t = 1 / (1 + jnp.float32(SLOPE) * jnp.abs(x))
    q = jnp.float32(COEFFICIENTS[-1])
    for c in COEFFICIENTS[-2::-1]:
        q = q * t + jnp.float32(c)
    y = t * q * jnp.exp(-jnp.square(x))
    return jnp.where(x < 0, 2 - y, y)
