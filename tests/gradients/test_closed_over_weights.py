"""Gradients of programs whose weights are constants, as those of frozen models are."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np

import rewriter
from tests.support.programs import attention, rms_norm

DRAW = np.random.default_rng(0)
WEIGHTS = [jnp.asarray(DRAW.normal(0, 0.2, (16, 16)), jnp.float32) for _ in range(6)]
SCALE = jnp.asarray(DRAW.normal(1, 0.1, 16), jnp.float32)
X = jnp.asarray(DRAW.normal(0, 1, (2, 8, 16)), jnp.float32)
FORCED = dict.fromkeys(("attention", "rms_norm", "gated_linear_unit"), "memory_bounded")


def layer(x):
    q, k, v, out, gate, up = WEIGHTS
    h = rms_norm(x, SCALE)
    heads = [(h @ w).reshape(2, 8, 2, 8) for w in (q, k, v)]
    x = x + attention(*heads).reshape(x.shape) @ out
    h = rms_norm(x, SCALE)
    return x + jax.nn.silu(h @ gate) * (h @ up)


def model(x):
    return rms_norm(layer(x), SCALE).sum()


def test_numbers():
    got = rewriter.optimize(jax.grad(model), implementation=FORCED)(X)
    np.testing.assert_allclose(got, jax.grad(model)(X), rtol=1e-4, atol=1e-4)


def test_earlier_layers_are_not_looked_at():
    """It took minutes when values behind constant weights had normal forms."""
    start = time.process_time()
    sites = rewriter.explain(jax.grad(model), implementation=FORCED)(X).sites
    assert time.process_time() - start < 10
    assert [s.op for s in sites] == [
        "rms_norm", "attention", "rms_norm", "gated_linear_unit", "rms_norm"
    ]  # fmt: skip
    assert all(s.backward for s in sites)
