"""Loops over layers without checkpoints, whose gradients are another loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import rewriter
from rewriter.program.prepare.pairs_of_loops import change_pairs
from tests.program.prepare import test_parts_of_softmaxes as parts

pytestmark = pytest.mark.once

B, T, N, H = parts.B, parts.T, parts.N, parts.H
D = 2 * N * H
FORCED = {"attention": "memory_bounded"}
RANDOM = np.random.default_rng(1)
X = RANDOM.normal(size=(B, T, D)).astype(np.float32)
W = RANDOM.normal(size=(3, 4, D, D)).astype(np.float32) / 4
FACTORS = RANDOM.normal(size=(3, N)).astype(np.float32)


def two_softmaxes(q: Any, k: Any, v: Any, factor: Any) -> Any:
    s = [jnp.einsum("btnh,bsnh->bnts", q[:, :, :, c], k[:, :, :, c]) for c in (0, 1)]
    a, b = (jax.nn.softmax(jnp.where(jnp.tri(T, dtype=bool), x, -1e9)) for x in s)
    return jnp.einsum("bnts,bsnh->btnh", a - factor[:, None, None] * b, v)


ATTENTIONS = {
    "two softmaxes": two_softmaxes,
    "on an axis": parts.on_an_axis,
    "viewed": parts.viewed,
    "in halves": parts.in_halves,
    "every other": parts.every_other,
}


def layer(attention: Callable[..., Any]) -> Callable[..., Any]:
    def fn(x: Any, given: Any) -> Any:
        w, factor = given
        q, k = ((x @ w[i]).reshape(B, T, N, 2, H) for i in (0, 1))
        out = attention(q, k, (x @ w[2]).reshape(B, T, N, 2 * H), factor)
        return x + out.reshape(x.shape) @ w[3], None

    return fn


def stepped(body: Callable[..., Any]) -> Callable[..., Any]:
    loss = lambda x, w, f: jnp.sin(jax.lax.scan(body, x, (w, f))[0]).sum()
    return jax.value_and_grad(loss, (0, 1, 2))


def wide(step: Callable[..., Any]) -> Any:
    with jax.enable_x64(True):
        return jax.jit(step)(*(a.astype(np.float64) for a in (X, W, FACTORS)))


@pytest.mark.parametrize("name", ATTENTIONS)
def test_differential_attention_in_a_loop_has_its_gradients(name: str) -> None:
    step = stepped(layer(ATTENTIONS[name]))
    fast = rewriter.optimize(step, implementation=FORCED)
    sites = [s for s in fast.report(X, W, FACTORS).sites if s.op == "attention"]
    assert sites
    assert all(s.replaced and s.backward for s in sites)
    got, want = fast(X, W, FACTORS), wide(step)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5 * np.abs(b).max())


def kept(program: Any) -> int:
    """How many bytes the first loop stacks for the second."""
    first = next(e for e in program.eqns if e.primitive.name == "scan")
    return sum(v.aval.size * v.aval.dtype.itemsize for v in first.outvars[1:])


# ------------------------------------------------------- any change keeps the numbers
def mixed(x: Any, given: Any) -> Any:
    w, factor = given
    y = jnp.tanh(x @ w[0]) * jnp.exp(factor[0])
    return jnp.sin(y) + x, (y.sum(), y[:, 0])


def integers(x: Any, given: Any) -> Any:
    w, factor = given
    best = jnp.argmax(x @ w[0], -1)
    picked = jnp.take_along_axis(x @ w[1], best[..., None], -1)
    return jnp.where(x > 0, x, picked) * factor.sum(), best


def inner_loop(x: Any, given: Any) -> Any:
    w, factor = given
    y = jax.lax.scan(lambda y, m: (jnp.tanh(y @ m), None), x, w)[0]
    return y + jax.checkpoint(jnp.cos)(x * factor[1]), y


BODIES = {f.__name__: f for f in (mixed, integers, inner_loop)}


def with_results(body: Callable[..., Any]) -> Callable[..., Any]:
    """A step that also reads what the loop stacks, and its last carry."""

    def loss(x: Any, w: Any, f: Any) -> Any:
        last, stacked = jax.lax.scan(body, x, (w, f))
        floats = [a for a in jax.tree.leaves(stacked) if a.dtype == np.float32]
        return sum((a * a).sum() for a in [last, *floats]), stacked

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)


@pytest.mark.parametrize("make", [stepped, with_results])
@pytest.mark.parametrize("name", BODIES)
def test_each_equation_stays_in_its_loop(name: str, make: Callable[..., Any]) -> None:
    step = make(BODIES[name])
    before = jax.make_jaxpr(step)(X, W, FACTORS)
    changes = []

    def change(body: Any) -> Any:
        """The same equations once; nothing afterwards."""
        changes.append(body)
        return body.replace(eqns=list(body.eqns)) if len(changes) == 1 else None

    after = change_pairs(before, change)
    assert changes
    assert after is not before
    run = lambda p: jax.jit(jaxpr_as_fun(p))(
        X, W, FACTORS
    )  # fmt: skip
    for a, b in zip(run(after), run(before), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)
    assert kept(after) <= kept(before)


def test_other_programs_are_left_alone() -> None:
    program = jax.make_jaxpr(stepped(mixed))(X, W, FACTORS)
    assert change_pairs(program, lambda body: None) is program
    twice = lambda x: jax.lax.scan(lambda x, _: (2 * x, x), x, None, 3)
    program = jax.make_jaxpr(twice)(X)
    assert change_pairs(program, lambda body: body) is program
