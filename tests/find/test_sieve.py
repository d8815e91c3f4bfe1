"""Programs that can hold no site are told without a graph; no other ones are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from rewriter.config import Config
from rewriter.find import sieve
from rewriter.find.sieve import possible
from rewriter.patterns.sets import in_force
from rewriter.run import rewriting, steps
from tests.spellings.corpus import SPELLINGS
from tests.spellings.known import MISSED

X, W, V = jnp.ones((4, 8)), jnp.ones((8, 16)), jnp.ones((16, 8))


def names(fn, *args) -> set[str]:
    patterns = in_force(Config().patterns, ())
    program = jax.make_jaxpr(fn)(*args)
    return {p.name for p in possible(program, patterns, sieve.primitives(program))}


@pytest.mark.parametrize(
    "spelling", [s for s in SPELLINGS if s.count and s.name not in MISSED],
    ids=lambda s: s.name,
)  # fmt: skip
def test_every_spelling_is_possible(spelling) -> None:
    assert spelling.op in names(spelling.fn, *spelling.args())


def mlp(x):
    """An activation times its own input is no gate."""
    return jax.nn.silu(jax.nn.gelu(x @ W + 1) @ V)


def residuals(x):
    for _ in range(3):
        x = x + jnp.tanh(x @ W) @ V * 0.5
        x = jnp.where(x > 3, 3.0, x) - jnp.square(x) * jnp.sign(x)
    return x


def classifier(x):
    """A softmax without a contraction of its weights."""
    return jax.nn.log_softmax(x @ W)


def activated_twice(x):
    """Two products of one compiled body, and no gate."""
    project = jax.jit(lambda x: x @ W)
    y = jnp.tanh(project(x)) * 2.0
    return y * y + project(x + 1)


@pytest.mark.parametrize("fn", [mlp, residuals, classifier, activated_twice])
def test_no_graph_without_a_possible_site(fn, monkeypatch) -> None:
    assert not names(fn, X)
    monkeypatch.setattr(steps, "Graph", None)  # not called
    closed = jax.make_jaxpr(fn)(X)
    assert rewriting.rewrite(closed, Config()).closed_jaxpr is closed


@pytest.mark.parametrize("around", [jax.jit, jax.checkpoint, lambda f: f])
def test_paths_lead_through_calls_and_loops(around) -> None:
    def gate(x):
        a, b = jnp.split(x @ W, 2, -1)
        return around(jax.nn.silu)(a) * b

    def loop(x):
        return jax.lax.scan(lambda c, _: (around(gate)(c), None), x, None, 3)[0]

    assert names(gate, X) == names(loop, X) == {"gated_linear_unit"}


def test_calls_of_one_body_are_told_apart() -> None:
    project = jax.jit(lambda x, w: x @ w)

    def gate(x):
        return jax.nn.silu(project(x, W)) * project(x, W + 1)

    def own_input(x):
        y = project(x, W)
        return jax.nn.silu(y) * y

    assert names(gate, X) == {"gated_linear_unit"}
    assert not names(own_input, X)


def test_a_missing_primitive_is_told_before_paths_are_followed(monkeypatch) -> None:
    monkeypatch.setattr(sieve._Sieve, "_step", None)  # not called
    assert not names(lambda x: jnp.abs(x @ W) @ V, X)


@pytest.mark.parametrize("around", [jax.jit, jax.checkpoint])
def test_primitives_at_any_depth(around) -> None:
    def loop(x):
        step = around(lambda c: jax.lax.cond(c.sum() > 0, jnp.sin, jnp.cos, c))
        return jax.lax.while_loop(lambda c: c.max() < 3, step, x)

    found = sieve.primitives(jax.make_jaxpr(loop)(X))
    assert {"while", "cond", "sin", "cos", "reduce_max", "gt"} <= found


@pytest.mark.once
@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint])
def test_arrays_of_few_bits_are_looked_for_at_any_depth(around) -> None:
    product = lambda x, w: x @ w.astype(x.dtype)
    stored = W.astype("int8")
    assert "quantized_dot" in names(around(product), X, stored)
    assert "quantized_dot" in names(around(lambda x: product(x, stored)), X)
    assert "quantized_dot" not in names(around(product), X, W.astype("bfloat16"))
    inside = lambda x, w: product(x, jnp.round(w).astype("int8"))
    assert "quantized_dot" in names(around(inside), X, W)
