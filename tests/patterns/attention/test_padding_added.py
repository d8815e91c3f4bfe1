"""A mask of -inf, and padding that adds a finite number: a bias beside a mask."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter

pytestmark = pytest.mark.once

B, T, N, H = 2, 8, 2, 4
RANDOM = np.random.default_rng(0)
Q, K, V, UP = RANDOM.normal(size=(4, B, T, N, H)).astype(np.float32)
# The first sequence is padded in front, so that early rows see only padding.
PAD = np.arange(T) >= np.array([[3], [0]])
FORCED = {"attention": "memory_bounded"}
ABOVE = np.triu(np.full((T, T), -np.inf, np.float32), 1)
BELOW = np.tril(np.ones((T, T), bool))


def added(pad: Any, fill: float, like: Any) -> Any:
    return jnp.where(pad, 0.0, fill)[:, None, None].astype(like.dtype)


def as_clip(s, pad):
    return s + jnp.asarray(ABOVE, s.dtype) + added(pad, -1e9, s)


def padding_first(s, pad):
    return s + added(pad, -1e9, s) + jnp.asarray(ABOVE, s.dtype)


def as_one_bias(s, pad):
    return s + (jnp.asarray(ABOVE, s.dtype) + added(pad, -1e7, s))


def selected(s, pad):
    return jnp.where(BELOW, s + added(pad, -1e9, s), -jnp.inf)


def selected_first(s, pad):
    return jnp.where(BELOW, s, -jnp.inf) + added(pad, -1e9, s)


def of_floats(s, pad):
    lost = 1.0 - pad[:, None, None].astype(s.dtype)
    return s + jnp.asarray(ABOVE, s.dtype) - 1e8 * lost


def of_windows(s, pad):
    near = BELOW & ~np.tril(BELOW, -4)
    return jnp.where(near, s, -jnp.inf) + added(pad, -1e9, s)


def of_both_ends(s, pad):
    pairs = pad[:, None, :, None] & pad[:, None, None]
    return s + jnp.asarray(ABOVE, s.dtype) + jnp.where(pairs, 0.0, -1e9).astype(s.dtype)


def of_heads(s, pad):
    fills = jnp.asarray([-1e9, -1e8], s.dtype)[:, None, None]
    return s + jnp.asarray(ABOVE, s.dtype) + jnp.where(pad[:, None, None], 0, fills)


def scaled(s, pad):
    return 0.5 * s + jnp.asarray(ABOVE, s.dtype) + added(pad, -1e9, s)


SPELLINGS = (
    as_clip,
    padding_first,
    as_one_bias,
    selected,
    selected_first,
    of_floats,
    of_windows,
    of_both_ends,
    of_heads,
    scaled,
)


def results(fn: Any, dtype: Any) -> list[np.ndarray]:
    arrays = (jnp.asarray(x, dtype) for x in (Q, K, V, UP))
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(fn(*arrays, PAD))]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_found_with_gradients(spelling: Any) -> None:
    def attend(q, k, v, pad):
        s = spelling(jnp.einsum("btnh,bsnh->bnts", q, k) * 0.5, pad)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)

    def loss(q, k, v, up, pad):
        out = jax.checkpoint(attend)(q, k, v, pad)
        return (out * up).sum(), out

    fn = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    fast = rewriter.optimize(fn, implementation=FORCED)
    (site,) = fast.report(Q, K, V, UP, PAD).sites
    assert (site.op, site.kernel) == ("attention", "memory_bounded")
    assert site.backward
    got, plain = results(fast, jnp.float32), results(jax.jit(fn), jnp.float32)
    for x, y in zip(got, plain, strict=True):
        # Rows that see padding alone weigh roundings of a large number.
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
