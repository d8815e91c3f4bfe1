"""Steps by which a program widens stored numbers, in order; each of them rounds.

``q.astype(bfloat16) * s`` and ``(q.astype(float32) * s).astype(bfloat16)`` are the same
real numbers, and round differently. So the steps are a parameter of an op, as text::

    steps                             computes
    "bfloat16 *scale"                 q.astype(bfloat16) * scale
    "float32 -zero *scale bfloat16"   ((q.astype(float32) - zero) * scale).astype(...)
    "float16 -8.0 /scale"             (q.astype(float16) - 8) / scale

A step is a dtype to cast to, or a sign and what it joins: ``scale``, ``zero`` or a
number. Each computes in the dtype of the step before. Steps behind a product may also
join ``rows``, a factor of each row, ``bias``, or ``scale*rows``, the product of both.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

JOINS = {"*": operator.mul, "/": operator.truediv, "-": operator.sub, "+": operator.add}
"""What a step's sign does."""

SCALE, ZERO = "scale", "zero"
"""The names of arrays in steps."""

ROWS, BIAS = "rows", "bias"
"""Those of more arrays in steps behind a product: factors of rows, and an addend."""


def applied(
    x: jax.Array,
    steps: str,
    scale: Any = None,
    zero: Any = None,
    rows: Any = None,
    bias: Any = None,
) -> jax.Array:
    """Returns an array after some steps.

    Args:
        x: The array.
        steps: As the module says.
        scale: What ``scale`` stands for, of a shape that broadcasts to x's.
        zero: What ``zero`` stands for.
        rows: What ``rows`` stands for.
        bias: What ``bias`` stands for.

    Example:
        >>> numbers = jnp.array([3, 5], "int8")
        >>> applied(numbers, "float32 -1.0 *scale", scale=2.0).tolist()
        [4.0, 8.0]
    """
    named = {SCALE: scale, ZERO: zero, ROWS: rows, BIAS: bias}
    for step in steps.split():
        sign, what = step[0], step[1:]
        if sign not in JOINS:
            x = x.astype(step)
            continue
        names = what.split("*")
        others = [named[n] for n in names] if names[0] in named else [float(what)]
        cast = [jnp.asarray(other).astype(x.dtype) for other in others]
        x = JOINS[sign](x, functools.reduce(operator.mul, cast))
    return x


def by_steps(
    numbers: jax.Array, steps: str, scale: Any, zero: Any, axis: int
) -> jax.Array:
    """Returns a matrix of stored numbers.

    Args:
        numbers: [k, n], or [n, k].
        steps: As the module says.
        scale: [z, n], where z groups of k / z numbers along k have a scale each. Either
            axis may have size 1. None if no step reads it.
        zero: The same, for zero points.
        axis: The axis k of the numbers.

    Example:
        >>> numbers = jnp.array([[1, 2], [3, 4]], "int8")
        >>> scale = jnp.array([[1.0], [0.5]])
        >>> by_steps(numbers, "float32 *scale", scale, None, 0).tolist()
        [[1.0, 2.0], [1.5, 2.0]]
    """
    groups = max([a.shape[0] for a in (scale, zero) if a is not None], default=1)
    shape = numbers.shape
    if groups > 1:
        size = shape[axis] // groups
        numbers = numbers.reshape(*shape[:axis], groups, size, *shape[axis + 1 :])

    def aligned(a: Any) -> Any:
        if a is None:
            return None
        a = a if axis == 0 else a.T
        return jnp.expand_dims(a, axis + 1) if groups > 1 else a

    return applied(numbers, steps, aligned(scale), aligned(zero)).reshape(shape)


def all_columns(values: Any, dtype: Any, n: int) -> jax.Array:
    """Returns [z, n] values in the dtype in which the program joins them.

    A kernel casts them to float32 itself: XLA would leave out a cast to 16 bits that is
    followed by one to float32.

    Args:
        values: [z, n] or [z, 1].
        dtype: The dtype.
        n: The number of columns.
    """
    return jnp.broadcast_to(values.astype(dtype), (values.shape[0], n))


def reads(steps: str, name: str) -> bool:
    """Returns whether some step reads an array, by its name.

    Example:
        >>> reads("bfloat16 *scale", "scale"), reads("bfloat16", "scale")
        (True, False)
    """
    return any(name in step[1:].split("*") for step in steps.split())


def param_of(operand: str) -> str:
    """Returns the parameter with the steps of an operand, if several may be stored.

    Example:
        >>> param_of("k")
        'widen_k'
    """
    return f"widen_{operand}"
