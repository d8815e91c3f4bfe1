"""Gradients of operands that other ops read too, through one product."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import rewriter
from tests.gradients.test_gradients import FORCED, agree
from tests.support.arrays import normal

pytestmark = pytest.mark.once

T, D, F = 12, 32, 24
X = normal(2, T, D)
WIDE = normal(D, D + 2 * F, seed=1) * 0.2
DOWN = normal(F, D, seed=2) * 0.2
BIAS = normal(D + 2 * F, seed=3) * 0.2
CUTS = [D, D + F]


def unit(cut: Callable, act: Callable = jax.nn.silu) -> Callable:
    """A value and a gated linear unit of one product."""

    def fn(x, wide, down, bias):
        q, gate, up = cut(x, wide, bias)
        return jnp.tanh(q) + (act(gate) * up) @ down

    return fn


def split(x, w, b):
    return jnp.split(x @ w, CUTS, -1)


def slices(x, w, b):
    y = x @ w
    return y[..., :D], y[..., D : D + F], y[..., D + F :]


def biased(x, w, b):
    return jnp.split(x @ w + b, CUTS, -1)


def unit_first(x, w, b):
    gate, up, q = jnp.split(jnp.einsum("btd,df->btf", x, w), [F, 2 * F], -1)
    return q, gate, up


def transposed(x, w, b):
    return jnp.split(jnp.einsum("fd,btd->btf", w.T, x), CUTS, -1)


def up_apart(x, w, b):
    """Only the gate shares a product; that of the other branch is its own."""
    q, gate = jnp.split(x @ w[:, : D + F], [D], -1)
    return q, gate, x @ w[:, D + F :]


def joined_weights(x, w, b):
    """Weights that are parameters of their own, joined for the product."""
    apart = jnp.split(w, CUTS, -1)
    return jnp.split(x @ jnp.concatenate(apart[::-1], -1), [F, 2 * F], -1)[::-1]


PROGRAMS = {
    "split": unit(split),
    "slices": unit(slices, jax.nn.gelu),
    "biased": unit(biased),
    "unit first": unit(unit_first, jax.nn.sigmoid),
    "transposed": unit(transposed, jax.nn.relu),
    "up apart": unit(up_apart),
    "joined weights": unit(joined_weights),
}


def step_of(fn: Callable, wrap: Callable = lambda f: f) -> Callable:
    return jax.value_and_grad(lambda *a: (wrap(fn)(*a) ** 2).mean(), (0, 1, 2, 3))


ARGS = X, WIDE, DOWN, BIAS


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_with_a_share_of_others_are_found(name: str) -> None:
    report = rewriter.explain(step_of(PROGRAMS[name]))(*ARGS)
    assert not report.failures
    assert report.counts(backward=True)["gated_linear_unit"] == 1


@pytest.mark.parametrize("name", ["slices", "biased", "up apart"])
def test_the_share_of_others_is_left(name: str) -> None:
    step = step_of(PROGRAMS[name], jax.checkpoint if name == "slices" else lambda f: f)
    fast = rewriter.optimize(step, implementation=FORCED)
    (site,) = fast.report(*ARGS).sites
    assert site.replaced
    assert site.backward
    agree(fast, step, *ARGS)


def test_a_product_that_others_read_is_not_computed_twice() -> None:
    shapes = [(8, 1024, 1024), (1024, 1024 + 2 * 4096), (4096, 1024), (1024 + 8192,)]

    def fn(x, w, down, bias):
        q, gate, up = jnp.split(x @ w, [1024, 1024 + 4096], -1)
        return jnp.tanh(q) + (jax.nn.silu(gate) * up) @ down

    given = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    (site,) = rewriter.explain(step_of(fn))(*given).sites
    assert site.backward
    assert not site.replaced
    assert "computed twice" in str(site.not_chosen)


@jax.custom_vjp
def by_each_other(y):
    """Its gradient multiplies each piece's cotangent by that of another one."""
    return y


by_each_other.defvjp(
    lambda y: (y, None), lambda _, t: (t * (1 + t[..., :D].sum(-1, keepdims=True)),)
)


def entangled(x, w, b):
    return jnp.split(by_each_other(x @ w), CUTS, -1)


@jax.custom_vjp
def measured(x, w, b):
    return x @ w, b


def _measured(saved, t):
    x, w = saved
    norm = (t[0] ** 2).sum() * jnp.ones_like(t[1])  # reads the pieces, too
    return jnp.einsum("btf,df->btd", t[0], w), jnp.einsum("btd,btf->df", x, t[0]), norm


measured.defvjp(lambda x, w, b: ((x @ w, b), (x, w)), _measured)


def read_beside(x, w, b):
    y, b = measured(x, w, b)
    return jnp.split(y + 0 * b.sum(), CUTS, -1)


@pytest.mark.parametrize("cut", [entangled, read_beside])
def test_pieces_that_are_no_addends_stay(cut: Callable) -> None:
    step = step_of(unit(cut))
    fast = rewriter.optimize(step, implementation=FORCED)
    assert not fast.report(*ARGS).counts(backward=True)["gated_linear_unit"]
    agree(fast, step, *ARGS)
