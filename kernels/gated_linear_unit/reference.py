"""The gated linear unit in plain `jax.numpy`.

Source: Shazeer, "GLU Variants Improve Transformer" (2020), eq. 5 and 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from rewriter.kernels.gated_linear_unit.branches import Use, combine
from rewriter.ops.activations import clipped


def reference(**given: Any) -> jax.Array:
    """Returns ``act(clip(x·w_gate + b_gate)) · (clip(x·w_up + b_up) + up_shift)``.

    Args:
        **given: Operands, which are documented where the op is declared, and the
            parameters of `Use` and `combine`.

    Returns:
        [..., f]. Branches are accumulated and combined in float32, or float64 if x is,
        and rounded once. NaN in a branch is NaN in the result, whatever the activation:
        those that are 0 below zero are ``max(x, 0)``, not a choice by ``x > 0``.
        Infinities follow the formula: ``-inf * sigmoid(-inf)`` is NaN.
    """
    use = Use.of(given)
    gate, up = use.branches(use.by_row)
    return combine(gate, up, **use.joining, within=clipped).astype(use.dtype)


def usual(**given: Any) -> jax.Array:
    """Computes `reference` with the branches in x's own type.

    Many models do so in 16 bits, with less traffic and more rounding.
    """
    use = Use.of(given)
    gate, up = use.branches(use.by_row, use.x.dtype)
    return combine(gate, up, **use.joining).astype(use.dtype)


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
