"""Norms as wide as the heads of attention: scores are scaled by the root of a width.

The square of that root is the width but for rounding. It must not be taken for it where
a program asks which of the two is greater.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter

RANDOM = np.random.default_rng(0)
FORCED = dict.fromkeys(("layer_norm", "attention"), "memory_bounded")


def normal(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


def norm(x: Any) -> Any:
    """A layer norm whose variance is NumPy's: it asks whether the width is above 0."""
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def one_head(x: Any, w: Any) -> Any:
    """An attention of one head, with norms around."""
    h = norm(x)
    s = jax.nn.softmax(h @ (h @ w).mT / np.sqrt(h.shape[-1]).astype(np.float32))
    x = x + s @ h
    return x + jax.nn.relu(norm(x) @ w)


def of_sets(x: Any, w: Any) -> Any:
    """A block of a set transformer: heads lie in the batch, scaled by all columns."""
    split = lambda z: jnp.concatenate(jnp.split(z, 4, -1), 0)
    q, k, v = split(x[:, :3] @ w), split(x @ w), split(x @ w.T)
    s = jax.nn.softmax(q @ k.mT / np.sqrt(x.shape[-1]).astype(np.float32))
    h = norm(jnp.concatenate(jnp.split(q + s @ v, 4, 0), -1))
    return norm(h + jax.nn.relu(h @ w))


def error(f: Callable[..., Any], x: Any, w: Any) -> float:
    """How far gradients are from those in 64 bits, relatively."""
    loss = lambda f: jax.grad(lambda *a: jnp.sin(f(*a)).sum(), (0, 1))
    got = rewriter.optimize(loss(f), implementation=FORCED)(x, w)
    with jax.enable_x64(True):
        want = loss(f)(*(jnp.asarray(a, jnp.float64) for a in (x, w)))
    return max(
        float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(b))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    )


def counts(f: Callable[..., Any], x: Any, w: Any) -> tuple[int, int]:
    found = rewriter.explain(f, implementation=FORCED)(x, w).counts()
    return found["attention"], found["layer_norm"]


@pytest.mark.parametrize("program", [one_head, of_sets])
def test_norm_as_wide_as_heads_is_found_with_gradients(program: Any) -> None:
    x, w = normal(2, 16, 32), normal(32, 32) / 6
    assert counts(program, x, w) == (1, 2)
    assert error(program, x, w) < 1e-5


@pytest.mark.once
@pytest.mark.parametrize("program", [one_head, of_sets])
@pytest.mark.parametrize("width", [8, 12, 20, 40, 48, 128])
def test_norms_of_other_widths(program: Any, width: int) -> None:
    x, w = normal(2, 9, width), normal(width, width) / np.float32(width) ** 0.5
    assert counts(program, x, w) == (1, 2)
    assert error(program, x, w) < 1e-5


@pytest.mark.parametrize("compare", ["gt", "ge", "lt", "le", "eq", "ne"])
def test_square_of_a_root_is_compared_as_the_program_computes_it(compare: str) -> None:
    """Whether it is the width is a question of its last bit."""
    root = np.sqrt(np.float32(32))
    assert root * root != 32
    test = getattr(jax.lax, compare)

    def program(x: Any, w: Any) -> Any:
        scores = (x @ w) @ x.mT / root
        hidden = test(jnp.sqrt(x.shape[-1] * 1.0) ** 2, jnp.float32(32.0))
        return jax.nn.softmax(jnp.where(hidden, scores, scores * 3)) @ x

    x, w = normal(2, 16, 32), normal(32, 32) / 6
    got = rewriter.optimize(program, implementation=FORCED)(x, w)
    np.testing.assert_allclose(got, jax.jit(program)(x, w), rtol=1e-4, atol=1e-5)
