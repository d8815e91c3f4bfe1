"""Activations between products: which are found, and what is computed of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import rewriter
from rewriter.ops import device
from rewriter.rewrite.passes import activations
from rewriter.rewrite.passes.activations import PASS

H200 = device.named("h200")
SHAPES = (4096, 64), (64, 1024), (1024,), (1024, 64)


def exact_gelu(x):
    return jax.nn.gelu(x, approximate=False)


def hand_written_gelu(x):
    return 0.5 * x * (1 + jnp.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


ACTIVATIONS: dict[str, Any] = {
    "gelu": exact_gelu,
    "gelu by tanh": jax.nn.gelu,
    "gelu by hand": hand_written_gelu,
    "silu": jax.nn.silu,
    "quick gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "half gelu": lambda x: exact_gelu(x) * 0.5,
    "mish": jax.nn.mish,
    "mish by hand": lambda x: x * jnp.tanh(jnp.logaddexp(x, 0)),
    "jitted in a jitted function": jax.jit(lambda x: 2 * jax.jit(exact_gelu)(x)),
}


def layer(act: Any) -> Any:
    return lambda x, w, b, v: act(x @ w + b) @ v


def gradient(act: Any) -> Any:
    loss = lambda *a: jnp.square(layer(act)(*a).astype(jnp.float32)).mean()
    return jax.value_and_grad(loss, (0, 1, 2, 3))


def shapes(dtype: str = "bfloat16") -> list[Any]:
    return [jax.ShapeDtypeStruct(s, dtype) for s in SHAPES]


def drawn(dtype: str = "bfloat16") -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    made = [jax.random.normal(k, s) for k, s in zip(keys, SHAPES, strict=True)]
    return [(x * 0.25).astype(dtype) for x in made]


def changed(fn: Any, *given: Any) -> tuple[Any, Counter[str]]:
    after, changes = PASS(jax.make_jaxpr(fn)(*given), H200)
    return after, Counter(change.what for change in changes)


def rows(program: Any) -> list[Any]:
    return [e for e in program.eqns if e.primitive.name == "rewriter_rows"]


BOTH = {"activation": 1, "gradient of an activation": 1}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_gradients_are_found(name: str) -> None:
    act = ACTIVATIONS[name]
    assert changed(layer(act), *shapes())[1] == {"activation": 1}
    after, found = changed(gradient(act), *shapes())
    assert found == BOTH
    first, second = rows(after)
    assert [v.aval.shape for v in first.outvars] == [(4096, 1024)]
    assert [v.aval.shape for v in second.outvars] == [(4096, 1024), (1024,)]
    wanted = jax.tree.leaves(gradient(act)(*drawn()))
    for got, want in zip(jaxpr_as_fun(after)(*drawn()), wanted, strict=True):
        got, want = (np.asarray(x, np.float32) for x in (got, want))
        np.testing.assert_allclose(got, want, 3e-2, 6e-3 * np.abs(want).max())


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_functions_of_scalars_are_near_float64(name: str) -> None:
    """For every number of bfloat16, forward and the gradient."""
    act = ACTIVATIONS[name]
    after, _ = changed(gradient(act), *shapes())
    programs = [dict(e.params["use"].params)["program"] for e in rows(after)]
    bits = jnp.arange(1 << 16, dtype=jnp.uint16)
    x = jax.lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)
    x = x[jnp.isfinite(x)]
    with jax.enable_x64(True):
        wide = jnp.asarray(x, jnp.float64)
        want = act(wide), jax.vmap(jax.grad(act))(wide)
    given = {"u": x, "up": jnp.ones_like(x)}
    first, second = programs
    assert len(second.inputs) == 2
    made = [
        jax.vmap(jaxpr_as_fun(first.scalars))(x)[0],
        jax.vmap(jaxpr_as_fun(second.scalars))(*given.values())[0],
    ]
    for got, exact in zip(made, want, strict=True):
        got, exact = np.asarray(got, np.float64), np.asarray(exact)
        near = np.abs(np.asarray(x)) < 100
        error = np.abs(got - exact)[near]
        assert (error <= 4e-3 * np.maximum(1, np.abs(exact[near]))).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("up", [1.0, 0.0, np.inf, np.nan])
def test_the_same_gradients_are_finite(name: str, up: float) -> None:
    """For every number of bfloat16; an infinite cotangent may give inf for NaN."""
    act = ACTIVATIONS[name]
    after, _ = changed(gradient(act), *shapes())
    program = dict(rows(after)[1].params["use"].params)["program"]
    bits = jnp.arange(1 << 16, dtype=jnp.uint16)
    x = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    ups = jnp.full_like(x, up)
    want = jax.jit(lambda x, up: jax.vjp(act, x)[1](up)[0])(x, ups)
    wide = x.astype(jnp.float32), ups.astype(jnp.float32)
    got = jax.vmap(jaxpr_as_fun(program.scalars))(*wide)[0].astype(jnp.bfloat16)
    np.testing.assert_array_equal(jnp.isfinite(got), jnp.isfinite(want))
    if np.isfinite(up):
        np.testing.assert_array_equal(jnp.isnan(got), jnp.isnan(want))


LEFT: dict[str, Any] = {
    "one read, which XLA appends to the product": jnp.tanh,
    "cheap": jax.nn.relu,
    "a mask": lambda x: jnp.where(jnp.arange(1024) > 3, exact_gelu(x), 0),
    "sorted": lambda x: exact_gelu(jnp.sort(x)),
}


@pytest.mark.parametrize("name", LEFT)
def test_others_are_left(name: str) -> None:
    before = jax.make_jaxpr(layer(LEFT[name]))(*shapes())
    after, found = PASS(before, H200)
    assert after is before
    assert not found


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes_are_left(dtype: str) -> None:
    """Numbers of float16 would overflow in the program where they do not here."""
    assert not changed(gradient(exact_gelu), *shapes(dtype))[1]


def test_other_devices_and_small_arrays_are_left() -> None:
    before = jax.make_jaxpr(layer(exact_gelu))(*shapes())
    for name in ("a100", "tpu_v5e", "cpu"):
        assert PASS(before, device.named(name)) == (before, ())
    few = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((64, 64), *SHAPES[1:])]
    assert not changed(layer(exact_gelu), *few)[1]


def test_what_else_is_read_stays() -> None:
    """The hidden layer is a result, too; and so is what the gradient would read."""

    def run(x, w, b, v):
        u = x @ w + b
        return exact_gelu(u) @ v, u

    assert changed(run, *shapes())[1] == {"activation": 1}

    def inner(x, w, b, v):
        t = jnp.tanh(x @ w + b)
        return (t * jnp.exp(t)) @ v, t

    assert not changed(inner, *shapes())[1]  # t is in memory; the rest is cheap


def in_a_loop(x: Any, *weights: Any) -> Any:
    step = lambda x, _: (layer(exact_gelu)(x, *weights), None)
    return jax.lax.scan(step, x, None, length=2)[0]


def loss_with_checkpoint(*given: Any) -> Any:
    out = jax.checkpoint(layer(exact_gelu))(*given)
    return jnp.square(out.astype(jnp.float32)).mean()


SURROUNDED: dict[str, Any] = {
    "loop": in_a_loop,
    "jit": jax.jit(layer(exact_gelu)),
    "checkpoint": jax.value_and_grad(loss_with_checkpoint, (0, 1, 2, 3)),
}


@pytest.mark.parametrize("name", SURROUNDED)
def test_bodies(name: str) -> None:
    fn = SURROUNDED[name]
    after, found = changed(fn, *shapes())
    assert found["activation"]
    assert found["gradient of an activation"] == (name == "checkpoint")
    for got, want in zip(
        jaxpr_as_fun(after)(*drawn()), jax.tree.leaves(fn(*drawn())), strict=True
    ):
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(want, np.float32), 3e-2, 1e-3
        )


def test_what_nothing_reads_does_not_count() -> None:
    def run(x, w, b, v):
        u = x @ w + b
        t = jnp.tanh(u)
        t * t  # as passes leave it
        return (u * (1 + t)) @ v

    assert "integer_pow" not in str(jax.make_jaxpr(run)(*shapes()))
    assert changed(run, *shapes())[1] == {"activation": 1}


def test_only_equal_functions_share_a_program() -> None:
    """Layers that differ in one number, in an order or in a function do not."""
    quick = lambda by: lambda x: x * jax.nn.sigmoid(by * x)
    minus = lambda x: (x - jnp.tanh(x)) * x, lambda x: (jnp.tanh(x) - x) * x
    acts = quick(1.702), quick(1.702), quick(1.8), jax.nn.mish, *minus, minus[0]

    def run(x, w, b, v):
        for act in acts:
            x = layer(act)(x, w, b, v)
        return x

    after, found = changed(run, *shapes())
    assert found == {"activation": len(acts)}
    made = [dict(e.params["use"].params)["program"] for e in rows(after)]
    first = [made.index(program) for program in made]
    assert first == [0, 0, 2, 3, 4, 5, 4]


def test_behind_a_barrier() -> None:
    """What is computed again for a gradient reads the same array."""

    def run(x, w, b, v, up):
        u = x @ w + b
        again = jax.lax.optimization_barrier(u)
        slope = jax.nn.sigmoid(again) * (1 + u * (1 - jax.nn.sigmoid(u)))
        return (up @ v.T * slope) @ v

    after, found = changed(run, *shapes(), shapes()[0])
    assert found == {"gradient of an activation": 1}
    (eqn,) = rows(after)
    assert len(eqn.invars) == 2


def test_reports_and_options() -> None:
    fn = gradient(exact_gelu)
    explain = lambda **how: rewriter.explain(fn, target="h200", **how)(*shapes())
    assert {c.what: c.by for c in explain().changes} == dict.fromkeys(
        BOTH, "activations"
    )
    for how in ({"disable": ("activations",)}, {"numerics": "strict"}):
        assert not [c for c in explain(**how).changes if c.by == "activations"]


@pytest.mark.parametrize("name", ["gelu", "gelu by tanh", "silu", "mish by hand"])
def test_programs_without_any_op(name: str) -> None:
    """A forward alone has no site; what JAX differentiates is as written."""
    fn = layer(ACTIVATIONS[name])
    report = rewriter.explain(fn, target="h200")(*shapes())
    assert not report.sites
    assert [c.what for c in report.changes] == ["activation"]
    fast = rewriter.optimize(fn, target="h200")
    assert kernels(fast) == 1
    assert kernels(rewriter.optimize(fn, target="a100")) == 0
    summed = lambda f: lambda *a: f(*a).astype(jnp.float32).sum()
    assert kernels(jax.grad(summed(fast), (0, 1, 2, 3))) == 0
    got, want = (jax.grad(summed(f), (0, 1, 2, 3))(*drawn()) for f in (fast, fn))
    for x, y in zip(got, want, strict=True):
        x, y = (np.asarray(v, np.float32) for v in (x, y))
        np.testing.assert_allclose(x, y, 2e-2, 2e-2 * np.abs(y).max())
    wide = fn(*(x.astype("float32") for x in drawn()))
    near = np.asarray(fast(*drawn()), np.float32)
    np.testing.assert_allclose(near, wide, 3e-2, 1e-2 * np.abs(wide).max())


def kernels(fn: Any) -> int:
    """How many kernels of Pallas a program for a GPU has."""
    lowered = jax.jit(fn).trace(*shapes()).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count("@mosaic_gpu")


def test_a_pass_that_fails_is_said_without_any_op(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*given: Any) -> Any:
        raise ValueError("of a test")

    monkeypatch.setattr(activations, "regions", fails)
    fn = layer(exact_gelu)
    with pytest.warns(rewriter.RewriterWarning, match="of a test"):
        report = rewriter.explain(fn, target="h200")(*shapes())
    assert "of a test" in str(report.failures)
    assert not report.changes


def test_derivatives_and_vmap_of_what_is_replaced() -> None:
    after, _ = changed(layer(exact_gelu), *shapes())
    (eqn,) = rows(after)
    act = lambda u: eqn.primitive.bind(u, **eqn.params)[0]
    u = jax.random.normal(jax.random.key(1), (4096, 1024)).astype("bfloat16")
    for of in (
        lambda f: jax.grad(lambda u: f(u).astype("float32").sum()),
        lambda f: lambda u: jax.jvp(f, (u,), (u,))[1],
    ):
        got, want = (np.asarray(of(f)(u), np.float32) for f in (act, exact_gelu))
        np.testing.assert_allclose(got, want, 2e-2, 2e-2)
    batched = jax.vmap(act)(jnp.stack([u, -u]))
    want = exact_gelu(jnp.stack([u, -u]))
    np.testing.assert_allclose(
        np.asarray(batched, np.float32), np.asarray(want, np.float32), 2e-2, 2e-2
    )
