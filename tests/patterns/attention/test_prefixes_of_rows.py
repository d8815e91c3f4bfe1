"""Prefixes that only some sequences have, and triangles that are float constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter

pytestmark = pytest.mark.once

B, T, N, H = 3, 16, 2, 4
RANDOM = np.random.default_rng(0)
Q, K, V = (RANDOM.normal(size=(B, T, N, H)).astype(np.float32) for _ in "qkv")
ENDS = np.array([5, 7, 16], np.int32)
SOME = np.array([True, False, True])
FORCED = {"attention": "memory_bounded"}
TRIANGLE = np.tril(np.ones((1, T, T), np.float32))
Keep = Callable[[Any, Any], Any]


def causal() -> Any:
    return jnp.tril(jnp.ones((T, T), bool))


def before(ends: Any) -> Any:
    return jnp.arange(T) < ends[:, None, None]


def rows(some: Any) -> Any:
    return some[:, None, None]


PREFIXES: dict[str, Keep] = {
    "chosen": lambda n, f: jnp.where(rows(f), causal() | before(n), causal()),
    "and": lambda n, f: causal() | (rows(f) & before(n)),
    "not": lambda n, f: causal() | (~rows(f) & before(n)),
    "two": lambda n, f: causal() | (rows(f) & rows(f[::-1]) & before(n)),
    "a kind": lambda n, f: causal() | ((rows(n) > 6) & before(n)),
    "all keys": lambda n, f: rows(f) | causal(),
    "all keys, chosen": lambda n, f: jnp.where(rows(f), True, causal()),
    "and lengths": lambda n, f: (causal() | (rows(f) & before(n))) & before(n + 3),
}
LOOK_ALIKES: dict[str, Keep] = {
    "later keys": lambda n, f: causal() | (rows(f) & ~before(n)),
    "queries": lambda n, f: causal() | (jnp.arange(T)[:, None] < rows(n)),
    "not causal there": lambda n, f: jnp.where(rows(f), causal(), before(n)),
}
TRIANGLES: dict[str, Keep] = {
    "not zero": lambda n, f: before(n) * TRIANGLE != 0,
    "cast": lambda n, f: before(n).astype("float32") * TRIANGLE != 0,
    "above": lambda n, f: before(n) * TRIANGLE > 0.5,
    "as booleans": lambda n, f: (before(n) * TRIANGLE).astype(bool),
}


def step_of(keep: Keep) -> Any:
    """Gradients of a layer under a checkpoint, with the mask made outside."""

    def loss(q: Any, k: Any, v: Any, ends: Any, some: Any) -> Any:
        seen = keep(ends, some)[:, None]

        def layer(q: Any, k: Any, v: Any) -> Any:
            scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 2
            weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
            return jnp.einsum("bnts,bsnh->btnh", weights, v)

        return (jax.checkpoint(layer)(q, k, v) ** 2).sum()

    return jax.value_and_grad(loss, (0, 1, 2))


def read(keep: Keep) -> Any:
    """The site, after numbers are compared with a float64 run."""
    step = step_of(keep)
    fast = rewriter.optimize(step, implementation=FORCED)
    got = fast(Q, K, V, ENDS, SOME)
    with jax.enable_x64(True):
        wide = (x.astype(np.float64) for x in (Q, K, V))
        want = jax.tree.map(np.asarray, step(*wide, ENDS, SOME))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    (site,) = fast.report().sites
    assert site.replaced
    assert site.backward
    return site


@pytest.mark.parametrize("name", PREFIXES)
def test_a_prefix_that_some_sequences_have(name: str) -> None:
    site = read(PREFIXES[name])
    assert "prefix i32[3]" in site.shapes
    assert "mask" not in site.shapes


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_other_choices_by_sequence_stay_masks(name: str) -> None:
    assert "mask bool[3,1,16,16]" in read(LOOK_ALIKES[name]).shapes


@pytest.mark.parametrize("name", TRIANGLES)
def test_a_float_triangle_is_causal(name: str) -> None:
    site = read(TRIANGLES[name])
    assert site.params["window"] == (None, 0)
    assert "[3,1,16,16]" not in site.shapes
