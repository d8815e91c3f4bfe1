"""Whether scores may be as low as the fill of a mask, by a bound of all of them.

A mask with a finite fill leaves hidden keys a score: the fill, or their own plus the
fill. Kernels drop hidden keys. That is the same in floats as long as all scores are
much larger than the fill, and no hidden score is large enough to make up for it. So the
product of a query and a key is bounded by their largest numbers, column by column:
``|q k| <= sum over h of max |q[:, h]| max |k[:, h]|``. That reads queries and keys
once.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.attention.scored_form import ARRAYS, TABLES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jax import Array

NEAR = -1e6
"""Fills above it are near: scores may reach them. Every kernel honours these fills."""

MARGIN = 100.0
"""Exponentials of float32 vanish beyond it."""

ADDED = ("bias", "alibi", *ARRAYS, *TABLES)
"""Operands that may make scores infinite."""


def is_near(fill: float | None) -> bool:
    """Returns whether a fill is so near that kernels must compare scores with it."""
    return fill is not None and fill > NEAR


def reached(given: Mapping[str, Any], fill: float) -> Array | None:
    """Returns whether scores may be as large as a fill, bool; None if they never are.

    Args:
        given: The operands and parameters of attention by name: q [b, t, n, h] and
            k [b, s, k, h] in floats, and more.
        fill: The score of hidden keys, or what is added to their scores.
    """
    limit, cap = -fill / 2 - MARGIN, given.get("softcap")
    added = _added(given)
    if cap is not None and added is None and cap < limit:
        return None
    most = _products(given)
    most = most if cap is None else jnp.minimum(most, cap)
    most = most if added is None else most + added
    return ~(most < limit)  # NaN reaches it, too


def _products(given: Mapping[str, Any]) -> Array:
    """A bound of all products of queries and keys, times their scale."""
    queries, keys = (_largest(given[name]) for name in "qk")
    most = (queries * keys).sum() * abs(given.get("scale", 1.0))
    factor = given.get("scale_factor")
    return most if factor is None else most * jnp.abs(factor.astype(most.dtype))


def _largest(x: Array) -> Array:
    """The largest size of numbers [b, t, n, h] in each column, float32 or wider."""
    return jnp.abs(x).max((0, 1, 2)).astype(jnp.promote_types(x.dtype, jnp.float32))


def _added(given: Mapping[str, Any]) -> Array | None:
    """A bound of what is added to scores; None if nothing is."""
    bias, slopes, found = given.get("bias"), given.get("alibi"), []
    if bias is not None:
        found.append(jnp.abs(bias).max().astype(jnp.float32))
    if slopes is not None:
        places = [jnp.asarray(given[x].shape[1], jnp.float32) for x in "qk"]
        far = sum(places) + abs(given.get("shift", 0))
        if (offset := given.get("offset")) is not None:
            far = far + jnp.abs(offset.astype(jnp.float32)).max()
        found.append(jnp.abs(slopes).max().astype(jnp.float32) * far)
    return sum(found[1:], found[0]) if found else None


def added_reach(given: Mapping[str, Any], fill: float) -> Array:
    """Returns whether some number that is added to scores is as low as the fill.

    Args:
        given: As for `reached`, or those of a function of scores.
        fill: The score of hidden keys.
    """
    # A function of scores multiplies by distances, perhaps with a few numbers beside.
    farthest = 4 * sum(jnp.asarray(given[n].shape[1], jnp.float32) for n in "qk")
    found = []
    for name in ADDED:
        x = given.get(name)
        if x is None or not jnp.issubdtype(x.dtype, jnp.floating):
            continue
        most = jnp.asarray(abs(fill) / (2 if name == "bias" else farthest))
        found.append(jnp.any(~(jnp.abs(x) < most.astype(x.dtype))))
    return functools.reduce(operator.or_, found, jnp.asarray(False))
