"""Losses of infinite logits: NaN, infinities and gradients are the program's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.nn import log_softmax, logsumexp, one_hot

import rewriter

V, INF = 8, jnp.inf
ROWS = np.random.default_rng(2).normal(size=(7, V)).astype("f4")
for row, at, number in (
    (1, 5, INF), (2, 2, INF), (3, 7, -INF), (4, slice(None), -INF), (5, 1, np.nan),
    (6, [0, 1], [INF, 100.0]),
):  # fmt: skip
    ROWS[row, at] = number
LABELS = jnp.asarray([1, 0, 2, 3, 5, 4, 6], jnp.int32)


def taken(y):
    return jnp.take_along_axis(y, LABELS[:, None], -1)[:, 0]


def shifted_by(of_maximum):
    """The log-sum-exp with some function of the maximum, less the picked logit."""

    def loss(y):
        top = lax.stop_gradient(of_maximum(y.max(-1, keepdims=True)))
        return (top + jnp.log(jnp.exp(y - top).sum(-1, keepdims=True)))[:, 0] - taken(y)

    return loss


def with_z(y):
    total = logsumexp(y, -1)
    return total - taken(y) + 1e-3 * total**2


LOSSES = {
    "taken of log_softmax": (lambda y: -taken(log_softmax(y)), "both"),
    "one-hot times log_softmax": (
        lambda y: -(one_hot(LABELS, V) * log_softmax(y)).sum(-1), "both"),
    "chosen of log_softmax": (
        lambda y: -jnp.where(one_hot(LABELS, V, dtype=bool), log_softmax(y), 0).sum(-1),
        "both"),
    "einsum of log_softmax": (
        lambda y: -jnp.einsum("rv,rv->r", one_hot(LABELS, V), log_softmax(y)), "both"),
    "optax's of distributions": (
        lambda y: optax.softmax_cross_entropy(y, one_hot(LABELS, V)), "both"),
    "logsumexp": (lambda y: logsumexp(y, -1) - taken(y), "none"),
    "optax's of integers": (
        lambda y: optax.softmax_cross_entropy_with_integer_labels(y, LABELS), "none"),
    "one-hot times log-probabilities": (
        lambda y: -(one_hot(LABELS, V) * (y - logsumexp(y, -1, keepdims=True))).sum(-1),
        "none"),
    "z-loss": (with_z, "none"),
    "z-loss of another sum": (
        lambda y: -taken(log_softmax(y)) + 1e-3 * logsumexp(y, -1) ** 2, "both"),
    "maximum": (shifted_by(lambda m: m), "both"),
    "finite maximum": (
        shifted_by(lambda m: jnp.where(jnp.isfinite(m), m, 0)), "none"),
    "maximum but -inf": (shifted_by(lambda m: jnp.where(m == -INF, 0, m)), "+inf"),
    "bounded maximum": (shifted_by(lambda m: jnp.maximum(m, -1e30)), "+inf"),
    "maximum but inf": (shifted_by(lambda m: jnp.where(m == INF, 0, m)), "-inf"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_infinite_logits(name: str) -> None:
    loss, nan_at = LOSSES[name]
    kernels = {"cross_entropy": "memory_bounded"}
    fast = rewriter.optimize(loss, implementation=kernels)
    (site,) = fast.report(jnp.asarray(ROWS)).sites
    assert dict(site.params).get("nan_at", "both") == nan_at
    got, want = _with_gradients(fast), _with_gradients(loss)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6)


def _with_gradients(loss):
    def run(y):
        out, back = jax.vjp(loss, y)
        return out, back(jnp.ones_like(out))[0]

    return jax.jit(run)(jnp.asarray(ROWS))
