"""Rows, weights, labels and losses that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

B, T, K, V = 2, 5, 4, 12
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, T, K)).astype(np.float32)
W = RNG.normal(size=(K, V)).astype(np.float32)
BIAS = RNG.normal(size=V).astype(np.float32)
LABELS = RNG.integers(0, V, (B, T)).astype(np.int32)
KEEP = (RNG.random((B, T)) > 0.3).astype(np.float32)
IGNORED = np.where(KEEP > 0, LABELS, -100).astype(np.int32)
FORCED = {
    "linear_cross_entropy": "memory_bounded",
    "cross_entropy": "memory_bounded",
}
integer_loss = optax.softmax_cross_entropy_with_integer_labels


def flattened(fn: Callable[..., jax.Array]) -> Any:
    return jax.value_and_grad(fn, (0, 1, 2))


@jax.custom_vjp
def with_rule(logits, targets, z_loss):
    """A loss with a rule of its own, as training libraries write it."""
    return ruled_forward(logits, targets, z_loss)[0]


def ruled_forward(logits, targets, z_loss):
    top = logits.max(axis=-1, keepdims=True)
    exponentials = jnp.exp(logits - top)
    total = exponentials.sum(axis=-1, keepdims=True)
    logs = logits - top - jnp.log(total)
    log_z = jnp.squeeze(jnp.log(total) + top, axis=-1)
    out = -jnp.sum(targets * logs, axis=-1) + z_loss * lax.square(log_z)
    return out, (targets, z_loss, exponentials, total, logs, log_z)


def ruled_backward(saved, g):
    targets, z_loss, exponentials, total, logs, log_z = saved
    own = (1 + 2 * z_loss * log_z)[..., None] * exponentials / total - targets
    return g[..., None] * own, -g[..., None] * logs, jnp.zeros(())


with_rule.defvjp(ruled_forward, ruled_backward)
