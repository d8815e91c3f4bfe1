"""The types of what the primitives of sites return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rewriter import _jax
from rewriter.site.kernel_call import accepted, residual_slots
from rewriter.site.uses import (
    Mask,
    Shaped,
    Use,
    level_sizes,
    result,
    shaped,
    without_levels,
)


def _avals(results: Sequence[Shaped], avals: Sequence[Any]) -> list[Any]:
    return [_jax.shaped_like(shape, dtype, avals) for shape, dtype in results]


def site_aval(
    *avals: Any, use: Use, batch: tuple[Mask, ...], residuals: bool
) -> list[Any]:
    """The types of a result and of the residuals."""
    operands = [shaped(a) for a in avals]
    inner = without_levels(operands, batch)
    sizes = tuple(level_sizes(operands, batch))
    for _, kernel in use.kernels:
        accepted(use, kernel, inner)  # a wrong kernel fails here
    results = [result(use, inner)]
    if residuals:
        results += [r for slot in residual_slots(use, inner) for r in slot]
    return _avals([(sizes + s, d) for s, d in results], avals)


def tangent_aval(
    *avals: Any, use: Use, active: tuple[str, ...], batch: tuple[Mask, ...]
) -> Any:
    """The type of the derivative of a result."""
    del active
    operands = [shaped(a) for a in avals]
    inner = without_levels(operands, batch)[: len(use.names)]
    sizes = tuple(level_sizes(operands, batch))
    shape, dtype = result(use, inner)
    return _avals([(sizes + shape, dtype)], avals)[0]


def backward_aval(
    *avals: Any,
    use: Use,
    wrt: tuple[str, ...],
    batch: tuple[Mask, ...],
    summed: tuple[Mask, ...],
) -> list[Any]:
    """The types of cotangents."""
    operands = [shaped(a) for a in avals]
    inner = dict(zip(use.names, without_levels(operands, batch), strict=False))
    sizes = level_sizes(operands, batch)
    results = []
    for i, name in enumerate(wrt):
        shape, dtype = inner[name]
        kept = [n for n, sums in zip(sizes, summed, strict=True) if not sums[i]]
        results.append(((*kept, *shape), dtype))
    return _avals(results, avals)


def joined_avals(
    grads: Mapping[str, Any], joined: Sequence[tuple[str, Any]]
) -> list[Any]:
    """The types of cotangents, some of them as one array behind the others.

    Args:
        grads: Those of separate cotangents by name.
        joined: The heads of some in the array, which are all of it.
    """
    places = dict(joined)
    rest = [x for name, x in grads.items() if name not in places]
    if not joined:
        return rest
    name, at = joined[0]
    b, t, _, h = grads[name].shape
    shape = (b, t, at.all, h)
    return [*rest, *_avals([(shape, grads[name].dtype)], list(grads.values()))]
