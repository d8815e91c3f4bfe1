"""Masks that hide a key twice, by fills of like size: causality, then padding.

A row whose keys are all hidden weighs those that are hidden once. So masks are no
condition there, and stay in the function of the scores, as the program computes it.
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

B, T, N, H = 2, 16, 2, 4
FORCED = dict.fromkeys(("attention", "scored_attention"), "memory_bounded")
LOW = float(jnp.finfo(jnp.float32).min)
RANDOM = np.random.default_rng(0)
Q, K, V = (RANDOM.normal(size=(B, T, N, H)).astype(np.float32) for _ in "qkv")
KEPT = np.array([[0] * 5 + [1] * 11, [1] * 16], np.int32)
"""The first sequence is padded on the left, so that its first rows see no key."""


def causal() -> Any:
    return jnp.tril(jnp.ones((T, T), bool))


def wide(kept: Any) -> Any:
    return kept[:, None, None]


def same(kept: Any) -> Any:
    return (kept[:, :, None] == kept[:, None])[:, None]


def added(kept: Any, fill: float) -> Any:
    return jnp.where(wide(kept) > 0, 0.0, fill)


TWICE: dict[str, Callable[[Any, Any], Any]] = {
    "chosen, added": lambda s, m: jnp.where(causal(), s, -1e9) + added(m, -1e9),
    "lowest": lambda s, m: jnp.where(causal(), s, LOW) + (1.0 - wide(m)) * LOW,
    "moderate": lambda s, m: jnp.where(causal(), s, -1e4) + (1.0 - wide(m)) * -1e4,
    "padding first": lambda s, m: (
        jnp.where(wide(m) > 0, s, -1e9) + jnp.where(causal(), 0.0, -1e9)
    ),
    "both added": lambda s, m: (
        s + added(m, -1e9) + jnp.where(causal(), 0.0, -1e9)
    ),
    "products": lambda s, m: (
        s * causal() - 1e10 * (1 - causal().astype("float32")) + (1 - wide(m)) * -1e9
    ),
    "segments": lambda s, m: jnp.where(same(m), s, -1e9) + added(m, -1e9),
    "a minimum": lambda s, m: jnp.minimum(
        jnp.where(causal(), s, -1e9), jnp.where(wide(m) > 0, 1e9, -1e10)
    ),
    "interleaved": lambda s, m: (
        jnp.where(causal(), s, -1e9)
        + added(jnp.stack([m[:, :8]] * 2, 2).reshape(B, T), -1e9)
    ),
    "repeated": lambda s, m: (
        jnp.where(causal(), s, -1e9) + added(jnp.repeat(m[:, ::2], 2, axis=1), -1e9)
    ),
}  # fmt: skip


def attention(hidden: Any, weigh: Any = jax.nn.softmax) -> Callable[..., Any]:
    def attend(q: Any, k: Any, v: Any, kept: Any) -> Any:
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5
        return jnp.einsum("bnts,bsnh->btnh", weigh(hidden(scores, kept)), v)

    return attend


def step_of(attend: Any) -> Any:
    places = np.arange(T, dtype=np.float32)[:, None, None]
    loss = lambda *given: (attend(*given) * places).sum() / 16
    return jax.value_and_grad(loss, (0, 1, 2))


@pytest.mark.parametrize("name", TWICE)
def test_rows_give_what_the_program_gives(name: str) -> None:
    """Also those that see no key; in float32, whose digits the fills take."""
    step = step_of(attention(TWICE[name]))
    fast = rewriter.optimize(step, implementation=FORCED)
    got = fast(Q, K, V, KEPT)
    (site,) = fast.report().sites
    assert site.form == "scored_attention"
    assert site.replaced
    assert site.backward
    want = jax.jit(step)(Q, K, V, KEPT)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def by_log_sum(scores: Any) -> Any:
    sums = jax.scipy.special.logsumexp(scores, axis=-1, keepdims=True)
    return jnp.exp(scores - sums)


@pytest.mark.parametrize("name", ["chosen, added", "a minimum"])
def test_a_logarithm_that_large_fills_take_is_not_read(name: str) -> None:
    """Weights of a row of fills then add up to the number of keys, not to 1."""
    f = attention(TWICE[name], by_log_sum)
    assert not rewriter.explain(f, implementation=FORCED)(Q, K, V, KEPT).sites


@pytest.mark.parametrize("fill", [-1e4, -jnp.inf])
def test_rows_without_keys_by_a_log_sum(fill: float) -> None:
    """The mean, up to the logarithm's digits, or NaN."""
    hide = lambda s, m: jnp.where(causal() & (wide(m) > 0), s, fill)
    f = attention(hide, by_log_sum)
    fast = rewriter.optimize(f, implementation=FORCED)
    got = fast(Q, K, V, KEPT)
    (site,) = fast.report().sites
    assert site.params["window"] == (None, 0)
    np.testing.assert_allclose(got, jax.jit(f)(Q, K, V, KEPT), rtol=1e-3, atol=1e-3)
