"""A kernel is not put beside a computation that stays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="kernels are chosen for a CPU"
)

T, S, H = 1024, 1024, 32
SPECS = [jax.ShapeDtypeStruct((1, T, 4, H), jnp.float32)] * 3


def weights(q: jax.Array, k: jax.Array) -> jax.Array:
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
    seen = jnp.tril(jnp.ones((T, S), bool))
    return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)


def weigh(p: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("bnts,bsnh->btnh", p, v)


def alone(q, k, v):
    return weigh(weights(q, k), v)


def with_weights(q, k, v):
    p = weights(q, k)
    return weigh(p, v), p


def with_two_products(q, k, v):
    """Invariant point attention: the weights meet values and pairs."""
    p = weights(q, k)
    return weigh(p, v), jnp.einsum("bnts,bsnh->bth", p, v * v)


def by_sum(q, k, v):
    p = weights(q, k)
    return weigh(p, v) + p.sum(-1).mean()


def stacked(q, k, v):
    def layer(x, _):
        return with_weights(x, k, v)

    return jax.lax.scan(layer, q, length=2)


def gradient(q, k, v):
    return jax.grad(lambda q: jnp.sum(alone(q, k, v) ** 2))(q)


def gradient_of_optimized(q, k, v):
    return jax.grad(lambda q: jnp.sum(rewriter.optimize(alone)(q, k, v) ** 2))(q)


@pytest.mark.parametrize(
    ("fn", "reader"),
    [(alone, ""), (with_weights, "the program returns"), (gradient, ""),
     (with_two_products, "test_live_products.py:"), (by_sum, "test_live_products.py:"),
     (stacked, "a loop or branch returns")],
)  # fmt: skip
def test_left_alone_where_its_parts_stay(fn, reader: str) -> None:
    report = rewriter.explain(fn)(*SPECS)
    (site,) = report.sites
    assert site.op == "attention"
    assert site.replaced == (not reader)
    if reader:
        kernel, why = site.not_chosen[0]
        assert kernel == "memory_bounded"
        assert why.startswith(reader)
        assert "computed twice" in why
        assert "before differentiating" in why


def test_a_forced_kernel_is_used_all_the_same() -> None:
    forced = {"attention": "memory_bounded"}
    fast = rewriter.optimize(with_weights, implementation=forced)
    assert fast.report(*SPECS).sites[0].replaced
    args = [jax.random.normal(jax.random.key(i), s.shape) for i, s in enumerate(SPECS)]
    for a, b in zip(fast(*args), jax.jit(with_weights)(*args), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_an_optimized_function_has_its_kernel_in_a_gradient() -> None:
    def temporary(fn) -> int:
        return jax.jit(fn).lower(*SPECS).compile().memory_analysis().temp_size_in_bytes

    assert temporary(gradient_of_optimized) * 4 < temporary(gradient)
