"""Biases that are the same for all keys of a row: they cancel, and are read anyway.

Beside a large one scores are rounded away, and the program's gradient is as good as 0.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from tests.spellings.check import operand_names

pytestmark = pytest.mark.once

FORCED = {"attention": "memory_bounded"}
R = np.random.default_rng(0)
B, T, H, D = 2, 7, 2, 4
Q, K, V = R.normal(size=(3, B, T, H, D)).astype(np.float32)
BIAS = R.normal(size=(H, T, 1)).astype(np.float32)
CAUSAL = np.tril(np.ones((T, T), bool))
UP = R.normal(size=(B, T, H, D)).astype(np.float32)


def attention(of_scores: Any, weights: Any = jax.nn.softmax) -> Any:
    def f(bias: Any, q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) * 0.5
        p = weights(of_scores(scores, bias)).astype(q.dtype)
        return jnp.einsum("bhts,bshd->bthd", p, v)

    return f


def shifted(x: Any) -> Any:
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def unshifted(x: Any) -> Any:
    return jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True)


def with_sink(x: Any, bias: Any) -> Any:
    top = jnp.maximum(x.max(-1, keepdims=True), bias)
    e = jnp.exp(x - top)
    return e / (e.sum(-1, keepdims=True) + jnp.exp(bias - top))


FOUND = {
    "added": attention(lambda x, b: x + b),
    "subtracted": attention(lambda x, b: x - 2 * b),
    "of a head": attention(lambda x, b: x + b[:, :1]),
    "of a query": attention(lambda x, b: x + b[0]),
    "a number": attention(lambda x, b: x + b[0, 0, 0]),
    "behind a mask": attention(lambda x, b: jnp.where(CAUSAL, x, -jnp.inf) + b),
    "in front of a mask": attention(lambda x, b: jnp.where(CAUSAL, x + b, -1e30)),
    "behind a cap": attention(lambda x, b: 9 * jnp.tanh(x / 9) + b),
    "beside a bias": attention(lambda x, b: x + b + V[0, :, 0, :1].T),
    "by hand": attention(lambda x, b: x + b, shifted),
    "log_softmax": attention(
        lambda x, b: x + b, lambda x: jnp.exp(jax.nn.log_softmax(x))
    ),
    "in a softmax of some": attention(
        lambda x, b: x + b, lambda x: jax.nn.softmax(x, where=jnp.asarray(CAUSAL))
    ),
}
REFUSED = {
    "without a maximum": attention(lambda x, b: x + b, unshifted),
    "in place of the maximum": attention(lambda x, b: x - jnp.abs(b), unshifted),
}


@pytest.mark.parametrize("name", FOUND)
def test_is_the_bias(name: str) -> None:
    report = rewriter.explain(FOUND[name], implementation=FORCED)(BIAS, Q, K, V)
    assert report.counts()["attention"] == 1, report
    assert "bias" in operand_names(report.sites[0])


@pytest.mark.parametrize("name", REFUSED)
def test_shifts_exponentials(name: str) -> None:
    report = rewriter.explain(REFUSED[name], implementation=FORCED)(BIAS, Q, K, V)
    assert report.counts()["attention"] == 0, report


def test_sinks_are_no_bias() -> None:
    function = attention(lambda x, b: with_sink(x, b[:, :1]), lambda x: x)
    report = rewriter.explain(function, implementation=FORCED)(BIAS, Q, K, V)
    assert report.counts()["attention"] == 1, report
    assert "bias" not in operand_names(report.sites[0])


@pytest.mark.parametrize("large", [0.0, 1e5])
def test_numbers_and_gradients(large: float) -> None:
    function = FOUND["added"]
    bias = BIAS + np.where(np.arange(T)[:, None] < 3, large, 0).astype(np.float32)
    args = (bias, *(x.astype(jnp.bfloat16) for x in (Q, K, V)))

    def both(f: Any) -> Any:
        def run(*args: Any) -> Any:
            out, back = jax.vjp(f, *args)
            return out, back(UP.astype(out.dtype))

        return run

    want = jax.jit(both(function))(*args)
    ways = (
        both(rewriter.optimize(function, implementation=FORCED)),
        rewriter.optimize(both(function), implementation=FORCED),
    )
    for way in ways:
        got = jax.jit(way)(*args)
        assert not np.any(got[1][0])
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(
                np.asarray(a, np.float32), np.asarray(b, np.float32), atol=0.05
            )


@pytest.mark.parametrize("name", ["added", "subtracted", "of a query", "by hand"])
def test_a_row_that_is_infinite_is_nan(name: str) -> None:
    """So are the gradients of its query, and of all keys and values of its head."""
    low = -np.inf if name != "subtracted" else np.inf
    bias = np.where(np.arange(T)[:, None] == 3, low, BIAS).astype("f4")
    fast = rewriter.optimize(FOUND[name], implementation=FORCED)

    def both(f: Any) -> Any:
        out, back = jax.vjp(lambda q, k, v: f(bias, q, k, v), Q, K, V)
        return out, *back(UP)

    ways = [jax.jit(lambda f=f: both(f))() for f in (fast, FOUND[name])]
    for got, want in zip(*ways, strict=True):
        assert np.isnan(want).any()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
