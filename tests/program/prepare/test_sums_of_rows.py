"""Sums over rows and columns are split in two, and broadcasts to what they sum."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rewriter.program.prepare.sums_of_rows import split

pytestmark = pytest.mark.once

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def names(closed) -> list[str]:
    return [e.primitive.name for e in closed.eqns]


@pytest.mark.parametrize("axes", [None, (0, 2), (1, 2), (2, 0)])
def test_sums_over_rows_and_columns(axes) -> None:
    before = jax.make_jaxpr(lambda x: x.sum(axes))(X)
    after = split(before)
    first, second = after.eqns
    assert first.params["axes"] == (2,)
    assert set(second.params["axes"]) == set(axes or (0, 1, 2)) - {2}
    (got,) = jax.core.eval_jaxpr(after.jaxpr, after.consts, X)
    np.testing.assert_allclose(got, X.sum(axes))


def test_gradients_have_a_value_of_rows() -> None:
    before = jax.make_jaxpr(jax.value_and_grad(lambda x: (x * x).sum()))(X)
    after = split(before)
    shapes = [e.outvars[0].aval.shape for e in after.eqns]
    assert shapes.count((2, 3)) == 2
    for got, want in zip(
        jax.core.eval_jaxpr(after.jaxpr, after.consts, X), (np.sum(X * X), 2 * X),
        strict=True,
    ):  # fmt: skip
        np.testing.assert_allclose(got, want)


def test_sums_in_bodies() -> None:
    body = lambda c, x: (c + x.sum(), None)
    closed = jax.make_jaxpr(lambda x: lax.scan(body, 0.0, x)[0])(X)
    after = split(closed)
    assert after is not closed
    (got,) = jax.core.eval_jaxpr(after.jaxpr, after.consts, X)
    np.testing.assert_allclose(got, X.sum())


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.sum(-1),
        lambda x: x.sum((0, 1)),
        lambda x: x.astype("int32").sum(),
        lambda x: x.max(),
        lambda x: x.ravel().sum(),
        lambda x: jnp.zeros((2, 3, 4)) + x,
    ],
)
def test_other_programs_stay(fn) -> None:
    before = jax.make_jaxpr(fn)(X)
    assert split(before) is before
