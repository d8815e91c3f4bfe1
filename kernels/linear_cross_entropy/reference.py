"""The loss over a vocabulary, with the product that makes its logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.kernels.cross_entropy.reference import reference as of_logits
from rewriter.kernels.cross_entropy.reference import sampled_of_rows

OF_ROWS = frozenset({"labels", "other", "share", "first"})
"""Operands that no product reads."""


def logits_of(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    scale: float,
    soft_cap: float,
    precision: str | None,
) -> jax.Array:
    """Returns ``scale · x·w + bias``, capped, in float32 or float64."""
    wide = jnp.promote_types(jnp.result_type(x, w), jnp.float32)
    y = jnp.matmul(x, w, precision=precision, preferred_element_type=wide)
    y = y * scale if scale != 1 else y
    y = y if bias is None else y + bias.astype(wide)
    return soft_cap * jnp.tanh(y / soft_cap) if soft_cap else y


def reference(
    *,
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None = None,
    other: jax.Array | None = None,
    share: jax.Array | None = None,
    first: jax.Array | None = None,
    scale: float = 1.0,
    soft_cap: float = 0.0,
    precision: str | None = None,
    logits_dtype: str | None = None,
    **loss: Any,
) -> jax.Array:
    """Returns the cross-entropy of ``scale · x·w + bias`` with each row's label.

    Args:
        scale: Multiplies the product.
        soft_cap: The bound c of ``c · tanh(y / c)``, taken of logits y; 0 for none.
        precision: As `jax.lax.Precision`, by name.
        logits_dtype: The dtype of the logits' gradients, which are factors of two more
            products; that of ``x·w`` by default.
        **loss: As of the reference of ``cross_entropy``.

    Returns:
        [...], or [..., 3 to 5] if ``reduced``. It is computed in float32, or float64 if
        x or w are.
    """
    del logits_dtype
    y = logits_of(x, w, bias, scale, soft_cap, precision)
    rows = {"labels": labels, "other": other, "share": share, "first": first}
    return of_logits(logits=y, **rows, **loss)


def sample(
    key: jax.Array, operands: Mapping[str, Any], params: Mapping[str, object]
) -> dict[str, jax.Array]:
    """Returns normal rows, weights that keep their size, and labels."""
    del params
    made: dict[str, jax.Array] = {}
    keys = jax.random.split(key, len(operands))
    for name, own in zip(operands, keys, strict=True):
        shape = operands[name].shape
        if name in OF_ROWS:
            v = operands["w"].shape[-1]
            made[name] = sampled_of_rows(name, own, operands[name], v)
        else:
            spread = {"x": 1.0, "bias": 0.1}.get(name) or 2 * shape[0] ** -0.5
            made[name] = jax.random.normal(own, shape) * spread
    return {n: v.astype(operands[n].dtype) for n, v in made.items()}
