"""Stored matrices behind barriers of several arrays, as checkpoints make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter

DRAWS = np.random.default_rng(0)
X = DRAWS.normal(size=(16, 64)).astype("f4")
W = DRAWS.integers(-100, 100, (64, 128)).astype("i1")
S = DRAWS.uniform(0.01, 0.02, 128).astype("f4")
FORCED = {"quantized_dot": "memory_bounded"}


def widened(w: Any, s: Any) -> Any:
    return w.astype(jnp.float32) * s


def all_arguments(x, w, s):
    x, w, s = lax.optimization_barrier((x, w, s))
    return x @ widened(w, s)


def behind_the_cast(x, w, s):
    w, s = lax.optimization_barrier((w.astype(jnp.float32), s))
    return x @ (w * s)


def scales_first(x, w, s):
    s, w = lax.optimization_barrier((s, w))
    return x @ widened(w, s)


def two_barriers(x, w, s):
    w, s = lax.optimization_barrier((w, s))
    s, w = lax.optimization_barrier((s, w.T))
    return x @ widened(w.T, s)


def gradient_of_a_checkpoint(x, w, s):
    layer = jax.checkpoint(lambda x, w, s: jnp.tanh(x @ widened(w, s)))
    return jax.grad(lambda x: jnp.square(layer(x, w, s)).sum())(x)


def cache(x, w, s):
    """Keys in few bits, of which a joint barrier makes new values."""
    x, k, v = lax.optimization_barrier((x, w.astype(jnp.float16) / 128, w * s))
    p = jnp.exp(x @ k.astype(jnp.float32) - 9)
    return p @ v.T


FOUND = (
    all_arguments, behind_the_cast, scales_first, two_barriers,
    gradient_of_a_checkpoint,
)  # fmt: skip


@pytest.mark.once
@pytest.mark.parametrize("f", [*FOUND, cache], ids=lambda f: f.__name__)
def test_stored_matrices(f: Callable[..., Any]) -> None:
    fast = rewriter.optimize(f, implementation=FORCED)
    report = fast.report(X, W, S)
    assert not report.failures
    assert f is cache or any(site.replaced for site in report.sites)
    with jax.enable_x64(True):
        want = np.asarray(f(X.astype("f8"), W, S.astype("f8")))
    got = np.asarray(fast(X, W, S))
    np.testing.assert_allclose(got, want, 1e-3, 1e-4 * abs(want).max())
