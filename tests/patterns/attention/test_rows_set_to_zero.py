"""Weights of whole rows that are set to zero, where other rows have no keys either."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter

pytestmark = pytest.mark.once

B, T, S, N, H = 2, 8, 6, 2, 4
RANDOM = np.random.default_rng(0)
Q, UP = (RANDOM.normal(size=(B, T, N, H)).astype(np.float32) for _ in range(2))
K, V = (RANDOM.normal(size=(B, S, N, H)).astype(np.float32) for _ in range(2))
MEDIA = np.arange(S, dtype=np.int32) // 2 + 1
# Rows of text 0 are set to zero, those of text 4 see no key, and give the mean.
TEXT = np.array([[0, 0, 1, 1, 2, 3, 4, 4], [0, 1, 1, 2, 2, 2, 3, 4]], np.int32)
GIVEN = RANDOM.random((B, T)) < 0.5
FORCED = {"attention": "memory_bounded"}
LOWEST = float(np.finfo(np.float32).min)


def hidden(scores: Any, text: Any, fill: float) -> Any:
    keep = text[:, None, :, None] == MEDIA
    return jax.nn.softmax(jnp.where(keep, scores, fill))


def weights_of_flamingo(scores, text, given):
    keep = text[:, None, :, None] == MEDIA
    scores = jnp.where(keep, scores, LOWEST)
    scores = scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    return jnp.where((text == 0)[:, None, :, None], 0.0, jax.nn.softmax(scores))


def weights_times(scores, text, given):
    return hidden(scores, text, -1e9) * (text > 0)[:, None, :, None]


def weights_given(scores, text, given):
    return jnp.where(given[:, None, :, None], hidden(scores, text, -1e9), 0.0)


def weights_of_both(scores, text, given):
    w = jnp.where((text == 0)[:, None, :, None], 0.0, hidden(scores, text, LOWEST))
    return jnp.where(given[:, None, :, None], w, 0.0)


def weights_of_heads(scores, text, given):
    rows = given[:, None] & (jnp.arange(N) > 0)[:, None]
    return jnp.where(rows[..., None], hidden(scores, text, -1e9), 0.0)


def weights_from(scores, text, given):
    return jnp.where(jnp.arange(T)[:, None] >= 2, hidden(scores, text, -1e9), 0.0)


def weights_of_causal(scores, text, given):
    keep = (text[:, None, :, None] == MEDIA) & jnp.tril(jnp.ones((T, S), bool))
    w = jax.nn.softmax(jnp.where(keep, scores, -1e30))
    return jnp.where((text < 1)[:, None, :, None], 0.0, w)


def weights_padded(scores, text, given):
    """Some rows are set to zero, some are hidden: both masks are of whole rows."""
    keep = (jnp.arange(S) < 4) & given[:, None, :, None]
    w = jax.nn.softmax(jnp.where(keep, scores, -1e9))
    return jnp.where((text == 0)[:, None, :, None], 0.0, w)


def weights_added(scores, text, given):
    bias = jnp.where(text[:, None, :, None] == MEDIA, 0.0, LOWEST)
    w = jax.nn.softmax(scores + bias.astype(scores.dtype))
    return w * (text != 0)[:, None, :, None].astype(scores.dtype)


def weights_by_hand(scores, text, given):
    keep = text[:, None, :, None] == MEDIA
    scores = jnp.where(keep, scores, -1e9)
    e = jnp.exp(scores - scores.max(-1, keepdims=True))
    return jnp.where((text > 0)[:, None, :, None], e / e.sum(-1, keepdims=True), 0)


def weights_nan(scores, text, given):
    """Rows without keys are NaN, but those that are set to zero."""
    w = hidden(scores, text, -jnp.inf)
    return jnp.where((text == 0)[:, None, :, None], 0.0, w)


def weights_to_a_number(scores, text, given):
    return jnp.where(given[:, None, :, None], hidden(scores, text, -1e9), 0.1)


def weights_of_keys(scores, text, given):
    """Keys are set to zero, not rows: what is left does not sum to one."""
    return hidden(scores, text, -1e9) * (jnp.arange(S) > 1)


FOUND = (
    weights_of_flamingo,
    weights_times,
    weights_given,
    weights_of_both,
    weights_of_heads,
    weights_from,
    weights_of_causal,
    weights_added,
    weights_by_hand,
)
OTHERS = weights_padded, weights_nan, weights_to_a_number, weights_of_keys


def step(weights: Any) -> Any:
    def attend(q, k, v, text, given):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * 0.5
        return jnp.einsum("bnts,bsnh->btnh", weights(scores, text, given), v)

    def loss(q, k, v, text, given, up):
        out = jax.checkpoint(attend)(q, k, v, text, given)
        return (out * up).sum(), out

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)


def results(fn: Any, dtype: Any) -> list[np.ndarray]:
    q, k, v, up = (jnp.asarray(x, dtype) for x in (Q, K, V, UP))
    made = fn(q, k, v, TEXT, GIVEN, up)
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(made)]


@pytest.mark.parametrize("weights", [*FOUND, *OTHERS])
def test_values_and_gradients(weights: Any) -> None:
    fn = step(weights)
    fast = rewriter.optimize(fn, implementation=FORCED)
    report = fast.report(Q, K, V, TEXT, GIVEN, UP)
    if weights in FOUND:
        (site,) = report.sites
        assert (site.op, site.kernel) == ("attention", "memory_bounded")
        assert site.backward
    got = results(fast, jnp.float32)
    with jax.enable_x64(True):
        want = results(jax.jit(fn), jnp.float64)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
