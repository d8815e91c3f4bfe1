"""What is a near miss to a reader, and what only shares a few steps with an op."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter

pytestmark = pytest.mark.once

rng = np.random.default_rng(0)
X = rng.normal(size=(4, 8)).astype("f4")
W = rng.normal(size=(8, 6)).astype("f4")
U = rng.normal(size=(8, 6)).astype("f4")
Q, K, V = (rng.normal(size=(2, 6, 2, 4)).astype("f4") for _ in range(3))
KEY = jax.random.key(0)


def dropout(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0.0)


def dispatch(x, w):
    chances, chosen = jax.lax.top_k(jax.nn.softmax(x @ w), 2)
    return jnp.einsum("nke,nd,nk->ekd", jax.nn.one_hot(chosen, 6), x, chances)


def entropy(x):
    p = jax.nn.softmax(x)
    return -(p * jnp.log(p)).sum(-1)


def divergence(x):
    logs = jax.nn.log_softmax(x) - jax.nn.log_softmax(x + 1)
    return (jax.nn.softmax(x) * logs).sum()


def l2_norm(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def adam(x):
    return 0.9 * x / (jnp.sqrt(0.99 * x * x) + 1e-8)


def clipped(x):
    return x * jnp.minimum(1.0, 1 / (jnp.sqrt((x * x).sum()) + 1e-6))


def mlp(x, w):
    return jax.nn.relu(x @ w) @ w.T


def cell(x, w):
    return jax.nn.sigmoid(x @ w) * jnp.tanh(x @ w) + jax.nn.sigmoid(x @ w)


NONE = {
    "dropout": (dropout, X, KEY),
    "log_softmax": (jax.nn.log_softmax, X),
    "softmax": (jax.nn.softmax, X),
    "dispatch": (dispatch, X, W),
    "entropy": (entropy, X),
    "divergence": (divergence, X),
    "adam": (adam, X),
    "clipped": (clipped, X),
    "mlp": (mlp, X, W),
    "cell": (cell, X, W),
}
NO_GRADIENT = ("dispatch", "clipped", "entropy")
"""Programs whose gradients still have near misses."""


@pytest.mark.parametrize("name", NONE)
def test_no_near_miss(name):
    fn, *args = NONE[name]
    report = rewriter.explain(fn)(*args)
    assert not report.misses
    assert not report.sites


@pytest.mark.parametrize("name", [n for n in NONE if n not in NO_GRADIENT])
def test_no_near_miss_in_gradients(name):
    fn, *args = NONE[name]
    gradient = jax.grad(lambda *args: fn(*args).sum())
    report = rewriter.explain(gradient)(*args)
    assert not report.misses
    assert not report.sites


def scores(q, k):
    return jnp.einsum("btnh,bsnh->bnts", q, k) * 0.5


def weighted(w, v):
    return jnp.einsum("bnts,bsnh->btnh", w, v)


def over_queries(q, k, v):
    return weighted(jax.nn.softmax(scores(q, k), axis=-2), v)


def of_sines(q, k, v):
    return weighted(jax.nn.softmax(jnp.sin(scores(q, k))), v)


def root_plus_epsilon(x):
    return x / (jnp.sqrt(jnp.mean(x * x, -1, keepdims=True)) + 1e-6)


def deviation_plus_epsilon(x):
    return (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-6)


def larger_of_two(x):
    square = jnp.mean(x * x, -1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(square, 1e-6))


def unlike_branches(x, w, u):
    return jax.nn.silu(x @ w) * (x @ u + jnp.sin(x @ u))


NEAR = {
    "over_queries": ("attention", "no sum of weights divides", over_queries, Q, K, V),
    "of_sines": ("attention", "the scores go through something", of_sines, Q, K, V),
    "root": ("rms_norm", "added to the root", root_plus_epsilon, X),
    "deviation": ("layer_norm", "added to the root", deviation_plus_epsilon, X),
    "larger": ("rms_norm", "and not their sum", larger_of_two, X),
    "l2_norm": ("rms_norm", "an L2 norm", l2_norm, X),
    "branches": ("gated_linear_unit", "contraction is added", unlike_branches, X, W, U),
}


@pytest.mark.parametrize("name", NEAR)
def test_a_near_miss_with_its_reason(name):
    op, words, fn, *args = NEAR[name]
    report = rewriter.explain(fn)(*args)
    assert [m.op for m in report.misses] == [op]
    assert words in report.misses[0].reasons[0].text
    assert not report.sites
