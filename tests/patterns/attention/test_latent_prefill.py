"""Latent attention before its weights are absorbed: one rotary key for all heads."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from tests import slow
from tests.patterns.attention.test_latent import exact, normal

pytestmark = pytest.mark.once

B, T, N, NOPE, R, V = 2, 12, 3, 16, 8, 24
"""Sequences, tokens, heads, columns of keys, rotary columns, columns of values."""

SCALE = (NOPE + R) ** -0.5
CAUSAL = np.tril(np.ones((T, T), bool))
FORCED = {"attention": "memory_bounded"}


def inputs() -> tuple[Any, ...]:
    """Queries of both kinds, keys of each head, rotary keys, and values."""
    return (
        normal(B, T, N, NOPE, seed=1), normal(B, T, N, R, seed=2),
        normal(B, T, N, NOPE, seed=3), normal(B, T, R, seed=4),
        normal(B, T, N, V, seed=5),
    )  # fmt: skip


def attend(scores: Any, v: Any, keep: Any = CAUSAL, fill: float = -jnp.inf) -> Any:
    p = jax.nn.softmax(jnp.where(keep, scores * SCALE, fill))
    return jnp.einsum("bhts,bshv->bthv", p, v)


def scores(q, q_rope, k, k_rope):
    of_heads = jnp.einsum("bthd,bshd->bhts", q, k)
    return of_heads + jnp.einsum("bthr,bsr->bhts", q_rope, k_rope)


def two_products(q, q_rope, k, k_rope, v):
    return attend(scores(q, q_rope, k, k_rope), v)


def all_keys(q, q_rope, k, k_rope, v):
    return attend(scores(q, q_rope, k, k_rope), v, keep=True)


def scaled_queries(q, q_rope, k, k_rope, v):
    return attend(scores(q * 0.5, q_rope * 0.5, k, k_rope) * 2.0, v, fill=-1e30)


def scaled_products(q, q_rope, k, k_rope, v):
    s = jnp.einsum("bthr,bsr->bhts", q_rope, k_rope) * 0.5
    s += jnp.einsum("bthd,bshd->bhts", q, k) * 0.5
    return attend(s, v)


def rotary_head_axis(q, q_rope, k, k_rope, v):
    s = jnp.einsum("bthd,bshd->bhts", q, k)
    s += jnp.einsum("bthr,bsxr->bhts", q_rope, k_rope[:, :, None])
    return attend(s, v)


def broadcast(q, q_rope, k, k_rope, v):
    wide = jnp.broadcast_to(k_rope[:, :, None], (B, T, N, R))
    q, k = jnp.concatenate([q, q_rope], -1), jnp.concatenate([k, wide], -1)
    return attend(jnp.einsum("bthd,bshd->bhts", q, k), v)


def repeated(q, q_rope, k, k_rope, v):
    wide = jnp.repeat(k_rope[:, :, None], N, axis=2)
    q, k = jnp.concatenate([q, q_rope], -1), jnp.concatenate([k, wide], -1)
    return attend(jnp.einsum("bthd,bshd->bhts", q, k), v)


def heads_first(q, q_rope, k, k_rope, v):
    """As Hugging Face's DeepSeek-V3: states of heads, and a mask that is added."""
    q, q_rope, k, v = (x.swapaxes(1, 2) for x in (q, q_rope, k, v))
    wide = jnp.broadcast_to(k_rope[:, None], (B, N, T, R))
    q, k = jnp.concatenate((q, q_rope), -1), jnp.concatenate((k, wide), -1)
    s = q @ k.swapaxes(2, 3) * SCALE
    s = s + jnp.where(CAUSAL, 0, jnp.finfo(jnp.float32).min)
    return (jax.nn.softmax(s) @ v).swapaxes(1, 2)


def written_in_slices(q, q_rope, k, k_rope, v):
    """As Hugging Face's DeepSeek-V2: empty states whose parts are set."""
    empty = jnp.zeros((B, T, N, NOPE + R), q.dtype)
    q = empty.at[..., :NOPE].set(q).at[..., NOPE:].set(q_rope)
    k = empty.at[..., :NOPE].set(k).at[..., NOPE:].set(k_rope[:, :, None])
    return attend(jnp.einsum("bthd,bshd->bhts", q, k), v)


