"""Losses whose last classes only pad the vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from tests.patterns.cross_entropy.pieces import (
    BIAS,
    FORCED,
    KEEP,
    LABELS,
    B,
    T,
    V,
    W,
    X,
    integer_loss,
    with_rule,
)

USED = 9
INSIDE = np.minimum(LABELS, USED - 1)


def _first(y, fill):
    """Logits, and a fill for the classes that pad the vocabulary."""
    return jnp.where(jnp.arange(V) < USED, y, fill)


def _picked(logs, labels):
    return -jnp.take_along_axis(logs, labels[..., None], -1)[..., 0]


PADDED = {
    "optax": lambda y, c: integer_loss(_first(y, -jnp.inf), c),
    "far below": lambda y, c: integer_loss(_first(y, -1e9), c),
    "log_softmax": lambda y, c: _picked(jax.nn.log_softmax(_first(y, -jnp.inf)), c),
    "least": lambda y, c: _picked(
        jax.nn.log_softmax(jnp.where(np.arange(V) > 8, jnp.finfo(y.dtype).min, y)), c
    ),
    "one_hot": lambda y, c: (
        -(jax.nn.one_hot(c, V) * jax.nn.log_softmax(_first(y, -1e9))).sum(-1)
    ),
    "z_loss": lambda y, c: (
        integer_loss(_first(y, -1e9), c)
        + 0.01 * jax.nn.logsumexp(_first(y, -1e9), -1) ** 2
    ),
    "scaled": lambda y, c: integer_loss(_first(y / 2, -jnp.inf), c),
    "capped": lambda y, c: integer_loss(_first(5 * jnp.tanh(y / 5), -1e9), c),
    "ruled": lambda y, c: with_rule(_first(y, -1e9), jax.nn.one_hot(c, V), 1e-2),
    "at most": lambda y, c: integer_loss(
        jnp.where(jnp.arange(V) <= USED - 1, y, -jnp.inf), c
    ),
    "concatenated": lambda y, c: integer_loss(
        jnp.where(jnp.arange(V)[None, None] >= USED, -jnp.inf, y), c
    ),
}


@pytest.mark.once
@pytest.mark.parametrize("name", PADDED)
def test_classes_that_only_pad_the_vocabulary(name: str) -> None:
    """They have no logits, and no gradients; a label among them picks the fill."""
    weights = jnp.cos(jnp.arange(B * T, dtype=jnp.float32)).reshape(B, T)

    def loss(x, w, bias, labels=INSIDE):
        losses = PADDED[name](x @ w + bias, labels)
        return (losses * weights).sum(), losses

    taken = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    fast = rewriter.optimize(taken, implementation=FORCED)
    (site,) = fast.report(X, W, BIAS).sites
    assert (site.op, site.backward) == ("linear_cross_entropy", True)
    assert site.params["used"] == USED
    odd = jnp.asarray([[0, 8, 9, 11, 12], [3, -1, 100, 10, -12]], jnp.int32)
    for labels in (INSIDE, odd):
        got, want = (f(X, W, BIAS, labels) for f in (fast, jax.jit(taken)))
        for g, t in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            np.testing.assert_allclose(g, t, rtol=1e-4, atol=1e-5)


NOT_PADDED = {
    "last": lambda y: jnp.where(jnp.arange(V) > 2, y, -jnp.inf),
    "some": lambda y: jnp.where(jnp.arange(V) % 2 == 0, y, -jnp.inf),
    "by an array": lambda y: jnp.where(jnp.asarray(KEEP[0, 0] > BIAS), y, -jnp.inf),
    "near": lambda y: jnp.where(jnp.arange(V) < USED, y, -3.0),
    "by row": lambda y: jnp.where(jnp.arange(V) < 5 + jnp.arange(T)[:, None], y, -1e9),
    "positive": lambda y: jnp.where(jnp.arange(V) < USED, y, 1e9),
}


@pytest.mark.once
@pytest.mark.parametrize("name", NOT_PADDED)
def test_other_masks_of_classes(name: str) -> None:
    def loss(x, w, bias):
        losses = integer_loss(NOT_PADDED[name](x @ w + bias), jnp.full((B, T), 4))
        return losses.mean(), losses

    taken = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    fast = rewriter.optimize(taken, implementation=FORCED)
    sites = fast.report(X, W, BIAS).sites
    assert not any(s.params.get("used") for s in sites)
    got, want = fast(X, W, BIAS), jax.jit(taken)(X, W, BIAS)
    for g, t in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(g, t, rtol=1e-4, atol=1e-5)
