"""Masks of positions that come out of gathers, running sums and sorts of no input."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter

pytestmark = pytest.mark.once

T = 8
rng = np.random.default_rng(0)
Q, K, V = (rng.normal(size=(2, T, 2, 4)).astype("f4") for _ in range(3))
DATA = np.array([0, 1, 2, 3, 0, 1, 2, 3], "i4")


def attention(keep):
    def fn(q, k, v, data):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * 0.5
        scores = jnp.where(keep(data), scores, -jnp.inf)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)

    return fn


def rows(positions):
    return positions[:, None] >= positions[None, :]


def count():
    return jax.lax.iota("int32", T)


def indexed():
    return jax.lax.broadcasted_iota("int32", (2, T), 1)[jnp.zeros(T, int), count()]


def counted_up():
    return jnp.cumsum(count() >= 0) - 1


def segments():
    steps = jnp.diff(count(), prepend=count()[:1] - 1)
    return jnp.cumsum(steps != 1)


def said(fast):
    lines = fast.report(Q, K, V, DATA).text().splitlines()
    return next(n.strip().split("; ") for n in lines if "scale" in n)


CAUSAL = {
    "taken": lambda _: rows(jnp.take(count(), count())),
    "indexed": lambda _: rows(indexed()),
    "cumsum": lambda _: rows(counted_up()),
    "sorted": lambda _: rows(jnp.sort(count()[::-1])),
    "argsort": lambda _: rows(jnp.argsort(count())),
    "one segment": lambda _: rows(count()) & (segments()[:, None] == segments()),
    "cummax": lambda _: rows(jax.lax.cummax(count())),
    "updated": lambda _: rows(count().at[3].set(3)),
    "added": lambda _: rows(jnp.zeros(T, int).at[count()].add(count())),
    "both": lambda _: (
        jnp.cumsum(jnp.ones(T, int))[:, None] > jnp.take(count(), count())
    ),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_causal(name):
    fn = attention(CAUSAL[name])
    fast = rewriter.optimize(fn, implementation={"attention": "memory_bounded"})
    assert said(fast) == ["causal", "scale 0.5"]
    np.testing.assert_allclose(fast(Q, K, V, DATA), fn(Q, K, V, DATA), atol=2e-6)


OTHERS = {
    "backwards": lambda _: rows(jnp.take(count(), count()[::-1])),
    "permuted": lambda _: rows(jnp.take(count(), (3 * count()) % T)),
    "two segments": lambda _: (
        rows(count()) & (jnp.cumsum(count() == 4)[:, None] == jnp.cumsum(count() == 4))
    ),
    "data": lambda data: rows(jnp.cumsum(data)),
    "at data": lambda data: rows(jnp.take(count(), data)),
    "updated": lambda _: rows(count().at[3].set(5)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_not_plainly_causal(name):
    fn = attention(OTHERS[name])
    fast = rewriter.optimize(fn, implementation={"attention": "memory_bounded"})
    assert said(fast) != ["causal", "scale 0.5"]
    np.testing.assert_allclose(fast(Q, K, V, DATA), fn(Q, K, V, DATA), atol=2e-6)
