"""Sums over rows and classes that are no loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import rewriter
from tests.patterns.cross_entropy.pieces import (
    BIAS,
    LABELS,
    V,
    W,
    X,
)

TOTALS = {
    "soft": lambda y: (jax.nn.softmax(y[::-1]) * jax.nn.log_softmax(y)).sum(),
    "weighted classes": lambda y: (
        jax.nn.one_hot(LABELS, V) * jnp.arange(V) * jax.nn.log_softmax(y)
    ).sum(),
    "over positions": lambda y: (
        jax.nn.one_hot(LABELS, V) * jax.nn.log_softmax(y, axis=1)
    ).sum(),
    "squared": lambda y: (
        jax.nn.one_hot(LABELS, V) * jnp.square(jax.nn.log_softmax(y))
    ).sum(),
    "of probabilities": lambda y: (jax.nn.one_hot(LABELS, V) * jax.nn.softmax(y)).sum(),
    "log-sum-exps": lambda y: jax.nn.log_softmax(y).sum(),
    "two labels": lambda y: (
        (jax.nn.one_hot(LABELS, V) + jax.nn.one_hot(LABELS[::-1], V))
        * jax.nn.log_softmax(y)
    ).sum(),
}


@pytest.mark.once
@pytest.mark.parametrize("name", TOTALS)
def test_other_totals_are_left_alone(name: str) -> None:
    total = lambda x, w, bias: TOTALS[name](x @ w + bias)
    report = rewriter.explain(total)(X, W, BIAS)
    assert not any(s.op.endswith("cross_entropy") for s in report.sites)
    assert report.after is report.before
