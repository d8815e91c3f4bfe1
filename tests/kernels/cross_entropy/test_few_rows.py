"""Losses of at most as many rows as columns on a CPU, with gradients against float64.

Their logits lie where the gradient of the weights will be, chunk by chunk of classes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rewriter
from rewriter.kernels.linear_cross_entropy import chunks, xla

ROWS, WIDTH, CLASSES = 24, 32, 77
DRAW = np.random.default_rng(0)
X, W, B = (DRAW.normal(size=s) for s in ((ROWS, WIDTH), (WIDTH, CLASSES), (CLASSES,)))
LABELS = jnp.asarray(DRAW.integers(0, CLASSES, ROWS), jnp.int32)
SEEN = jnp.asarray(DRAW.random(ROWS) > 0.4)
HIDDEN = jnp.arange(CLASSES) % 5 == 3


def each(y: Any, labels: Any) -> Any:
    logs = jax.nn.log_softmax(y)
    return -jnp.take_along_axis(logs, labels[:, None], -1)[:, 0]


def with_z_loss(x: Any, w: Any, b: Any) -> Any:
    y = x @ w + b
    return (each(y, LABELS) + 1e-2 * jax.nn.logsumexp(y, -1) ** 2).mean()


def with_smooth_labels(x: Any, w: Any, b: Any) -> Any:
    smooth = optax.smooth_labels(jax.nn.one_hot(LABELS, CLASSES), 0.1)
    return optax.softmax_cross_entropy(x @ w + b, smooth).mean()


def with_labels_outside(x: Any, w: Any, b: Any) -> Any:
    labels = jnp.where(SEEN, LABELS, -1)
    entropy = optax.softmax_cross_entropy_with_integer_labels
    return entropy(x @ w + b, labels).mean(where=SEEN)


LOSSES: dict[str, Any] = {
    "plain": lambda x, w, b: each(x @ w, LABELS).mean(),
    "a bias": lambda x, w, b: each(x @ w + b, LABELS).mean(),
    "a scale": lambda x, w, b: each(0.3 * (x @ w) + b, LABELS).mean(),
    "a soft cap": lambda x, w, b: each(5 * jnp.tanh((x @ w) / 5), LABELS).mean(),
    "z-loss": with_z_loss,
    "smooth labels": with_smooth_labels,
    "ignored": lambda x, w, b: jnp.where(SEEN, each(x @ w, LABELS), 0).sum(),
    "all ignored": lambda x, w, b: jnp.where(
        SEEN & ~SEEN, each(x @ w, LABELS), 0
    ).sum(),
    "weights": lambda x, w, b: (each(x @ w + b, LABELS) * jnp.arange(ROWS)).sum(),
    "large logits": lambda x, w, b: each(300 * (x @ w), LABELS).mean(),
    "infinite biases": lambda x, w, b: each(
        x @ w + b + jnp.where(HIDDEN, -jnp.inf, 0), jnp.where(HIDDEN[LABELS], 0, LABELS)
    ).mean(),
    "labels outside": with_labels_outside,
    "shifted": lambda x, w, b: each((x @ w)[:-1], LABELS[1:]).mean(),
    "one row": lambda x, w, b: each(x[:1] @ w + b, LABELS[:1]).mean(),
}


@pytest.mark.parametrize(
    "name",
    [n if n == "z-loss" else pytest.param(n, marks=pytest.mark.once) for n in LOSSES],
)
def test_values_and_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five chunks of 16 classes, of which the last has 13."""
    small = dataclasses.replace(chunks.DEFAULT, passing=2 * ROWS * 16)
    monkeypatch.setattr(chunks, "NARROW", 16)
    monkeypatch.setattr(chunks, "DEFAULT", small)
    both = jax.value_and_grad(LOSSES[name], (0, 1, 2))
    forced = {"linear_cross_entropy": "memory_bounded"}
    fast = rewriter.optimize(both, implementation=forced)
    narrow = [jnp.asarray(a, jnp.float32) for a in (X, W, B)]
    found, written = fast(*narrow), jax.jit(both)(*narrow)
    counts = fast.report(*narrow).counts()
    assert counts["linear_cross_entropy"] + counts["cross_entropy"] == 1
    with jax.enable_x64(True):
        exact = jax.jit(both)(*(jnp.asarray(a, jnp.float64) for a in (X, W, B)))
    for got, old, want in zip(
        *map(jax.tree.leaves, (found, written, exact)), strict=True
    ):
        got, old, want = (np.asarray(a, np.float64) for a in (got, old, want))
        size = np.abs(want).max() + 1e-30
        off = np.abs(got - want).max() / size
        assert off <= 2 * np.abs(old - want).max() / size + 2e-7


def test_only_few_rows_of_one_float_lie_there(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    inner = xla._by_classes
    monkeypatch.setattr(xla, "_by_classes", lambda *a: used.append(1) or inner(*a))
    forced = {"linear_cross_entropy": "memory_bounded"}

    def lowered(rows: int, dtype: str) -> int:
        used.clear()
        shapes = (rows, 48), (48, 512)
        x, w = (jax.ShapeDtypeStruct(s, dtype) for s in shapes)
        labels = jnp.asarray(DRAW.integers(0, 512, rows), jnp.int32)
        loss = lambda x, w: each(x @ w, labels).mean()
        fast = rewriter.optimize(
            jax.value_and_grad(loss, (0, 1)), implementation=forced
        )
        fast.lower(x, w)
        return len(used)

    assert lowered(40, "float32") == lowered(48, "float32") == 1
    assert not lowered(49, "float32")
    assert not lowered(40, "bfloat16")
