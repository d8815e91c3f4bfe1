"""Values of a backward pass that are gradients too, and that others are made from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from tests.support.programs import FORCED

RANDOM = np.random.default_rng(0)
Q, K, V = (RANDOM.normal(size=(2, 16, 1, 8)).astype("f4") for _ in range(3))
ROWS = np.where(RANDOM.random((2, 1, 16, 1)) < 0.6, 0, -30).astype("f4")

SCORES: dict[str, Callable[[Any], Any]] = {
    "plain": lambda s: s,
    "clipped": lambda s: jnp.clip(s, -10, 10),
    "capped": lambda s: 10 * jnp.tanh(s / 10),
    "bent": lambda s: s + 0.1 * jnp.sin(s),
}
WEIGHTS: dict[str, Callable[[Any], Any]] = {
    "one more": lambda e: e / (1.0 + e.sum(-1, keepdims=True)),
    "times an inverse": lambda e: e * (1.0 / (e.sum(-1, keepdims=True) + 1.0)),
    "three more": lambda e: e / (3.0 + e.sum(-1, keepdims=True)),
}


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("scores", SCORES)
def test_sums_that_cancel_are_no_step_to_gradients(scores: str, weights: str) -> None:
    """What is added to each row has a gradient, which is near that of the row's sum."""

    def attend(q: Any, k: Any, v: Any, rows: Any) -> Any:
        s = SCORES[scores](q.swapaxes(1, 2) @ k.transpose(0, 2, 3, 1)) + rows
        w = WEIGHTS[weights](jnp.exp(s))
        return (w @ v.swapaxes(1, 2)).swapaxes(1, 2)

    step = jax.grad(lambda *x: (attend(*x) * V).sum(), (0, 1, 2))
    forced = FORCED | {"scored_attention": "memory_bounded"}
    fast = rewriter.optimize(step, implementation=forced)
    given = Q, K, V, ROWS
    assert fast.report(*given).sites[0].replaced
    with jax.enable_x64(True):
        wanted = jax.device_get(step(*(np.asarray(x, "f8") for x in given)))
    for a, b in zip(fast(*given), wanted, strict=True):
        assert abs(np.asarray(a) - b).max() < 3e-6 * abs(b).max()
