"""Losses of several terms, each a mean of its own: heads, z-losses and masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from tests import slow
from tests.patterns.cross_entropy.pieces import (
    BIAS,
    FORCED,
    KEEP,
    LABELS,
    V,
    W,
    X,
    flattened,
    integer_loss,
)

OTHER = np.roll(LABELS, 1, 1)
HEAD = np.cos(np.arange(W.size, dtype=np.float32)).reshape(W.shape)


def z_loss(y: Any) -> Any:
    return jax.nn.logsumexp(y, -1) ** 2


def one_hot(y: Any) -> Any:
    return -(jax.nn.one_hot(LABELS, V) * jax.nn.log_softmax(y)).sum(-1)


def picked(y: Any) -> Any:
    logs = jax.nn.log_softmax(y)
    return jnp.take_along_axis(logs, LABELS[..., None], -1)


def chosen(v: Any) -> Any:
    return jnp.where(KEEP > 0, v, 0).sum() / KEEP.sum()


def weighted(v: Any) -> Any:
    return (v * KEEP).sum() / jnp.maximum(KEEP.sum(), 1)


def two_heads(x: Any, w: Any, bias: Any) -> Any:
    first = integer_loss(x @ w + bias, LABELS).mean()
    return first + 0.3 * integer_loss(jnp.tanh(x) @ w, OTHER).mean()


def three_heads(x: Any, w: Any, bias: Any) -> Any:
    heads = (x @ w + bias, LABELS), (jnp.tanh(x) @ w, OTHER), (x @ HEAD, OTHER)
    return sum(integer_loss(y, labels).sum() for y, labels in heads)


def heads_with_z(x: Any, w: Any, bias: Any) -> Any:
    y, u = x @ w + bias, jnp.tanh(x) @ w
    first = integer_loss(y, LABELS).mean() + 1e-2 * z_loss(y).mean()
    return first + 0.3 * (integer_loss(u, OTHER).mean() + 1e-2 * z_loss(u).mean())


def in_a_checkpoint(x: Any, w: Any, bias: Any) -> Any:
    of = lambda x, w: own_mean(integer_loss, x @ w + bias)
    return jax.checkpoint(of)(jnp.sin(x), w)


def own_mean(loss: Any, y: Any) -> Any:
    return loss(y, LABELS).mean() + 1e-2 * z_loss(y).mean()


def of(loss: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda x, w, bias: loss(x @ w + bias)


PROGRAMS: dict[str, tuple[int, Callable[..., Any]]] = {
    "z-loss of its own": (1, of(lambda y: own_mean(integer_loss, y))),
    "two heads": (2, two_heads),
    "one mean, one-hot": (1, of(lambda y: (one_hot(y) + 1e-2 * z_loss(y)).mean())),
    "one-hot": (1, of(lambda y: one_hot(y).mean() + 1e-2 * z_loss(y).mean())),
    "picked": (1, of(lambda y: 1e-2 * z_loss(y).mean() - picked(y).mean())),
    "chosen rows": (
        1,
        of(lambda y: chosen(integer_loss(y, LABELS)) + 1e-2 * chosen(z_loss(y))),
    ),
    "weighted rows": (
        1,
        of(lambda y: weighted(integer_loss(y, LABELS)) + 1e-2 * weighted(z_loss(y))),
    ),
    "smoothed": (
        1,
        of(lambda y: (
            0.9 * integer_loss(y, LABELS).mean() + 1e-2 * z_loss(y).mean()
            + 0.1 * (jax.nn.logsumexp(y, -1) - y.mean(-1)).mean()
        )),
    ),
    "sums": (1, of(lambda y: integer_loss(y, LABELS).sum() + z_loss(y).sum() / 9)),
    "capped": (1, of(lambda y: own_mean(integer_loss, 5 * jnp.tanh(y / 5)))),
    "three heads": (3, three_heads),
    "heads with z-losses": (2, heads_with_z),
    "in a checkpoint": (1, in_a_checkpoint),
}  # fmt: skip
LINEAR = "linear_cross_entropy"


@pytest.mark.parametrize("name", slow.first(2, [*PROGRAMS]))
def test_each_loss_is_found_with_its_gradients(name: str) -> None:
    count, fn = PROGRAMS[name]
    report = rewriter.explain(flattened(fn))(X, W, BIAS)
    assert report.counts()[LINEAR] == count
    assert report.counts(backward=True)[LINEAR] == count


@pytest.mark.once
def test_numbers_agree_with_float64() -> None:
    fns = [f for _, f in PROGRAMS.values()]
    first = [rewriter.optimize(flattened(f), implementation=FORCED) for f in fns]
    later = [flattened(rewriter.optimize(f, implementation=FORCED)) for f in fns]
    run = lambda fs: jax.jit(lambda *a: [jax.tree.leaves(f(*a)) for f in fs])
    with jax.enable_x64(True):
        wide = [jnp.asarray(a, "float64") for a in (X, W, BIAS)]
        true = run([flattened(f) for f in fns])(*wide)
    for some in (first, later):
        pairs = zip(PROGRAMS, run(some)(X, W, BIAS), true, strict=True)
        for name, got, want in pairs:
            for g, t in zip(got, want, strict=True):
                np.testing.assert_allclose(g, t, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.once
def test_sums_of_one_loss_stay_apart_where_exact_rewrites_are_asked_for() -> None:
    _, fn = PROGRAMS["z-loss of its own"]
    report = rewriter.explain(fn, numerics="strict")(X, W, BIAS)
    assert "z_loss" not in str([s.params for s in report.sites])
