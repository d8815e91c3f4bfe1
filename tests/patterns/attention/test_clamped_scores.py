"""Scores that are kept from falling below a number, as CLIP and OPT do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from tests.spellings.check import differs

pytestmark = pytest.mark.once

B, T, N, H = 2, 6, 2, 4
LEAST = np.finfo(np.float32).min
RANDOM = np.random.default_rng(0)
Q, K, V = RANDOM.normal(size=(3, B, T, N, H)).astype(np.float32)
PAD = np.arange(T) < np.array([[0], [4]])


def causal() -> Any:
    return jnp.tril(jnp.ones((T, T), bool))


def chosen(s: Any, keep: Any, least: float = LEAST) -> Any:
    return jnp.maximum(jnp.where(keep, s, least), least)


def added(s: Any, keep: Any, least: float = LEAST) -> Any:
    return jnp.maximum(s + jnp.where(keep, 0, least), least)


def attention(clamp: Any) -> Any:
    def fn(q: Any, k: Any, v: Any, pad: Any) -> Any:
        s = clamp(jnp.einsum("btnh,bsnh->bnts", q, k) * 0.5, pad[:, None, None])
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)

    return fn


KEPT = {
    "of a mask": lambda s, pad: chosen(s, causal()),
    "of padding": lambda s, pad: chosen(s, causal() & pad),
    "of no mask": lambda s, pad: jnp.maximum(s, LEAST),
    "before the mask": lambda s, pad: jnp.where(pad, jnp.maximum(s, LEAST), LEAST),
    "of an added mask": lambda s, pad: added(s, causal()),
    "from both sides": lambda s, pad: jnp.clip(chosen(s, pad), LEAST, -LEAST),
    "another number": lambda s, pad: chosen(s, causal(), -1e9),
}
HALVED = {
    "added padding": added,
    "two masks": lambda s, pad: added(s + jnp.where(causal(), 0, LEAST), pad),
    "another number": lambda s, pad: added(s, pad, -1e9),
}


def results(fn: Any, q: Any, k: Any) -> Any:
    out, pull = jax.vjp(lambda *x: fn(*x, PAD), q, k, V)
    return out, pull(jnp.ones_like(out))


@pytest.mark.parametrize("name", KEPT)
def test_a_clamp_needs_an_assumption(name):
    """It acts where a score is -inf; kernels would give NaN where all of a row are."""
    fn = attention(KEPT[name])
    report = rewriter.explain(fn)(Q, K, V, PAD)
    assert not report.sites
    assert "values assumed not to reach" in str(report)
    assert "assume=('finite',)" in str(report)
    new = rewriter.optimize(
        fn, implementation={"attention": "memory_bounded"}, assume=("finite",)
    )
    assert not differs(results(fn, Q, K), results(new, Q, K))
    assert new.report().sites[0].replaced


@pytest.mark.parametrize("name", HALVED)
def test_gradients_that_are_halved_are_refused(name):
    """A maximum of two equal numbers passes half a gradient, whatever is assumed."""
    fn = attention(HALVED[name])
    new = rewriter.optimize(
        fn, implementation={"attention": "reference"}, assume=("finite",)
    )
    assert not differs(results(fn, Q, K), results(new, Q, K))
    report = new.report()
    assert not report.sites
    assert "passes half of a gradient" in str(report)
    assert "jnp.where" in str(report)
