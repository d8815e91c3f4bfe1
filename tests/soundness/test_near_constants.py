"""In float64, two constants that are 4e-7 apart are two: no proof takes them for one.

In float32 both are the same number. Each program has its constant twice, once a little
larger. Its result differs from that of equal constants by much more than rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter
from tests.soundness.passes import KERNELS

NEAR = 1 + 4e-7
DRAW = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return DRAW.normal(size=shape)


X, G, W, W2 = normal(8, 32), normal(32), normal(32, 24), normal(32, 24)
Q, K, V = (normal(1, 16, 2, 8) for _ in range(3))
ROWS = jnp.arange(8)


def scores(q: Any, k: Any) -> Any:
    return jnp.einsum("btnh,bsnh->bnts", q, k)


def mix(w: Any, v: Any) -> Any:
    return jnp.einsum("bnts,bsnh->btnh", w, v)


def total(e: Any) -> Any:
    return e.sum(-1, keepdims=True)


def mean(x: Any) -> Any:
    return x.mean(-1, keepdims=True)


def weights(q: Any, k: Any, c: float) -> Any:
    s = scores(q, k)
    return jnp.exp(0.35 * s) / total(jnp.exp(0.35 * c * s))


def slopes(q: Any, k: Any, v: Any, c: float) -> Any:
    apart = jnp.arange(16.0)[None, :] - jnp.arange(16.0)[:, None]
    slope = jnp.array([0.5, 0.5 * c])[:, None, None]
    return mix(jax.nn.softmax(scores(q, k) / 3 + slope * apart), v)


def positions(q: Any, k: Any, v: Any, c: float) -> Any:
    apart = 3.0 * jnp.arange(16.0)[:, None] - 3.0 * c * jnp.arange(16.0)[None, :]
    return mix(jax.nn.softmax(jnp.where(apart >= 0, scores(q, k) / 3, -1e9)), v)


def gelu(h: Any, c: float) -> Any:
    return 0.5 * h * (1 + jnp.tanh(0.7978845608028654 * c * (h + 0.044715 * h**3)))


def variance(x: Any, c: float) -> Any:
    return mean(x * x) - c * mean(x) ** 2


def loss(x: Any, w: Any, c: float) -> Any:
    logits = 0.5 * (x @ w)
    return jax.nn.logsumexp(logits, -1) - c * logits[ROWS, ROWS]


ATTENTION, NORM, UNIT = (Q, K, V), (X, G), (X, W, W2)
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "scales of a sum": (lambda c, q, k, v: mix(weights(q, k, c), v), ATTENTION),
    "scales of two sites": (
        lambda c, q, k, v: mix(jax.nn.softmax(scores(q, k) * 0.35 * c), v)
        - 0.5 * mix(jax.nn.softmax(scores(q, k) * 0.35), v),
        ATTENTION,
    ),
    "scales of two parts": (
        lambda c, q, k, v: mix(
            jax.nn.softmax(
                0.35 * scores(q[..., :4], k[..., :4])
                + 0.35 * c * scores(q[..., 4:], k[..., 4:])
            ),
            v,
        ),
        ATTENTION,
    ),
    "slopes of two heads": (lambda c, q, k, v: slopes(q, k, v, c), ATTENTION),
    "steps of positions": (lambda c, q, k, v: positions(q, k, v, c), ATTENTION),
    "a mean": (
        lambda c, x, g: (x - c * mean(x)) * lax.rsqrt(variance(x, 1.0) + 1e-6) * g,
        NORM,
    ),
    "a variance": (
        lambda c, x, g: (x - mean(x)) * lax.rsqrt(variance(x, c) + 1e-6) * g,
        NORM,
    ),
    "a mean square": (
        lambda c, x, g: c * x * lax.rsqrt(mean(x * x) + 1e-6) * g,
        NORM,
    ),
    "a sigmoid": (
        lambda c, x, w, w2: (x @ w) * jax.nn.sigmoid(c * (x @ w)) * (x @ w2),
        UNIT,
    ),
    "a gelu": (lambda c, x, w, w2: gelu(x @ w, c) * (x @ w2), UNIT),
    "a label": (lambda c, x, w, _: loss(x, w, c), UNIT),
    "an epsilon": (
        lambda c, x, g: x * lax.rsqrt(mean(x * x) + 1.5 * c) * g,
        NORM,
    ),
}  # fmt: skip


@pytest.mark.once
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_constant(name: str) -> None:
    f, args = PROGRAMS[name]
    with jax.enable_x64(True):
        fast = rewriter.optimize(lambda *a: f(NEAR, *a), implementation=KERNELS)
        plain = (jax.jit(lambda *a, c=c: f(c, *a)) for c in (NEAR, 1.0))
        got, want, equal = (np.asarray(g(*args)) for g in (fast, *plain))
    size = abs(want).max()
    assert abs(want - equal).max() > 1e-9 * size, "no constant counts"
    np.testing.assert_allclose(got, want, 1e-12, 1e-12 * size)


def test_a_constant() -> None:
    test_each_constant("scales of a sum")


@pytest.mark.parametrize("name", ["scales of a sum", "a mean", "a label"])
def test_equal_constants_are_found(name: str) -> None:
    f, args = PROGRAMS[name]
    with jax.enable_x64(True):
        report = rewriter.explain(lambda *a: f(1.0, *a), implementation=KERNELS)(*args)
    assert any(s.replaced for s in report.sites)
