"""The gated linear unit in plain `jax.numpy`.

Source: Shazeer, "GLU Variants Improve Transformer" (2020), eq. 5 and 6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.ops.activations import (
    ACTIVATIONS,
    Activation,
    Bounds,
    clipped,
    clipped_by_choice,
)
from rewriter.ops.slopes import Slopes, with_slopes


def reference(
    *,
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    b_gate: jax.Array | None = None,
    b_up: jax.Array | None = None,
    rows_gate: jax.Array | None = None,
    rows_up: jax.Array | None = None,
    activation: str = "silu",
    beta: float = 1.0,
    clip_gate: Bounds = (None, None),
    clip_up: Bounds = (None, None),
    up_shift: float = 0.0,
    slopes: Slopes = (),
    slopes_up: Slopes = (),
    precision: str | None = None,
    out_dtype: str | None = None,
) -> jax.Array:
    """Returns ``act(clip(x·w_gate + b_gate)) · (clip(x·w_up + b_up) + up_shift)``.

    Operands are documented where the op is declared.

    Args:
        activation: One of `rewriter.ops.activations.ACTIVATIONS`.
        beta: The number of a parametric activation, such as the factor inside
            ``swish``: x · sigmoid(beta · x).
        clip_gate: Lower and upper bound of the gate branch, None for none.
        clip_up: The same for the other branch.
        up_shift: Added to the other branch after clipping.
        slopes: Derivatives of ``act(clip(y))`` at some numbers y, where the program's
            differ, such as 1/2 at 0 for ``max(y, 0)``.
        slopes_up: The same for the clip of the other branch.
        precision: As `jax.lax.Precision`, by name.
        out_dtype: The result's dtype; x's by default.

    Returns:
        [..., f]. Branches are accumulated and combined in float32, or float64 if x is,
        and rounded once. NaN in a branch is NaN in the result, whatever the activation:
        those that are 0 below zero are ``max(x, 0)``, not a choice by ``x > 0``.
        Infinities follow the formula: ``-inf * sigmoid(-inf)`` is NaN.
    """
    gate = branch(x, w_gate, (b_gate, rows_gate), precision)
    up = branch(x, w_up, (b_up, rows_up), precision)
    bounds = clip_gate, clip_up, up_shift
    y = combine(gate, up, activation, beta, *bounds, slopes, slopes_up, within=clipped)
    return y.astype(out_dtype or x.dtype)


def usual(
    *,
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    b_gate: jax.Array | None = None,
    b_up: jax.Array | None = None,
    rows_gate: jax.Array | None = None,
    rows_up: jax.Array | None = None,
    precision: str | None = None,
    out_dtype: str | None = None,
    **given: Any,
) -> jax.Array:
    """Computes `reference` with the branches in x's own type.

    Many models do so in 16 bits, with less traffic and more rounding.
    """
    gate = branch(x, w_gate, (b_gate, rows_gate), precision, x.dtype)
    up = branch(x, w_up, (b_up, rows_up), precision, x.dtype)
    return combine(gate, up, **given).astype(out_dtype or x.dtype)


def branch(
    x: jax.Array,
    w: jax.Array,
    added: Sequence[jax.Array | None],
    precision: str | None,
    dtype: Any = None,
) -> jax.Array:
    """Returns ``x·w`` plus addends, in a type that is at least float32 by default."""
    wide = dtype or jnp.promote_types(x.dtype, jnp.float32)
    y = jnp.matmul(x, w, precision=precision, preferred_element_type=wide)
    for b in added:
        y = y if b is None else y + b.astype(wide)
    return y


def combine(
    gate: jax.Array,
    up: jax.Array,
    activation: str = "silu",
    beta: float = 1.0,
    clip_gate: Bounds = (None, None),
    clip_up: Bounds = (None, None),
    up_shift: float = 0.0,
    slopes: Slopes = (),
    slopes_up: Slopes = (),
    activations: Mapping[str, Activation] = ACTIVATIONS,
    within: Callable[[jax.Array, Bounds], jax.Array] = clipped_by_choice,
) -> jax.Array:
    """Returns the product of the two branches after clipping and activation.

    Parameters are as in `reference`.
    """
    chosen = activations[activation]
    gate = with_slopes(lambda y: chosen(within(y, clip_gate), beta), slopes)(gate)
    up = with_slopes(lambda y: within(y, clip_up), slopes_up)(up)
    return gate * (up + up_shift if up_shift else up)


SPREAD = {"x": 1.0, "b_gate": 0.1, "b_up": 0.1, "rows_gate": 0.1, "rows_up": 0.1}
"""Standard deviations of sampled operands; that of weights is k ** -0.5."""


def sample(
    key: jax.Array, operands: Mapping[str, Any], params: Mapping[str, object]
) -> dict[str, jax.Array]:
    """Returns normal rows, weights that keep their size, and small biases."""
    del params
    made: dict[str, jax.Array] = {}
    keys = jax.random.split(key, len(operands))
    for name, own in zip(operands, keys, strict=True):
        shape = operands[name].shape
        spread = SPREAD.get(name)
        made[name] = jax.random.normal(own, shape) * (spread or shape[0] ** -0.5)
    return {n: v.astype(operands[n].dtype) for n, v in made.items()}
