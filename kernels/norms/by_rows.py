"""Calls kernels of norms that take rows: reshapes arrays to rows, and results back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jax import Array


@dataclass(frozen=True)
class Call:
    """One use of a norm, with its arrays as rows.

    Attributes:
        centred: Whether it is a layer norm, not an RMS norm.
        x: [m, d].
        given: scale [d], bias [d] and epsilon [], if present.
        addend: [m, d], or None.
        eps: As in `reference`.
        of_squares: As in `reference`.
        out_dtype: The result's dtype.
    """

    centred: bool
    x: Array
    given: dict[str, Array]
    addend: Array | None
    eps: float
    of_squares: bool
    out_dtype: str

    def of_sum(self) -> Call:
        """Returns the norm of x plus its addend, which XLA adds up beforehand."""
        assert self.addend is not None
        return replace(self, x=self.x + self.addend, addend=None)


Normalize = Callable[[Call, Any], tuple[Array, Array | None]]
"""A call and a config in; the norm and, with an addend, x plus that out, as rows."""

Differentiate = Callable[[Call, Array, Any], dict[str, Array]]
"""A call, the result's cotangent as rows and a config in; cotangents by name out. With
an addend, it is added to x's cotangent."""


def forward(
    normalize: Normalize,
    /,
    *,
    centred: bool,
    x: Array,
    eps: float = 0.0,
    of_squares: bool = False,
    out_dtype: str | None = None,
    addend: Array | None = None,
    residuals: bool = False,
    config: Any = None,
    **given: Array,
) -> Any:
    """Returns the result, as `reference` does; there are no residuals.

    Operands are those of the op, and parameters are as in `reference`.

    Args:
        normalize: The kernel.
        centred: Whether it is a layer norm, not an RMS norm.
        out_dtype: The result's dtype; x's by default.
        addend: As x. The result is then ``(x + addend, its norm)``.
        residuals: Whether to return ``(result, ())``.
        config: The kernel's.
        **given: scale [d], bias [d] and epsilon [], if present.
    """
    call = _call(centred, x, given, addend, eps, of_squares, out_dtype or x.dtype)
    rows, total = normalize(call, config)
    out = rows.reshape(x.shape)
    result = out if total is None else (total.reshape(x.shape), out)
    return (result, ()) if residuals else result


def backward(
    differentiate: Differentiate,
    /,
    *,
    centred: bool,
    x: Array,
    out: None,
    residuals: tuple[()],
    cotangent: Array,
    eps: float = 0.0,
    of_squares: bool = False,
    out_dtype: str | None = None,
    addend: Array | None = None,
    config: Any = None,
    **given: Array,
) -> dict[str, Array]:
    """Returns the cotangents of every operand.

    Operands are those of the op, and parameters are as in `reference`.

    Args:
        differentiate: The kernel.
        centred: Whether it is a layer norm, not an RMS norm.
        out: Not needed.
        residuals: Empty.
        cotangent: As the result.
        addend: As x, added to its cotangent.
        config: The kernel's.
        **given: As in `forward`.
    """
    del out, residuals, out_dtype
    call = _call(centred, x, given, addend, eps, of_squares, cotangent.dtype)
    made = differentiate(call, cotangent.reshape(call.x.shape), config)
    made["x"] = made["x"].reshape(x.shape)
    return {n: y.astype({"x": x, **given}[n].dtype) for n, y in made.items()}


def _call(
    centred: bool,
    x: Array,
    given: dict[str, Array],
    addend: Array | None,
    eps: float,
    of_squares: bool,
    out_dtype: Any,
) -> Call:
    shape = math.prod(x.shape[:-1]), x.shape[-1]
    added = None if addend is None else addend.reshape(shape)
    rows = x.reshape(shape)
    return Call(centred, rows, given, added, eps, of_squares, str(out_dtype))
