"""Differentiates a function of parts inside of a `jax.shard_map` over other axes.

JAX cannot differentiate one shard_map in another where types say what values vary over:
it would split what gradients read over the axes of the outer one, too. So the result is
one shard_map of the operands, and the gradients are one more, which computes the result
again. Whatever differentiates these once more uses the op's reference instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from rewriter import _jax
from rewriter.support.dtypes import is_inexact

Function = Callable[..., Any]


def differentiable(
    part: Function,
    reference: Function,
    mesh: Any,
    specs: Sequence[Any],
    out: Any,
    backward: bool,
) -> Function:
    """Returns the function of whole operands, with derivatives.

    Args:
        part: The function of one device's parts.
        reference: The same function of whole operands, in plain JAX.
        mesh: The devices; some axes are manual.
        specs: How each operand is split over the others.
        out: How the result is.
        backward: Whether reverse mode is computed part by part too. If so, there is no
            forward mode.
    """
    call = _as_reference(_jax.mapped(part, mesh, specs, out), reference)
    if not backward:
        return call

    def forward(*arrays: jax.Array) -> tuple[jax.Array, Sequence[jax.Array]]:
        return call(*arrays), arrays

    def gradients(arrays: Sequence[jax.Array], cotangent: jax.Array) -> Any:
        moving = [i for i, x in enumerate(arrays) if is_inexact(x)]
        into = (*specs, out)
        of_parts = _jax.mapped(
            _gradients(part, moving), mesh, into, tuple(specs[i] for i in moving)
        )
        of_parts = _as_reference(of_parts, _gradients(reference, moving))
        found = dict(zip(moving, of_parts(*arrays, cotangent), strict=True))
        return tuple(found.get(i) for i in range(len(arrays)))

    both = jax.custom_vjp(call)
    both.defvjp(forward, gradients)
    return both


def _gradients(fn: Function, moving: Sequence[int]) -> Function:
    """A function of operands and a cotangent to the gradients of some operands."""

    def gradients(*given: jax.Array) -> tuple[jax.Array, ...]:
        *arrays, cotangent = given

        def of(*chosen: jax.Array) -> jax.Array:
            full = list(arrays)
            for i, x in zip(moving, chosen, strict=True):
                full[i] = x
            return fn(*full)

        result, back = jax.vjp(of, *(arrays[i] for i in moving))
        return back(_jax.placed_as(cotangent, jax.typeof(result)))

    return gradients


def _as_reference(fn: Function, reference: Function) -> Function:
    """The function, with the derivatives of another that computes the same."""
    made = jax.custom_jvp(fn)

    @made.defjvp
    def derivative(primals: Any, tangents: Any) -> tuple[Any, Any]:
        return made(*primals), jax.jvp(reference, primals, tangents)[1]

    return made
