"""Functions of equinox modules, whose leaves are no arrays all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from tests.support.programs import FORCED

eqx = pytest.importorskip("equinox")
optax = pytest.importorskip("optax")


def optimized(fn: Any, **options: Any) -> Any:
    return rewriter.optimize(fn, implementation=FORCED, **options)


class Block(eqx.Module):
    """A norm, a gated unit, dropout by flags, a name, and a list of functions."""

    norm: eqx.nn.RMSNorm
    up: eqx.nn.Linear
    gate: eqx.nn.Linear
    drop: eqx.nn.Dropout
    act: Callable[..., Any]
    after: list[Any]
    name: str
    scale: float

    def __init__(self, key: Any) -> None:
        first, second = jax.random.split(key)
        self.norm = eqx.nn.RMSNorm(8)
        self.up = eqx.nn.Linear(8, 8, key=first)
        self.gate = eqx.nn.Linear(8, 8, key=second)
        self.drop = eqx.nn.Dropout(0.5, inference=True)
        self.act, self.after = jax.nn.silu, [jnp.tanh, None, lambda x: x]
        self.name, self.scale = "block", 0.5

    def __call__(self, x: Any) -> Any:
        assert self.name == "block"
        if self.scale == 0:  # a number that is not traced
            return x
        h = jax.vmap(self.norm)(x)
        y = self.act(jax.vmap(self.gate)(h)) * jax.vmap(self.up)(h)
        for f in filter(None, self.after):
            y = f(y)
        return x + self.scale * self.drop(y)


OPTIMIZER = optax.adam(0.1)


def loss(model: Any, x: Any) -> Any:
    return ((model(x) - 1) ** 2).mean()


def step(model: Any, state: Any, x: Any) -> Any:
    value, grads = eqx.filter_value_and_grad(loss)(model, x)
    updates, state = OPTIMIZER.update(grads, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, value


def of_loss(fast: Callable[..., Any]) -> Callable[..., Any]:
    def step(model: Any, state: Any, x: Any) -> Any:
        value, grads = eqx.filter_value_and_grad(fast)(model, x)
        updates, state = OPTIMIZER.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, value

    return step


def named(model: Any, state: Any, x: Any) -> Any:
    fast = optimized(lambda *, parts, x: step(*parts, x))
    return fast(parts=[model, state], x=x)


WAYS: dict[str, Callable[..., Any]] = {
    "optimize": optimized(step),
    "optimize_filter_jit": optimized(eqx.filter_jit(step)),
    "filter_jit_optimize": eqx.filter_jit(optimized(step)),
    "optimize_optimize": optimized(optimized(step)),
    "optimize_jit": optimized(jax.jit(step)),
    "donated": optimized(step, donate_argnums=(0, 1)),
    "filter_jit_donating": optimized(eqx.filter_jit(step, donate="all")),
    "loss_in_filter_jit": eqx.filter_jit(of_loss(optimized(loss))),
    "loss_filter_jit": of_loss(optimized(eqx.filter_jit(loss))),
    "loss_alone": of_loss(optimized(loss)),
    "value_and_grad": optimized(of_loss(eqx.filter_checkpoint(loss))),
    "named": named,
    "once": optimized(step, verify="once"),
}


def trained(run: Callable[..., Any]) -> tuple[list[float], Any]:
    model = Block(jax.random.key(0))
    state = OPTIMIZER.init(eqx.filter(model, eqx.is_array))
    losses = []
    for seed in range(3):
        x = jax.random.normal(jax.random.key(seed), (16, 8))
        model, state, value = run(model, state, x)
        losses.append(float(value))
    assert (model.name, model.scale, model.act) == ("block", 0.5, jax.nn.silu)
    return losses, eqx.filter(model, eqx.is_array)


@pytest.fixture(scope="module")
def wanted() -> Any:
    return trained(eqx.filter_jit(step))


@pytest.mark.parametrize("way", WAYS)
def test_trains_as_under_filter_jit(way: str, wanted: Any) -> None:
    losses, model = trained(WAYS[way])
    np.testing.assert_allclose(losses, wanted[0], rtol=1e-4)
    for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(wanted[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3)


def test_reports() -> None:
    model, x = Block(jax.random.key(0)), jnp.ones((16, 8))
    for fast in (optimized(loss), optimized(eqx.filter_jit(loss))):
        report = fast.report(model, x)
        assert report.counts()["rms_norm"] == 1
        assert report.name == "loss"
        assert fast.report() is report
        assert rewriter.explain(fast)(model, x) is report
        assert "rewriter_site" in str(fast.jaxpr(model, x))
    found = rewriter.explain(eqx.filter_jit(loss))(model, x)
    assert found.counts()["rms_norm"] == 1
    shapes = eqx.filter_eval_shape(Block, jax.random.key(0))
    spec = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    assert rewriter.explain(loss)(shapes, spec).counts()["rms_norm"] == 1


def test_traced_once_for_equal_modules() -> None:
    traces = []

    def f(model: Any, x: Any) -> Any:
        traces.append(1)
        return model(x), 2.0

    fast, x = rewriter.optimize(f), jnp.ones((16, 8))
    model = Block(jax.random.key(0))
    fast(model, x)
    _, number = fast(eqx.tree_at(lambda m: m.up.bias, model, jnp.ones(8)), x)
    assert isinstance(number, jax.Array)  # as under jax.jit
    assert len(traces) == 1
    other = eqx.tree_at(lambda m: m.scale, model, 0)
    np.testing.assert_array_equal(fast(other, x)[0], x)
    assert len(traces) == 2


def test_static_arguments_and_keywords() -> None:
    def f(model: Any, n: int, x: Any, *, mode: str = "one") -> Any:
        assert isinstance(n, int)
        return model(x) * n * {"one": 1, "two": 2}[mode]

    model, x = Block(jax.random.key(0)), jnp.ones((4, 8))
    fast = rewriter.optimize(f, static_argnums=1, static_argnames="mode")
    for kwargs in ({}, {"mode": "two"}):
        want = f(model, 3, x, **kwargs)
        np.testing.assert_allclose(fast(model, 3, x, **kwargs), want, rtol=1e-5)


def test_methods() -> None:
    class Own(eqx.Module):
        inner: Block

        @rewriter.optimize
        def decorated(self, x: Any) -> Any:
            return self.inner(x)

    own, x = Own(Block(jax.random.key(0))), jnp.ones((4, 8))
    np.testing.assert_allclose(own.decorated(x), own.inner(x), rtol=1e-5)
    for fn in (own.inner, own.inner.__call__, eqx.filter_jit(own.inner)):
        np.testing.assert_allclose(optimized(fn)(x), own.inner(x), rtol=1e-5)
    grads = eqx.filter_grad(lambda own: own.decorated(x).sum())(own)
    assert grads.inner.up.weight.shape == (8, 8)


def test_modules_of_arrays_stay_a_jit() -> None:
    linear, x = eqx.nn.Linear(4, 4, key=jax.random.key(0)), jnp.ones(4)
    fast = rewriter.optimize(lambda m, x: m(x))
    np.testing.assert_allclose(fast(linear, x), linear(x), rtol=1e-6)
    assert fast.lower(linear, x).compile() is not None


def test_what_is_outside_of_modules_means_what_it_does_to_jit() -> None:
    model = Block(jax.random.key(0))
    fast = rewriter.optimize(lambda model, text: text)
    with pytest.raises(TypeError, match="abstract array"):
        fast(model, "text")
    with pytest.raises(TypeError, match="abstract array"):
        fast(1.0, "text")


def test_what_filter_jit_has_beside_a_call() -> None:
    model, x = Block(jax.random.key(0)), jnp.ones((4, 8))
    fast = optimized(eqx.filter_jit(loss))
    assert fast.lower(model, x).compile()(model, x) == fast(model, x)
    assert fast.__name__ == "loss"
    fast.clear_cache()

    @optimized
    @eqx.filter_jit
    def checked(x: Any) -> Any:
        return eqx.error_if(x, x < 0, "below zero")

    assert checked(jnp.float32(1)) == 1
    with pytest.raises(RuntimeError, match="below zero"):
        checked(jnp.float32(-1))


def test_state() -> None:
    class Model(eqx.Module):
        norm: eqx.nn.BatchNorm
        act: Callable[..., Any]

        def __call__(self, x: Any, state: Any) -> Any:
            y, state = self.norm(x, state)
            return self.act(y), state

    def run(wrap: Callable[..., Any]) -> Any:
        make = lambda: Model(eqx.nn.BatchNorm(8, "b", mode="ema"), jnp.tanh)
        model, state = eqx.nn.make_with_state(make)()
        batched = jax.vmap(
            lambda m, x, s: m(x, s), (None, 0, None), (0, None), axis_name="b"
        )
        fast = wrap(batched)
        x = jax.random.normal(jax.random.key(0), (4, 8))
        for _ in range(2):
            y, state = fast(model, x, state)
        return y, jax.tree.leaves(eqx.filter(state, eqx.is_array))

    want = run(eqx.filter_jit)
    for wrap in (rewriter.optimize, lambda f: rewriter.optimize(eqx.filter_jit(f))):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            run(wrap),
            want,
        )
