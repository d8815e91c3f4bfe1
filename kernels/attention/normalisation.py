"""The divisor of weights that are no softmax: a function of their sum.

Sigmoid attention takes ``sigmoid(scores)`` as weights, ReLU attention ``relu(scores)``.
Both may be divided by a function of a query's sum of weights::

    softmax   Σ_s exp(f) v / Σ_s exp(f)
    none      Σ_s f v
    sum       Σ_s f v / divisor(Σ_s f)

Sources: Ramapuram et al., "Theory, Analysis, and Best Practices for Sigmoid
Self-Attention" (2024), and Wortsman et al., "Replacing softmax with ReLU in Vision
Transformers" (2023).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jax import Array

    from rewriter.ops.score import Score


def divided(
    total: Array, row: Array, divisor: Score | None, arrays: Mapping[str, Array]
) -> Array:
    """Returns what weighed values are divided by.

    Args:
        total: Sums of weights, [..., t, 1].
        row: Numbers of queries, int32; they broadcast against the sums.
        divisor: The program's function of a sum; None leaves it.
        arrays: What the function reads.
    """
    if divisor is None:
        return total
    return divisor(total, row, jnp.int32(0), arrays).astype(total.dtype)