def grouped(q, q_rope, k, k_rope, v):
    """As MaxText: groups of one head, and sums kept apart from products."""
    q = jnp.concatenate([q, q_rope], -1)[:, :, :, None] * SCALE
    wide = jnp.broadcast_to(k_rope[:, :, None, :], (B, T, N, R))
    k = jnp.concatenate([k, wide], -1)
    s = jnp.einsum("btkgd,bskd->bkgts", q, k)
    s = s + jnp.where(CAUSAL, 0.0, -0.7 * float(np.finfo(np.float32).max))
    p = jnp.exp(s - s.max(-1, keepdims=True))
    out = jnp.einsum("bkgts,bskd->btkgd", p, v)
    return (out / jnp.moveaxis(p.sum(-1), 3, 1)[..., None])[:, :, :, 0]


def padded(q, q_rope, k, k_rope, v):
    keep = CAUSAL & (jnp.arange(T) < jnp.array([5, T])[:, None])[:, None, None]
    return attend(scores(q, q_rope, k, k_rope), v, keep)


def packed(q, q_rope, k, k_rope, v):
    segments = jnp.cumsum(jnp.arange(T) % 5 == 0)
    keep = CAUSAL & (segments[:, None] == segments)
    return attend(scores(q, q_rope, k, k_rope), v, keep)


def checkpointed(q, q_rope, k, k_rope, v):
    return jax.checkpoint(two_products)(q, q_rope, k, k_rope, v)


def head_by_head(q, q_rope, k, k_rope, v):
    def head(q, q_rope, k, k_rope, v):
        s = (q @ k.T + q_rope @ k_rope.T) * SCALE
        return jax.nn.softmax(jnp.where(CAUSAL, s, -1e30)) @ v

    heads = jax.vmap(head, in_axes=(1, 1, 1, None, 1), out_axes=1)
    return jax.vmap(heads)(q, q_rope, k, k_rope, v)


def layers(q, q_rope, k, k_rope, v):
    """Layers whose keys and values are made of a latent."""

    def layer(x, weights):
        down, up = weights
        states = x @ down
        kv = jnp.einsum("bsc,chd->bshd", states[..., :NOPE], up)
        k, v = jnp.split(kv, [NOPE], -1)
        out = two_products(q, q_rope, k, states[..., NOPE:], v)
        return x + out.reshape(x.shape), None

    weights = normal(2, N * V, NOPE + R, seed=6), normal(2, NOPE, N, NOPE + V, seed=7)
    weights = jax.tree.map(lambda x: x.astype(v.dtype) * 0.1, weights)
    return jax.lax.scan(layer, v.reshape(B, T, -1), weights)[0]


SPELLINGS = (
    two_products, all_keys, scaled_queries, scaled_products, rotary_head_axis,
    broadcast, repeated, heads_first, written_in_slices, grouped, padded, packed,
    checkpointed, head_by_head, layers,
)  # fmt: skip


@pytest.mark.parametrize("f", SPELLINGS, ids=lambda f: f.__name__)
def test_prefill(f: Any) -> None:
    """A sum of products is one product, of queries and keys that are joined."""
    args = inputs()
    fast = rewriter.optimize(f, implementation=FORCED)
    (site,) = fast.report(*args).sites
    assert (site.op, site.kernel) == ("attention", "memory_bounded")
    assert f"q f32[{B},{T},{N},{NOPE + R}]" in site.shapes
    assert f"v f32[{B},{T},{N},{V}]" in site.shapes
    assert "bias" not in site.shapes
    assert ("mask" in site.shapes) <= (f in (padded, packed))
    np.testing.assert_allclose(fast(*args), exact(f, args), rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize(
    "f", slow.first(2, (layers, broadcast, grouped)), ids=lambda f: f.__name__
)
def test_training(f: Any) -> None:
    """Gradients are replaced too, that of the shared rotary keys added up."""
    args = inputs()
    numbers = (0, 1, 4) if f is layers else (0, 1, 2, 3, 4)
    grad = jax.grad(lambda *x: (f(*x) ** 2).sum(), argnums=numbers)
    fast = rewriter.optimize(grad, implementation=FORCED)
    (site,) = fast.report(*args).sites
    assert site.backward
    flat = lambda grads: jnp.concatenate([x.reshape(-1) for x in grads])
    want = exact(lambda *x: flat(grad(*x)), args)
    np.testing.assert_allclose(flat(fast(*args)), want, rtol=2e-4, atol=2e-4)
