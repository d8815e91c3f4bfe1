"""Sums over rows that make up one loss are joined, if they are of the same logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rewriter.program.equations import live
from rewriter.program.prepare.joined_losses import join

pytestmark = pytest.mark.once

DRAW = np.random.default_rng(0)
X, U = DRAW.normal(size=(2, 3, 5, 4)).astype(np.float32)
W = DRAW.normal(size=(4, 6)).astype(np.float32)
KEEP = DRAW.random((3, 5)) < 0.6


def a(y: Any) -> Any:
    return jnp.log(jnp.exp(y).sum(-1))


def b(y: Any) -> Any:
    return a(y) ** 2 - y[..., 0]


def masked(v: Any, keep: Any) -> Any:
    return jnp.where(keep, v, 0).sum() / keep.sum()


JOINED: dict[str, Callable[..., Any]] = {
    "means": lambda y, u, m: a(y).mean() + 0.1 * b(y).mean(),
    "less": lambda y, u, m: a(y).mean() - b(y).mean() / 3,
    "minus": lambda y, u, m: -(a(y).mean() + 0.1 * b(y).mean()),
    "three": lambda y, u, m: a(y).mean() + 0.1 * b(y).mean() + y.max(-1).mean(),
    "and another": lambda y, u, m: a(y).mean() + 0.1 * b(y).mean() + (u**2).mean(),
    "masked": lambda y, u, m: masked(a(y), m) + 0.1 * masked(b(y), m),
    "weighted": lambda y, u, m: (
        (a(y) * m).sum() / m.sum() + 0.1 * ((b(y) * m).sum() / m.sum())
    ),
    "in another shape": lambda y, u, m: a(y)[..., None].mean() + 0.1 * b(y).mean(),
    "of a variable": lambda y, u, m: (a(y).sum() + b(y).sum()) * u[0, 0, 0],
}
LEFT: dict[str, Callable[..., Any]] = {
    "one sum": lambda y, u, m: a(y).mean(),
    "other logits": lambda y, u, m: a(y).mean() + a(u @ W).mean(),
    "other rows": lambda y, u, m: a(y).mean() + b(y[1:]).mean(),
    "other factors": lambda y, u, m: a(y).mean() + b(y).mean() * u[0, 0, 0],
    "other masks": lambda y, u, m: masked(a(y), m) + masked(b(y), ~m),
    "read elsewhere": lambda y, u, m: (s := b(y).mean()) * s + a(y).mean(),
    "returned": lambda y, u, m: ((s := b(y).mean()) + a(y).mean(), s),
    "in a function": lambda y, u, m: jnp.exp(a(y).mean()) + b(y).mean(),
}


def program(of_logits: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, u, m: of_logits(x @ W, u, m)


def sums(closed: Any) -> int:
    """How many sums over all rows there are that something reads."""
    eqns, _ = live(closed.eqns, closed.jaxpr.outvars)
    return sum(
        e.primitive.name == "reduce_sum"
        and e.outvars[0].aval.shape == ()
        and e.outvars[0].aval.dtype == np.float32
        for e in eqns
    )


@pytest.mark.parametrize("name", JOINED)
def test_sums_of_one_loss(name: str) -> None:
    fn = program(JOINED[name])
    before = jax.make_jaxpr(jax.value_and_grad(fn))(X, U, KEEP)
    after = join(before)
    assert after is not before
    assert sums(after) < sums(before)
    got = jax.core.eval_jaxpr(after.jaxpr, after.consts, X, U, KEEP)
    want = jax.value_and_grad(fn)(X, U, KEEP)
    for g, t in zip(got, want, strict=True):
        np.testing.assert_allclose(g, t, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LEFT)
def test_other_sums(name: str) -> None:
    before = jax.make_jaxpr(program(LEFT[name]))(X, U, KEEP)
    assert join(before) is before
