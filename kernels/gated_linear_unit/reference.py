"""The gated linear unit in plain `jax.numpy`.

Source: Shazeer, "GLU Variants Improve Transformer" (2020), eq. 5 and 6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Bounds = tuple[float | None, float | None]


def reference(
    *,
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    b_gate: jax.Array | None = None,
    b_up: jax.Array | None = None,
    activation: str = "silu",
    beta: float = 1.0,
    clip_gate: Bounds = (None, None),
    clip_up: Bounds = (None, None),
    up_shift: float = 0.0,
    precision: str | None = None,
    out_dtype: str | None = None,
) -> jax.Array:
    """Returns ``act(clip(x·w_gate + b_gate)) · (clip(x·w_up + b_up) + up_shift)``.

    Args:
        x: [..., k].
        w_gate: [k, f], the branch that goes through the activation.
        w_up: [k, f], the other branch.
        b_gate: [f]; 0 if absent.
        b_up: [f]; 0 if absent.
        activation: One of `ACTIVATIONS`.
        beta: The factor inside ``swish``: x · sigmoid(beta · x).
        clip_gate: Lower and upper bound of the gate branch, None for none.
        clip_up: The same for the other branch.
        up_shift: Added to the other branch after clipping.
        precision: As `jax.lax.Precision`, by name.
        out_dtype: The result's dtype; x's by default.

    Returns:
        [..., f]. Branches are accumulated and combined in float32, or float64
        if x is, and rounded once.
    """
    gate = branch(x, w_gate, b_gate, precision)
    up = branch(x, w_up, b_up, precision)
    y = combine(gate, up, activation, beta, clip_gate, clip_up, up_shift)
    return y.astype(out_dtype or x.dtype)


def usual(
    *,
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    b_gate: jax.Array | None = None,
    b_up: jax.Array | None = None,
    precision: str | None = None,
    out_dtype: str | None = None,
    **given: Any,
) -> jax.Array:
    """Returns what `reference` does, with the branches in x's own type.

    So many models write it in 16 bits, with less traffic and more rounding.
    """
    gate = branch(x, w_gate, b_gate, precision, x.dtype)
    up = branch(x, w_up, b_up, precision, x.dtype)
    plain = {"activation": "silu", "beta": 1.0, "clip_gate": (None, None),
             "clip_up": (None, None), "up_shift": 0.0}  # fmt: skip
    y = combine(gate, up, **{**plain, **given})
    return y.astype(out_dtype or x.dtype)


def branch(
    x: jax.Array,
    w: jax.Array,
    b: jax.Array | None,
    precision: str | None,
    dtype: Any = None,
) -> jax.Array:
    """Returns ``x·w + b`` in a type, by default in at least float32."""
    wide = dtype or jnp.promote_types(x.dtype, jnp.float32)
    y = jnp.matmul(x, w, precision=precision, preferred_element_type=wide)
    return y if b is None else y + b.astype(wide)


def combine(
    gate: jax.Array,
    up: jax.Array,
    activation: str,
    beta: float,
    clip_gate: Bounds,
    clip_up: Bounds,
    up_shift: float,
) -> jax.Array:
    """Returns the product of the two branches after clipping and activation."""
    gate = ACTIVATIONS[activation](_clipped(gate, clip_gate), beta)
    up = _clipped(up, clip_up)
    return gate * (up + up_shift if up_shift else up)


def _clipped(y: jax.Array, bounds: Bounds) -> jax.Array:
    return y if bounds == (None, None) else jnp.clip(y, *bounds)


def _gelu_tanh(y: jax.Array, beta: float) -> jax.Array:
    del beta
    inner = math.sqrt(2 / math.pi) * (y + 0.044715 * (y * y * y))
    return 0.5 * y * (1 + jnp.tanh(inner))


ACTIVATIONS: Mapping[str, Callable[[jax.Array, float], jax.Array]] = {
    "silu": lambda y, beta: y * jax.lax.logistic(y),
    "swish": lambda y, beta: y * jax.lax.logistic(beta * y),
    "gelu_tanh": _gelu_tanh,
    "gelu_erf": lambda y, beta: 0.5 * y * jax.lax.erfc(-y * math.sqrt(0.5)),
    "gelu_quick": lambda y, beta: y * jax.lax.logistic(1.702 * y),
    "relu": lambda y, beta: jnp.where(y > 0, y, jnp.zeros_like(y)),
    "relu2": lambda y, beta: jnp.square(jnp.maximum(y, jnp.zeros_like(y))),
    "sigmoid": lambda y, beta: jax.lax.logistic(y),
    "tanh": lambda y, beta: jnp.tanh(y),
    "identity": lambda y, beta: y,
}
"""Activations by name, as functions of the gate branch and of beta."""


def sample(
    key: jax.Array, operands: Mapping[str, Any], params: Mapping[str, object]
) -> dict[str, jax.Array]:
    """Returns normal rows, weights that keep their size, and small biases."""
    del params
    made: dict[str, jax.Array] = {}
    keys = jax.random.split(key, len(operands))
    for name, own in zip(operands, keys, strict=True):
        shape = operands[name].shape
        spread = {"x": 1.0, "b_gate": 0.1, "b_up": 0.1}.get(name)
        made[name] = jax.random.normal(own, shape) * (spread or shape[0] ** -0.5)
    return {n: v.astype(operands[n].dtype) for n, v in made.items()}
