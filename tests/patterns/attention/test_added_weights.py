"""Values weighed by more than one softmax, as differential attention weighs them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter

pytestmark = pytest.mark.once

B, T, N, H = 2, 8, 2, 4
RANDOM = np.random.default_rng(0)
Q, K = (RANDOM.normal(size=(2, B, T, N, H)).astype(np.float32) for _ in range(2))
V = RANDOM.normal(size=(B, T, N, 2 * H)).astype(np.float32)
SHARE = np.float32(0.3)


def weights(q: Any, k: Any) -> Any:
    keep = jnp.tril(jnp.ones((T, T), bool))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * 0.5
    return jax.nn.softmax(jnp.where(keep, scores, -1e30))


def weigh(w: Any, v: Any) -> Any:
    return jnp.einsum("bnts,bsne->btne", w, v)


def of_two(q: Any, k: Any, v: Any, share: Any) -> Any:
    return weigh(weights(q[0], k[0]) - share * weights(q[1], k[1]), v)


def of_a_head(q: Any, k: Any, v: Any, share: Any) -> Any:
    shares = jnp.stack([share, 0.5])[:, None, None]
    return weigh(weights(q[0], k[0]) - shares * weights(q[1], k[1]), v)


def of_itself(q: Any, k: Any, v: Any, share: Any) -> Any:
    return weigh(weights(q[0], k[0]) + share * jnp.eye(T), v)


def apart(q: Any, k: Any, v: Any, share: Any) -> Any:
    first, second = (weigh(weights(q[i], k[i]), v) for i in range(2))
    return first - share * second


@pytest.mark.parametrize("differentiated", [False, True])
def test_the_report_says_what_to_write(differentiated: bool) -> None:
    fn = of_itself
    step = jax.grad(lambda *a: fn(*a).sum(), (0, 1, 2)) if differentiated else fn
    report = rewriter.explain(step)(Q, K, V, SHARE)
    assert not report.counts()["attention"]
    assert any("sum of a softmax and other weights" in str(m) for m in report.misses)
    assert "multiply each of them by the values" in str(report)


@pytest.mark.parametrize("fn", [apart, of_two, of_a_head])
def test_two_attentions_that_are_subtracted_are_found(fn: Any) -> None:
    step = jax.value_and_grad(lambda *a: (fn(*a) ** 2).sum(), (0, 1, 2, 3))
    fast = rewriter.optimize(step, implementation={"attention": "memory_bounded"})
    got = fast(Q, K, V, SHARE)
    assert fast.report().counts(backward=True)["attention"] == 2
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in (Q, K, V, SHARE)]
        want = jax.tree.map(np.asarray, step(*wide))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(a - b) <= 2e-6 * np.linalg.norm(b)
    np.testing.assert_allclose(of_two(Q, K, V, SHARE), apart(Q, K, V, SHARE), 1e-4)
