"""Two attentions that read keys, values or queries in one layout of a projection.

Their cotangents are added in that layout. So no value is one attention's gradient in
the layout of the projection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter

pytestmark = pytest.mark.once

B, T, N, H, BLOCK = 2, 12, 2, 4, 3
D = N * H
FORCED = {"attention": "memory_bounded"}
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(B, T, D)).astype(np.float32)
W = RANDOM.normal(size=(2, 4, D, D)).astype(np.float32) / 3
PLACES = np.arange(T)
CAUSAL = PLACES[:, None] >= PLACES
NEAR = CAUSAL & (PLACES[:, None] - PLACES < 4)
WHOLE_BLOCKS = PLACES[:, None] >= np.arange(BLOCK - 1, T, BLOCK)


def heads(x: Any, w: Any) -> Any:
    return (x @ w).reshape(B, -1, N, H)


def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
    s = jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(mask, s, -1e30)), v)


def blocks(x: Any) -> Any:
    return x.reshape(B, -1, BLOCK, N, H).mean(2)


def near_and_far(q: Any, k: Any, v: Any) -> Any:
    return attend(q, k, v, NEAR) + attend(q, k, v, CAUSAL)


def compressed(q: Any, k: Any, v: Any) -> Any:
    """Near keys, and means of blocks of them, as in native sparse attention."""
    far = attend(q, blocks(k), blocks(v), WHOLE_BLOCKS)
    return attend(q, k, v, NEAR) + jnp.tanh(far)


def strided(q: Any, k: Any, v: Any) -> Any:
    far = attend(q, k[:, ::BLOCK], v[:, ::BLOCK], CAUSAL[:, ::BLOCK])
    return attend(q, k, v, NEAR) - 0.3 * far


def twice(q: Any, k: Any, v: Any) -> Any:
    """The result of the first attention is the second's query."""
    return attend(attend(q, k, v, NEAR), k, v, CAUSAL)


def normalized(q: Any, k: Any, v: Any) -> Any:
    return attend(q, k, v, NEAR) + attend(q, 2 * jnp.tanh(k), v, CAUSAL)


def heads_first(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))

    def one(mask: Any, k: Any, v: Any) -> Any:
        s = jnp.where(mask, q @ k.swapaxes(2, 3) / H**0.5, -1e30)
        return jax.nn.softmax(s) @ v

    out = one(NEAR, k, v) + one(CAUSAL[:, ::BLOCK], k[:, :, ::BLOCK], v[:, :, ::BLOCK])
    return out.swapaxes(1, 2)


def by_heads(attention: Callable[..., Any], wrap: Callable[..., Any] = lambda f: f):
    @wrap
    def layer(x: Any, w: Any) -> Any:
        q, k, v = (heads(x, w[i]) for i in range(3))
        return x + attention(q, k, v).reshape(x.shape) @ w[3]

    return layer


def unrolled(layer: Callable[..., Any]) -> Callable[..., Any]:
    def fn(x: Any, w: Any) -> Any:
        for one in w:
            x = layer(x, one)
        return x

    return fn


def scanned(layer: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w: jax.lax.scan(lambda x, one: (layer(x, one), None), x, w)[0]


ATTENTIONS = {
    f.__name__: f
    for f in (near_and_far, compressed, strided, twice, normalized, heads_first)
}
FORMS = {
    "plain": lambda f: unrolled(by_heads(f)),
    "scan, checkpoint": lambda f: scanned(by_heads(f, jax.checkpoint)),
}


def stepped(fn: Callable[..., Any]) -> Callable[..., Any]:
    weights = np.cos(np.arange(X.size)).reshape(X.shape).astype(np.float32)
    return jax.value_and_grad(lambda x, w: (fn(x, w) * weights).sum(), (0, 1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_both_attentions_have_all_their_gradients(name: str, form: str) -> None:
    step = stepped(FORMS[form](ATTENTIONS[name]))
    fast = rewriter.optimize(step, implementation=FORCED)
    sites = [s for s in fast.report(X, W).sites if s.op == "attention"]
    assert sum(s.repeats for s in sites) == 4
    assert all(s.replaced and s.backward for s in sites)
    text = str(fast.jaxpr(X, W))
    assert f"f32[{B},{N},{T},{T}] = dot_general" not in text
    with jax.enable_x64(True):
        want = jax.jit(step)(X.astype(np.float64), W.astype(np.float64))
    for a, b in zip(*map(jax.tree.leaves, (fast(X, W), want)), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5 * np.abs(b).max())
