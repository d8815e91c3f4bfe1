"""Sums of softmaxes that are multiplied by values, as in differential attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.program.prepare.differences_of_softmaxes import multiply_each

pytestmark = pytest.mark.once

B, T, N, H = 2, 6, 2, 4
RANDOM = np.random.default_rng(0)
Q, K = (RANDOM.normal(size=(B, T, N, 2, H)).astype(np.float32) for _ in range(2))
V = RANDOM.normal(size=(B, T, N, 2 * H)).astype(np.float32)
L = RANDOM.normal(size=(N,)).astype(np.float32)
FORCED = {"attention": "memory_bounded"}


def softmax_of(q: Any, k: Any) -> Any:
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
    return jax.nn.softmax(jnp.where(jnp.tri(T, dtype=bool), s, -1e9))


def both(q: Any, k: Any) -> Any:
    return (softmax_of(q[..., c, :], k[..., c, :]) for c in (0, 1))


def weighed(weights: Any, v: Any) -> Any:
    out = jnp.einsum("bnts,bsnh->btnh", weights, v)
    return out * jax.lax.rsqrt((out * out).mean(-1, keepdims=True) + 1e-5)


def by_head(q: Any, k: Any, v: Any, factor: Any) -> Any:
    a, b = both(q, k)
    return weighed(a - factor[:, None, None] * b, v)


def by_number(q: Any, k: Any, v: Any, factor: Any) -> Any:
    a, b = both(q, k)
    return weighed(a - jnp.exp(factor[0]) * b, v)


def added(q: Any, k: Any, v: Any, factor: Any) -> Any:
    a, b = both(q, k)
    return weighed(0.5 * b + factor[1] * a, v)


def subtracted(q: Any, k: Any, v: Any, factor: Any) -> Any:
    a, b = both(q, k)
    return jnp.einsum("bnts,bsnh->btnh", a - b, v) * factor[0]


FOUND = {
    "by head": by_head,
    "by number": by_number,
    "added": added,
    "subtracted": subtracted,
    "checkpoint": jax.checkpoint(by_number),
}


def by_key(q: Any, k: Any, v: Any, factor: Any) -> Any:
    a, b = both(q, k)
    return weighed(a - jnp.arange(T) * factor[0] * b, v)


def of_one_softmax(q: Any, k: Any, v: Any, factor: Any) -> Any:
    s = jnp.einsum("btnch,bsnch->bncts", q, k)
    a = jax.nn.softmax(s)
    return weighed(a[:, :, 0] - factor[0] * a[:, :, 1], v)


def of_something_else(q: Any, k: Any, v: Any, factor: Any) -> Any:
    a, _ = both(q, k)
    return weighed(a - factor[0] * jnp.tri(T), v)


OTHERS = {"by key": by_key, "parts": of_one_softmax, "another": of_something_else}


def gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    weights = np.cos(np.arange(V.size).reshape(V.shape)).astype(np.float32)
    loss = lambda *args: (fn(*args) * weights).sum()
    return jax.value_and_grad(loss, (0, 1, 2, 3))


@pytest.mark.parametrize("name", FOUND)
def test_each_softmax_is_an_attention(name: str) -> None:
    fn, args = gradients(FOUND[name]), (Q, K, V, L)
    new = rewriter.optimize(fn, implementation=FORCED, strict=True)
    sites = [s for s in new.report(*args).sites if s.op == "attention"]
    assert [s.replaced and s.backward for s in sites] == [True, True]
    with jax.enable_x64(True):
        wide = jax.jit(fn)(*(a.astype(np.float64) for a in args))
    for a, b in zip(*map(jax.tree.leaves, (new(*args), wide)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())


@pytest.mark.parametrize("name", OTHERS)
def test_other_sums_stay(name: str) -> None:
    program = jax.make_jaxpr(gradients(OTHERS[name]))(Q, K, V, L)
    assert multiply_each(program) is program
