"""Losses over the vocabularies of public models, against float64.

Seven vocabularies, six kinds of rows and five spellings: 210 cases, each with its
gradients of rows, weights and biases.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rewriter

VOCABULARIES = (1000, 30522, 32000, 50257, 128256, 151936, 256000)
IGNORED = -100
K = 4
HIDDEN = slice(3, 900, 7)
LOSS = "linear_cross_entropy", True
FORCED = {"linear_cross_entropy": "memory_bounded"}
ROWS = {
    "plain": lambda x, labels, bias: (x, labels, bias),
    "ignored": lambda x, labels, bias: (x, labels.at[1::2].set(IGNORED), bias),
    "all ignored": lambda x, labels, bias: (x, jnp.full_like(labels, IGNORED), bias),
    "one row": lambda x, labels, bias: (x[:1], labels[:1], bias),
    "large logits": lambda x, labels, bias: (x * 1000, labels, bias),
    "biases of -inf": lambda x, labels, bias: (
        x, labels, bias.at[HIDDEN].set(-jnp.inf)
    ),
}  # fmt: skip


def mean(each: Any, labels: Any) -> Any:
    """Over rows that are not ignored; 0 if all are."""
    seen = labels != IGNORED
    return jnp.where(seen, each, 0).sum() / jnp.maximum(seen.sum(), 1)


def taken(x: Any, w: Any, bias: Any, labels: Any) -> Any:
    logs = jax.nn.log_softmax(x @ w + bias)
    safe = jnp.where(labels == IGNORED, 0, labels)
    return mean(-jnp.take_along_axis(logs, safe[:, None], 1)[:, 0], labels)


def by_optax(x: Any, w: Any, bias: Any, labels: Any) -> Any:
    safe = jnp.maximum(labels, 0)
    each = optax.softmax_cross_entropy_with_integer_labels(x @ w + bias, safe)
    return mean(each, labels)


def tied(x: Any, w: Any, bias: Any, labels: Any) -> Any:
    y = jnp.einsum("nk,vk->nv", x, w.T) + bias
    own = jnp.take_along_axis(y, jnp.maximum(labels, 0)[:, None], 1)[:, 0]
    return mean(jax.nn.logsumexp(y, 1) - own, labels)


def with_z_loss(x: Any, w: Any, bias: Any, labels: Any) -> Any:
    y = x @ w + bias
    lse = jax.nn.logsumexp(y, 1)
    own = jnp.take_along_axis(y, jnp.maximum(labels, 0)[:, None], 1)[:, 0]
    return mean(lse - own + 1e-3 * lse**2, labels)


def of_two_labels(x: Any, w: Any, bias: Any, labels: Any) -> Any:
    y, safe = x @ w + bias, jnp.maximum(labels, 0)
    each = optax.softmax_cross_entropy_with_integer_labels
    return mean(0.3 * each(y, safe) + 0.7 * each(y, safe[::-1]), labels)


def drawn(v: int, rows: str) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(v), 4)
    x = jax.random.normal(keys[0], (6, K))
    w = jax.random.normal(keys[1], (K, v))
    labels = jax.random.randint(keys[2], (6,), 0, v - 1000 + 1) + 999  # seen classes
    x, labels, bias = ROWS[rows](x, labels, jax.random.normal(keys[3], (v,)))
    return x, w, bias, labels


CASES = [
    pytest.param(v, loss, marks=() if v == 1000 and loss is taken else pytest.mark.once)
    for v in VOCABULARIES
    for loss in (taken, by_optax, tied, with_z_loss, of_two_labels)
]


@pytest.mark.parametrize(("v", "loss"), CASES)
def test_values_and_gradients(v: int, loss: Any) -> None:
    """They are as near to float64 as those of the program as written."""
    both = jax.value_and_grad(loss, (0, 1, 2))
    fast = rewriter.optimize(both, implementation=FORCED)
    plain = jax.jit(both)
    for rows in ROWS:
        args = drawn(v, rows)
        sites = fast.report(*args).sites
        assert [(s.op, s.backward) for s in sites] == [LOSS], rows
        with jax.enable_x64(True):
            wide = [np.asarray(a, "f8") for a in args[:3]]
            exact = jax.tree.map(np.asarray, plain(*wide, np.asarray(args[3])))
        written, rewritten = off(plain(*args), exact), off(fast(*args), exact)
        assert max(rewritten) < 1e-3, rows
        for own, other in zip(rewritten, written, strict=True):
            assert own <= max(2 * other, 5e-6), (rows, own, other)


def off(found: Any, exact: Any) -> list[float]:
    """The largest error of each array, as a part of its largest number."""
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    pairs = [(np.asarray(a, "f8"), b) for a, b in leaves]
    return [float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-9)) for a, b in pairs]


@pytest.mark.once
def test_a_vocabulary_of_one_class_is_left_as_written() -> None:
    """No index tells its one entry from what is outside."""

    def loss(x, w, labels):
        y = x @ w
        return jax.nn.logsumexp(y, -1) - jnp.take_along_axis(y, labels[:, None], -1)

    given = np.ones((8, 4), "f4"), np.ones((4, 1), "f4"), np.zeros(8, "int32")
    fast = rewriter.optimize(loss, strict=True)
    np.testing.assert_array_equal(fast(*given), jax.jit(loss)(*given))
