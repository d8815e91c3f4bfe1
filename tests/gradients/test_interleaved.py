"""Gated units whose branches are every other column: gradients, and the code."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import rewriter
from tests.gradients.test_addends import same_in_float64
from tests.gradients.test_gradients import FORCED, equal
from tests.support.arrays import normal

pytestmark = pytest.mark.once

D, F, T = 16, 32, 8
X = normal(2, T, D)
W = normal(D, 2 * F, seed=1) * 0.3
DOWN = normal(F, D, seed=2) * 0.3


def every_other(h):
    return h[..., ::2], h[..., 1::2]


def paired(h):
    h = h.reshape(2, T, F, 2)
    return h[..., 0], h[..., 1]


def halves(h):
    return jnp.split(h, 2, -1)


def plain(g, u):
    return jax.nn.silu(g) * u


def clamped(g, u):
    g, u = jnp.minimum(g, 1.5), jnp.clip(u, -1.5, 1.5)
    return g * jax.nn.sigmoid(1.702 * g) * (u + 1)


@pytest.mark.parametrize("unit", [plain, clamped], ids=lambda f: f.__name__)
@pytest.mark.parametrize("cut", [every_other, paired, halves], ids=lambda f: f.__name__)
def test_every_gradient_is_found(cut: Callable, unit: Callable) -> None:
    def loss(x, w, down):
        return jnp.sin(unit(*cut(x @ w)) @ down).sum()

    step = jax.grad(loss, argnums=(0, 1, 2))
    counts = rewriter.explain(step)(X, W, DOWN).counts(backward=True)
    assert counts["gated_linear_unit"] == 1
    fast = rewriter.optimize(step, implementation=FORCED, strict=True)
    text = str(fast.jaxpr(X, W, DOWN))
    assert "logistic" not in text  # both gradients are the op's
    assert "gather" not in text
    same_in_float64(fast, step, X, W, DOWN)


@pytest.mark.parametrize("shift", [1, 2])
def test_gradients_in_the_wrong_columns_are_not_taken_for_them(shift: int) -> None:
    """The program's own rule returns what belongs some columns further on."""

    @jax.custom_vjp
    def same(w):
        return w

    same.defvjp(lambda w: (w, None), lambda _, g: (jnp.roll(g, shift, -1),))

    @jax.custom_vjp
    def product(x, w):
        return x @ w

    def back(given, g):
        x, w = given
        return jnp.roll(g, shift, -1) @ w.T, jnp.einsum("btd,btf->df", x, g)

    product.defvjp(lambda x, w: (x @ w, (x, w)), back)

    def losses():
        yield lambda x, w: plain(*every_other(x @ same(w))).sum()
        yield lambda x, w: plain(*every_other(product(x, w))).sum()

    for loss in losses():
        step = jax.grad(lambda x, w, f=loss: jnp.sin(f(x, w)), argnums=(0, 1))
        fast = rewriter.optimize(step, implementation=FORCED, strict=True)
        equal(fast(X, W), step(X, W))


@pytest.mark.parametrize("split", [(2, T, 3, 4, 8), (2, T, 4, 8, 3), (2, T, 4, 3, 8)])
def test_packed_heads_are_sliced_not_gathered(split: tuple[int, ...]) -> None:
    axis = split.index(3)

    def fn(qkv):
        parts = jnp.split(qkv.reshape(split), 3, axis)
        return jax.nn.dot_product_attention(*(p.squeeze(axis) for p in parts))

    qkv = normal(2, T, 96, seed=5)
    fast = rewriter.optimize(fn, implementation=FORCED, strict=True)
    text = str(fast.jaxpr(qkv))
    assert "rewriter_site" in text
    assert "gather" not in text
    equal(fast(qkv), fn(qkv))
