"""Losses with a library's own rule for derivatives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from tests.patterns.cross_entropy.pieces import (
    BIAS,
    FORCED,
    IGNORED,
    LABELS,
    V,
    W,
    X,
    flattened,
    ruled_forward,
    with_rule,
)


@pytest.mark.once
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_a_rule_for_labels_that_are_no_class(z_loss: float) -> None:
    """Such a label has no loss, and by the rule still moves its logits."""

    def loss(x, w, bias):
        losses = with_rule(x @ w + bias, jax.nn.one_hot(IGNORED, V), z_loss)
        return losses.sum(), losses

    taken = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    fast = rewriter.optimize(taken, implementation=FORCED)
    (site,) = fast.report(X, W, BIAS).sites
    assert site.backward
    assert site.params["whole_slopes"]
    for got, want in zip(
        jax.tree.leaves(fast(X, W, BIAS)),
        jax.tree.leaves(jax.jit(taken)(X, W, BIAS)),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)

    def ignored(x, w, bias):
        logs = jax.nn.log_softmax(x @ w + bias)
        return -(jax.nn.one_hot(IGNORED, V) * logs).sum(-1).mean()

    plain = rewriter.explain(flattened(ignored))(X, W, BIAS)
    assert not dict(plain.sites[0].params).get("whole_slopes")


@pytest.mark.once
@pytest.mark.parametrize("wrong", ["sign", "scale", "no targets", "other exponentials"])
def test_other_rules_are_no_gradients(wrong: str) -> None:
    def rule(saved, g):
        targets, z_loss, exponentials, total, logs, log_z = saved
        if wrong == "other exponentials":
            total = total + 1
        own = (1 + 2 * z_loss * log_z)[..., None] * exponentials / total
        own = own if wrong == "no targets" else own - targets
        own = {"sign": -own, "scale": 1.01 * own}.get(wrong, own)
        return g[..., None] * own, -g[..., None] * logs, jnp.zeros(())

    other = jax.custom_vjp(lambda *given: ruled_forward(*given)[0])
    other.defvjp(ruled_forward, rule)
    hot = jax.nn.one_hot(LABELS, V)
    loss = lambda x, w, bias: other(x @ w + bias, hot, 1e-2).mean()
    taken = flattened(loss)
    report = rewriter.explain(taken)(X, W, BIAS)
    assert report.counts(backward=True)["linear_cross_entropy"] == 0
    got = rewriter.optimize(taken, implementation=FORCED)(X, W, BIAS)
    for g, t in zip(
        *map(jax.tree.leaves, (got, jax.jit(taken)(X, W, BIAS))), strict=True
    ):
        np.testing.assert_allclose(g, t, rtol=1e-4, atol=1e-5)
