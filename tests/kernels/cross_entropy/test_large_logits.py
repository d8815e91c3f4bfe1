"""Losses of large logits are as near to float64 as those of small ones.

Logits are exact in float32: all that is off is due to the loss. A log-sum-exp in one
number would be off by 4e-3 where logits are about 1e5, and so would its weights.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.linear_cross_entropy import chunks as of_chunks
from rewriter.ops.registry import registry
from rewriter.site import site
from tests.kernels.cross_entropy.test_hopper import HOPPER, on_the_simulator

ROWS, K, CLASSES = 6, 4, 24
DRAW = np.random.default_rng(8)
SIZES = (0, 1e2, 1e3, 1e5, -1e5)
X = DRAW.integers(-3, 4, (ROWS, K)).astype("f4")
LABELS = DRAW.integers(0, 20, ROWS).astype("i4")
SETTINGS = (
    {"of_log_probabilities": True},
    {"outside": "zero", "label_smoothing": 0.1, "z_loss": 1e-9},
    {"used": 20, "outside": "clip"},
)
CHUNKS = {
    "all at once": of_chunks.Chunk(1 << 20),
    "some classes": of_chunks.Chunk(4 * 4 * 8, least=4),
    "padded": of_chunks.Chunk(4 * 4 * 7, 4, False, 5, True),
    "in place": of_chunks.Chunk(9 * 4 * 4, least=4, beside=1),
}
MEMORY = (("default", "memory_bounded"),)


def weights(classes: int) -> np.ndarray:
    """Weights in quarters, so that products with `X` are exact."""
    return (DRAW.integers(-4, 5, (K, classes)) / 4).astype("f4")


def both(op: str, operands: dict[str, Any], how: dict[str, Any], forced: Any) -> Any:
    """Losses and gradients of a kernel, and by the reference in float64."""
    labels = operands.pop("labels")
    up = jnp.linspace(0.5, 1.5, labels.shape[0], dtype=jnp.float32)
    bound = lambda own: site.bind(
        registry().op(op), {**own, "labels": labels}, how, forced
    )
    out, back = jax.vjp(bound, jax.tree.map(jnp.asarray, operands))
    got = out, back(up)[0]
    with jax.enable_x64(True):
        wide = {n: jnp.asarray(a, jnp.float64) for n, a in operands.items()}
        exact = lambda own: registry().op(op).reference(**own, labels=labels, **how)
        out, back = jax.vjp(exact, wide)
        return got, jax.tree.map(np.asarray, (out, back(up.astype("f8"))[0]))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", SETTINGS, ids=["plain", "terms", "fewer"])
def test_given_logits(how: dict[str, Any], size: float) -> None:
    logits = X @ weights(CLASSES) + np.float32(size)
    got, want = both("cross_entropy", {"logits": logits, "labels": LABELS}, how, MEMORY)
    near(got, want)


@pytest.mark.parametrize("config", CHUNKS)
@pytest.mark.parametrize("how", SETTINGS, ids=["plain", "terms", "fewer"])
def test_logits_of_a_product(how, config, monkeypatch) -> None:
    """Small logits with a cap, and large ones by their bias."""
    monkeypatch.setattr(of_chunks, "DEFAULT", CHUNKS[config])
    for size, cap in ((0.0, 4.0), (1e3, 0.0), (1e5, 0.0)):
        bias = np.full(CLASSES, size, "f4")
        own = {"x": X, "w": weights(CLASSES), "bias": bias, "labels": LABELS}
        got, want = both("linear_cross_entropy", own, {**how, "soft_cap": cap}, MEMORY)
        near(got, want)


@pytest.mark.parametrize("how", SETTINGS[:2], ids=["plain", "terms"])
def test_hopper_simulated(how: dict[str, Any], monkeypatch) -> None:
    """By a last column of large numbers, logits are about 8,000."""
    on_the_simulator(monkeypatch)
    w = np.concatenate([weights(1032), np.full((1, 1032), 4096.0, "f4")])
    x = np.concatenate([X, np.full((ROWS, 1), 2.0, "f4")], 1)
    own = {"x": x, "w": w, "labels": LABELS}
    got, want = both("linear_cross_entropy", own, how, HOPPER)
    for _, grads in (got, want):
        grads["x"] = grads["x"][:, :-1]  # the last is 4096 times what cancels
    near(got, want)


def near(got: Any, want: Any) -> None:
    """Each number is, beside the largest of its array."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        error = abs(np.asarray(g, "f8") - w).max()
        assert error <= 3e-6 * abs(w).max(), error / abs(w).max()


@pytest.mark.parametrize("factor", [1e10, 1e20, 1e30])
def test_large_products_are_rounded_before_the_largest_is_subtracted(
    factor: float,
) -> None:
    """XLA may fuse both, and then the exponential of the largest is not 1."""
    y = np.random.default_rng(0).normal(size=(4, 33)).astype("f4")
    labels = np.arange(4) * 8

    def loss(y: jax.Array, labels: jax.Array) -> jax.Array:
        logs = jax.nn.log_softmax(y * factor, -1)
        return -jnp.take_along_axis(logs, labels[:, None], -1)[:, 0]

    forced = {"cross_entropy": "memory_bounded"}
    fast = rewriter.optimize(loss, implementation=forced, strict=True)
    scaled = (y * np.float32(factor)).astype("f8")
    want = scaled.max(-1) - scaled[np.arange(4), labels]
    np.testing.assert_allclose(jax.jit(fast)(y, labels), want, 1e-5)
    slopes = jax.jit(jax.grad(lambda y: fast(y, labels).sum()))(y)
    hot = lambda i: np.eye(33)[i]
    np.testing.assert_allclose(slopes, factor * (hot(y.argmax(-1)) - hot(labels)), 1e-5)
