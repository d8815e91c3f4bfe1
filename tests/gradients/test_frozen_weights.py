"""Weights without gradients, as of low-rank adapters, under a checkpoint's policies."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from tests import slow

pytestmark = pytest.mark.once

B, T, N, H, RANK = 2, 64, 2, 8, 3
D = N * H
RANDOM = np.random.default_rng(0)
FORCED = dict.fromkeys(("attention", "rms_norm"), "memory_bounded")
POLICIES = jax.checkpoint_policies
KEEPING = {
    "nothing": None,
    "products": POLICIES.dots_saveable,
    "products of weights": POLICIES.dots_with_no_batch_dims_saveable,
}


def normal(*shape: int) -> np.ndarray:
    return 0.3 * RANDOM.normal(size=shape).astype(np.float32)


X, W, G, A = normal(B, T, D), normal(4, D, D), 1 + normal(D), normal(2, 2, D, RANK)
KEPT = np.arange(T)[None] < np.array([[40], [T]])
stop = jax.lax.stop_gradient


def layer(x: Any, w: Any, g: Any, a: Any) -> Any:
    """Adapters for queries and values."""
    h = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g
    q, k, v = (h @ w[i] for i in range(3))
    q, v = (y + h @ down @ up.T for y, (down, up) in zip((q, v), a, strict=True))
    q, k, v = (y.reshape(B, T, N, H) for y in (q, k, v))
    kept = (jnp.arange(T)[:, None] >= jnp.arange(T)) & KEPT[:, None, None]
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5
    shares = jax.nn.softmax(jnp.where(kept, scores, -1e30))
    return x + jnp.einsum("bnts,bsnh->btnh", shares, v).reshape(x.shape) @ w[3]


FROZEN = {
    "all but adapters": lambda x, w, g, a: (x, stop(w), stop(g), a),
    "all but the scale": lambda x, w, g, a: (x, stop(w), g, stop(a)),
    "all but keys": lambda x, w, g, a: (x, stop(w).at[1].set(w[1]), stop(g), stop(a)),
    "norms": lambda x, w, g, a: (x, w, stop(g), a),
}


@pytest.mark.parametrize(
    ("frozen", "policy"),
    slow.unless(
        lambda frozen, policy: policy == "products" or frozen == "all but adapters",
        [(frozen, policy) for frozen in FROZEN for policy in KEEPING],
        several=True,
    ),
)
def test_sites_have_their_gradients(frozen: str, policy: str) -> None:
    def loss(x: Any, w: Any, g: Any, a: Any) -> Any:
        block = jax.checkpoint(
            lambda *given: layer(*FROZEN[frozen](*given)), policy=KEEPING[policy]
        )
        return jnp.sin(block(block(x, w, g, a), w, g, a)).sum()

    step = jax.grad(loss, (0, 1, 2, 3))
    fast = rewriter.optimize(step, implementation=FORCED)
    found = fast.report(X, W, G, A).counts(repeats=False, backward=True)
    assert (found["attention"], found["rms_norm"]) == (2, 2)
    got = fast(X, W, G, A)
    with jax.enable_x64(True):
        wide = [a.astype(float) for a in (X, W, G, A)]
        exact = [np.asarray(a) for a in jax.jit(step)(*wide)]
    most = max(np.linalg.norm(a) for a in exact)
    for one, other in zip(got, exact, strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * max(
            np.linalg.norm(other), 0.01 * most
        )
