"""Losses of logits that are computed in ways that are none of the op's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.measure.oracle import in_float64
from tests.patterns.cross_entropy.pieces import FORCED, LABELS, V, W, X, integer_loss

SAMPLES = np.asarray([1, 3, 5, 7], np.int32)


def picked(logits, labels=LABELS):
    logs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logs, labels[..., None], -1)[..., 0]


def margin(x, w):
    """CosFace: the logit of the label is lowered."""
    return picked((x @ w - 0.3 * jax.nn.one_hot(LABELS, V)) * 8).mean()


def angular_margin(x, w):
    """ArcFace, of rows and columns of length one."""
    unit = lambda a, axis: a / jnp.linalg.norm(a, axis=axis, keepdims=True)
    cosines = (unit(x, -1) @ unit(w, 0)).clip(-0.99, 0.99)
    lowered = jnp.cos(jnp.arccos(cosines) + 0.2)
    hot = jax.nn.one_hot(LABELS, V, dtype=bool)
    return integer_loss(8 * jnp.where(hot, lowered, cosines), LABELS).mean()


def own_and_sampled(x, w):
    own = jnp.einsum("btk,kbt->bt", x, w[:, LABELS])[..., None]
    logits = jnp.concatenate([own, x @ w[:, SAMPLES]], -1)
    return picked(logits, LABELS % 5).mean()


def two_heads(x, w):
    return integer_loss(x @ w + jnp.tanh(x) @ w[:, ::-1], LABELS).mean()


def adjusted(x, w):
    """Logits minus what their classes share, with a weight for each row."""
    logits = x @ w
    return (integer_loss(logits - 0.1 * logits.mean((0, 1)), LABELS) * X[..., 0]).sum()


def masked(x, w):
    allowed = (jnp.arange(V) % 3 > 0) | jax.nn.one_hot(LABELS, V, dtype=bool)
    return picked(jnp.where(allowed, x @ w, -1e9)).mean()


LOSSES = (margin, angular_margin, own_and_sampled, two_heads, adjusted, masked)


@pytest.mark.parametrize("fn", LOSSES, ids=lambda fn: fn.__name__)
def test_value_and_gradients(fn):
    both = jax.value_and_grad(fn, (0, 1))
    fast = rewriter.optimize(both, implementation=FORCED)
    assert fast.report(X, W).counts(replaced=True)["cross_entropy"] == 1
    expected, _ = in_float64(jax.make_jaxpr(both)(X, W), (X, W))
    for got, want in zip(jax.tree.leaves(fast(X, W)), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def other_logits(x, w):
    """The label's logit has no margin: it is none of those that are added up."""
    logits = x @ w
    changed = logits - 0.3 * jax.nn.one_hot(LABELS, V)
    own = jnp.take_along_axis(logits, LABELS[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(changed, -1) - own).mean()


def without_maximum(x, w):
    changed = x @ w - 0.3 * jax.nn.one_hot(LABELS, V)
    own = jnp.take_along_axis(changed, LABELS[..., None], -1)[..., 0]
    return (jnp.log(jnp.exp(changed).sum(-1)) - own).mean()


def other_axis(x, w):
    changed = x @ w - 0.3 * jax.nn.one_hot(LABELS, V)
    logs = jax.nn.log_softmax(changed, 1)
    return -jnp.take_along_axis(logs, LABELS[..., None], -1).mean()


@pytest.mark.parametrize("fn", [other_logits, without_maximum, other_axis])
def test_refused(fn):
    fast = rewriter.optimize(jax.value_and_grad(fn, (0, 1)), implementation=FORCED)
    assert not fast.report(X, W).sites
    np.testing.assert_allclose(fast(X, W)[0], fn(X, W), rtol=1e-6)
