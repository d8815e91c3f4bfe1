"""Products with parts of a widened matrix, joined to one with all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import rewriter
from rewriter.program.prepare.whole_products import multiply_whole

M, K, N = 8, 64, 96
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(M, K)), jnp.bfloat16)
Q = jnp.asarray(RNG.integers(-127, 128, (K, N)), jnp.int8)
S = jnp.asarray(RNG.uniform(0.005, 0.015, N), jnp.bfloat16)
GROUPS = jnp.asarray(RNG.uniform(0.005, 0.015, (K // 16, N)), jnp.bfloat16)


def widened(x: Any, q: Any, s: Any) -> Any:
    return q.astype(x.dtype) * s


def by_slices(x: Any, q: Any, s: Any) -> Any:
    w = widened(x, q, s)
    return x @ w[:, :32], x @ w[:, 32:80], x @ w[:, 80:]


def by_split(x: Any, q: Any, s: Any) -> Any:
    return [x @ part for part in jnp.split(widened(x, q, s), [32, 80], axis=1)]


def in_another_order(x: Any, q: Any, s: Any) -> Any:
    w = widened(x, q, s)
    return jnp.tanh(x @ w[:, 40:]), x @ w[:, :40]


def of_a_stack(x: Any, q: Any, s: Any) -> Any:
    w = widened(x, q, s).reshape(K, 3, 32)
    return x @ w[:, 0], x @ w[:, 1], x @ w[:, 2]


def stacked_first(x: Any, q: Any, s: Any) -> Any:
    w = q.T.reshape(3, 32, K).astype(x.dtype) * s.reshape(3, 32, 1)
    return [jnp.einsum("mk,nk->mn", x, w[i]) for i in range(3)]


def transposed(x: Any, q: Any, s: Any) -> Any:
    w = q.T.astype(x.dtype) * s[:, None]
    return x @ w[:48].T, x @ w[48:].T


def from_the_left(x: Any, q: Any, s: Any) -> Any:
    w = q.T.astype(x.dtype) * s[:, None]
    contract = ((1,), (1,)), ((), ())
    return lax.dot_general(w[:48], x, contract), lax.dot_general(w[48:], x, contract)


def of_groups(x: Any, q: Any, s: Any) -> Any:
    del s
    w = (q.reshape(-1, 16, N).astype(x.dtype) * GROUPS[:, None]).reshape(K, N)
    return x @ w[:, :32], x @ w[:, 32:]


def with_zeros(x: Any, q: Any, s: Any) -> Any:
    w = (q.astype(x.dtype) - 3) * s
    return x @ w[:, :32], x @ w[:, 32:]


def under_jit(x: Any, q: Any, s: Any) -> Any:
    return jax.jit(by_slices)(x, q, s)


def in_float32(x: Any, q: Any, s: Any) -> Any:
    w = widened(x, q, s)
    dot = lambda part: jnp.dot(x, part, preferred_element_type=jnp.float32)
    return dot(w[:, :32]), dot(w[:, 32:])


def of_batches(x: Any, q: Any, s: Any) -> Any:
    w, rows = widened(x, q, s), x.reshape(2, 4, K)
    return jnp.einsum("abk,kn->abn", rows, w[:, :32]), rows @ w[:, 32:]


def in_layers(x: Any, q: Any, s: Any) -> Any:
    def layer(x: Any, ws: Any) -> Any:
        a, b = jnp.split(widened(x, *ws), [K], axis=1)
        return jnp.tanh(x @ a) + (x @ b).sum(), None

    return lax.scan(layer, x, (jnp.stack([q, q[::-1]]), jnp.stack([s, 2 * s])))[0]


SPELLINGS = [
    by_slices, by_split, in_another_order, of_a_stack, stacked_first, transposed,
    from_the_left, of_groups, with_zeros, under_jit, in_float32, of_batches, in_layers,
]  # fmt: skip


def products(program: Any) -> int:
    """Counts products in a program."""
    return str(program).count("dot_general[")


@pytest.mark.parametrize("written", SPELLINGS)
def test_products_are_joined(written: Callable[..., Any]) -> None:
    program = jax.make_jaxpr(written)(X, Q, S)
    made = multiply_whole(program)
    assert products(made) < products(program)
    got = jax.jit(jaxpr_as_fun(made))(X, Q, S)
    for a, b in zip(got, jax.jit(jaxpr_as_fun(program))(X, Q, S), strict=True):
        np.testing.assert_allclose(a, b, rtol=2**-7, atol=2**-7)


@pytest.mark.once
@pytest.mark.parametrize("written", SPELLINGS)
def test_one_site_reads_the_stored_numbers(written: Callable[..., Any]) -> None:
    how = {"quantized_dot": ["memory_bounded", "xla"]}
    fast = rewriter.optimize(written, implementation=how)
    (site,) = fast.report(X, Q, S).sites
    assert site.op == "quantized_dot"
    exact = jax.tree.leaves(jax.jit(written)(X.astype("float32"), Q, S))
    total = lambda f: (
        lambda x: sum(
            (y.astype("float32") ** 2).sum() for y in jax.tree.leaves(f(x, Q, S))
        )
    )
    for got, want in zip(jax.tree.leaves(fast(X, Q, S)), exact, strict=True):
        error = np.abs(np.asarray(got, np.float64) - np.asarray(want, np.float64))
        assert error.max() < 2**-5 * np.abs(np.asarray(want, np.float64)).max()
    got, want = (np.asarray(jax.grad(total(f))(X), "f8") for f in (fast, written))
    assert np.linalg.norm(got - want) < 2**-5 * np.linalg.norm(want)
    with rewriter.config(disable=("whole_products",)):
        off = rewriter.explain(written, implementation=how)(X, Q, S)
    assert not off.sites


def columns_left_out(x: Any, q: Any, s: Any) -> Any:
    w = widened(x, q, s)
    return x @ w[:, :32], x @ w[:, 40:]


def columns_twice(x: Any, q: Any, s: Any) -> Any:
    w = widened(x, q, s)
    return x @ w[:, :48], x @ w[:, 32:]


def other_rows(x: Any, q: Any, s: Any) -> Any:
    w = widened(x, q, s)
    return x @ w[:, :32], (x + 1) @ w[:, 32:]


def read_twice(x: Any, q: Any, s: Any) -> Any:
    a, b = jnp.split(widened(x, q, s), 2, axis=1)
    return x @ a, x @ b, a.sum()


def of_the_summed_axis(x: Any, q: Any, s: Any) -> Any:
    w = widened(x, q, s)
    return x[:, :32] @ w[:32], x[:, :32] @ w[32:]


def every_other(x: Any, q: Any, s: Any) -> Any:
    w = widened(x, q, s)
    return x @ w[:, ::2], x @ w[:, 1::2]


def of_floats(x: Any, q: Any, s: Any) -> Any:
    w = jnp.tanh(widened(x, q, s))
    return x @ w[:, :32], x @ w[:, 32:]


def of_two_kinds(x: Any, q: Any, s: Any) -> Any:
    w = widened(x, q, s)
    exact = jnp.dot(x, w[:, 32:], preferred_element_type=jnp.float32)
    return x @ w[:, :32], exact


def one_part(x: Any, q: Any, s: Any) -> Any:
    return x @ widened(x, q, s)[:, :32]


ALIKE = [
    columns_left_out, columns_twice, other_rows, read_twice, of_the_summed_axis,
    every_other, of_floats, of_two_kinds, one_part,
]  # fmt: skip


@pytest.mark.parametrize("written", ALIKE)
def test_look_alike(written: Callable[..., Any]) -> None:
    program = jax.make_jaxpr(written)(X, Q, S)
    assert multiply_whole(program) is program
