"""The work of an op, by its shapes: floating-point operations and bytes to move."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

MODES = ("forward", "vjp", "forward_and_vjp")
"""The computed passes: the result, the gradients alone, or both."""

Shapes = Mapping[str, tuple[int, ...]]
Dtypes = Mapping[str, str]


@dataclass(frozen=True)
class Cost:
    """The least work that a computation needs.

    Attributes:
        flops: Floating-point operations; a multiplication and an addition are two.
        bytes: Bytes to and from memory: every operand is read once, every result
            written once.

    Example:
        >>> Cost(flops=2e12, bytes=1e9).intensity
        2000.0
    """

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes if self.bytes else math.inf


CostOf = Callable[[Shapes, Dtypes, Mapping[str, Any], str], Cost]
"""``cost(shapes, dtypes, params, mode)``: by operand name; mode is one of `MODES`."""


def moved(
    shapes: Shapes,
    dtypes: Dtypes,
    result: tuple[int, ...],
    dtype: str,
    mode: str,
    read: Mapping[str, float] | None = None,
) -> float:
    """Returns the fewest bytes that an op must move.

    A forward reads the operands and writes the result. Gradients alone read the
    operands and the result's cotangent and write a gradient for each float operand.
    Both together are the sum, since in a model the rest of it runs in between.

    Args:
        shapes: Shapes by operand name.
        dtypes: Dtype names by operand name.
        result: The result's shape.
        dtype: The result's dtype name.
        mode: One of `MODES`.
        read: Share of an operand that is read; 1 where it has none.

    Example:
        >>> shapes, dtypes = {"x": (4, 8)}, {"x": "float32"}
        >>> [moved(shapes, dtypes, (4, 8), "float32", m) / 128 for m in MODES]
        [2.0, 3.0, 5.0]
    """
    sizes = {n: _nbytes(shape, dtypes[n]) for n, shape in shapes.items()}
    operands = sum(size * (read or {}).get(n, 1.0) for n, size in sizes.items())
    forward = operands + _nbytes(result, dtype)
    gradients = sum(size for n, size in sizes.items() if _is_float(dtypes[n]))
    return of_mode(mode, forward, forward + gradients)


def of_mode(
    mode: str, forward: float, vjp: float, together: float | None = None
) -> float:
    """Returns the figure of a mode; ``together`` is the sum if not given.

    Example:
        >>> of_mode("forward_and_vjp", 1.0, 2.0)
        3.0
    """
    both = forward + vjp if together is None else together
    return {"forward": forward, "vjp": vjp, "forward_and_vjp": both}[mode]


FOUR_BITS = ("int4", "uint4", "float4_e2m1fn")
"""Dtypes of which a byte of memory has two."""


def _nbytes(shape: tuple[int, ...], dtype: str) -> float:
    size = 0.5 if dtype in FOUR_BITS else jnp.dtype(dtype).itemsize
    return math.prod(shape) * size


def _is_float(dtype: str) -> bool:
    return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
