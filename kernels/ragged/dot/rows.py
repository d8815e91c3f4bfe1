"""Lets a kernel whose rows begin at the top run on rows that begin anywhere.

A device with some of the groups has all rows; those of its groups begin at `first_row`.
Most kernels want them at the top. So the rows are moved there and the results back,
inside each pass, and no moved rows are kept for gradients.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.kernel import Kernel

FIRST = "first_row"
"""The operand with the start of the first group's rows; int32 []."""


def anywhere(kernel: Kernel, rows: str = "lhs") -> Kernel:
    """Returns a kernel that also supports `first_row`.

    Args:
        kernel: The kernel. Its operand `rows` has rows, and so have both operands of a
            contraction of rows, its results and its residuals.
        rows: The operand's name.
    """
    backward = kernel.backward and functools.wraps(kernel.backward)(
        functools.partial(_backward, kernel.backward, rows)
    )
    forward = from_any_row(kernel.forward, rows)
    return dataclasses.replace(kernel, forward=forward, backward=backward)


def from_any_row(function: Callable[..., Any], rows: str = "lhs") -> Callable[..., Any]:
    """Returns a function of the same operands, by name, and of `first_row`.

    Args:
        function: Returns an array of rows, or several; one of groups if contracting.
        rows: As for `anywhere`.
    """

    @functools.wraps(function)
    def moving(*args: Any, first_row: Array | None = None, **given: Any) -> Any:
        if first_row is None:
            return function(*args, **given)
        made = function(**_moved(given, rows, -first_row))
        return made if _contracts(given) else _all_moved(made, first_row)

    return moving


def _backward(
    function: Callable[..., dict[str, Array]],
    rows: str,
    *,
    first_row: Array | None = None,
    residuals: Any = (),
    cotangent: Array,
    **given: Any,
) -> dict[str, Array]:
    if first_row is None:
        return function(residuals=residuals, cotangent=cotangent, **given)
    residuals = _all_moved(residuals, -first_row)
    if not _contracts(given):
        cotangent = jnp.roll(cotangent, -first_row, 0)
    moved = _moved(given, rows, -first_row)
    grads = function(residuals=residuals, cotangent=cotangent, **moved)
    return {**grads, **_moved(grads, rows, first_row, _contracts(given))}


def _contracts(given: Mapping[str, Any]) -> bool:
    return given.get("mode") == "contracting"


def _moved(
    given: Mapping[str, Any], rows: str, by: Array, contracts: bool = False
) -> dict[str, Any]:
    """The same, with all arrays of rows moved down."""
    names = (rows, "rhs") if contracts or _contracts(given) else (rows,)
    moved = {n: jnp.roll(given[n], by, 0) for n in names if given.get(n) is not None}
    return {**given, **moved}


def _all_moved(made: Any, by: Array) -> Any:
    return jax.tree.map(lambda x: jnp.roll(x, by, 0), made)
