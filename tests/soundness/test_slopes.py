"""Gated units at the kinks of their activation: derivatives are the program's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.ragged.gated_linear_unit import by_parts
from rewriter.ops.activations import clipped_by_choice
from rewriter.ops.registry import registry
from tests.soundness.check import WAYS, check
from tests.soundness.grammar import program

FORCED = {
    "gated_linear_unit": "memory_bounded",
    "ragged_gated_linear_unit": "reference",
}


@jax.custom_jvp
def own_rule(a: Any) -> Any:
    return jax.nn.relu(a)


@own_rule.defjvp
def _own_rule(primals: Any, tangents: Any) -> Any:
    (a,), (t,) = primals, tangents
    return jnp.maximum(a, 0), jnp.where(a > 0, t, 0)


KINKED: dict[str, Callable[[Any], Any]] = {
    "maximum": lambda a: jnp.maximum(a, 0),
    "zero below": lambda a: jnp.where(a < 0.0, 0.0, a),
    "zero up to 0": lambda a: jnp.where(a <= 0.0, 0.0, a),
    "six by maximum": lambda a: jnp.minimum(jnp.maximum(a, 0), 6),
    "six by clip": lambda a: jnp.clip(a, 0, 6),
    "twice": lambda a: 2 * jnp.maximum(0, a),
    "with a mask": lambda a: jnp.maximum(a, 0) * MASK,
    "leaky by maximum": lambda a: jnp.maximum(a, 0.01 * a),
    "leaky from 0": lambda a: jnp.where(a >= 0, a, 0.01 * a),
    "leaky, capped": lambda a: jnp.maximum(b := jnp.where(a > 9.0, 9.0, a), 0.01 * b),
    "elu above 0": lambda a: jnp.where(a > 0, a, jnp.expm1(a)),
    "gate of six": lambda a: a * jnp.clip(a + 3, 0, 6) / 6,
    "gate of one": lambda a: jnp.clip(a / 6 + 0.5, 0, 1),
    "silu, clipped": lambda a: jax.nn.silu(jnp.where(a > 7, 7.0, a)),
    "own rule": own_rule,
    "scaled": lambda a: jnp.maximum(-2 * a, 0),
}
USUAL = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "squared": lambda a: jax.nn.relu(a) ** 2,
    "hard": jax.nn.hard_swish,
    "elu": jax.nn.elu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "softplus": jax.nn.softplus,
}
"""The derivatives of `rewriter.ops.activations` are theirs."""

RNG = np.random.default_rng(0)
MASK = np.arange(32) % 5 > 0
X, GATE, UP = (RNG.normal(size=s).astype("f4") for s in ((8, 16), (16, 32), (16, 32)))
X[0], X[1], X[1, 0] = 0, 0, 1
GATE[:, 0], GATE[0, 1:8] = 0, (6, 3, -3, 7, -7, 9, 0)
UP[0, 1:3] = 7, -7
BIAS = np.zeros(32, "f4")
BIAS[8:11] = np.nan, np.inf, -np.inf
OPERANDS = X, GATE, UP, BIAS
SHAPES = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in OPERANDS]


@pytest.fixture(autouse=True)
def quick_compilation() -> Iterator[None]:
    """Skip XLA's optimizations: compiling takes far longer than running here."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def unit(activation: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda x, gate, up, bias: activation(x @ gate + bias) * (x @ up)


def gradients(f: Callable[..., Any]) -> Callable[..., Any]:
    def pulled_back(*operands: Any) -> Any:
        out, back = jax.vjp(f, *operands)
        places = jnp.arange(out.size, dtype="f4").reshape(out.shape)
        return back(jnp.cos(0.37 * places).astype(out.dtype))

    return pulled_back


def optimized(f: Callable[..., Any]) -> Callable[..., Any]:
    return rewriter.optimize(f, implementation=FORCED, strict=True)


def compare(functions: dict[str, Any], operands: Any, rtol: float = 2e-4) -> None:
    """Compares gradients of functions as written, and optimized before and after."""

    def of(wrap: Callable[[Any], Any]) -> Any:
        wrapped = {n: wrap(f) for n, f in functions.items()}
        run = jax.jit(lambda *args: {n: f(*args) for n, f in wrapped.items()})
        return run(*operands)

    want = of(gradients)
    for wrap in (lambda f: gradients(optimized(f)), lambda f: optimized(gradients(f))):
        got = of(wrap)
        for name in functions:
            for y, x in zip(got[name], want[name], strict=True):
                y, x = (np.asarray(a, "f4") for a in (y, x))
                np.testing.assert_allclose(y, x, rtol, 5 * rtol, err_msg=name)


def params(f: Callable[..., Any], shapes: Any = SHAPES) -> list[dict[str, Any]]:
    """The parameters of the sites that are replaced."""
    sites = rewriter.explain(f, implementation=FORCED)(*shapes).sites
    return [dict(s.params) for s in sites if s.replaced]


FEW = ("maximum", "zero up to 0", "six by clip", "leaky by maximum", "own rule")


def test_gradients_at_kinks() -> None:
    compare({n: unit(KINKED[n]) for n in FEW}, OPERANDS)


@pytest.mark.once
def test_more_gradients_at_kinks() -> None:
    more = {n: unit(f) for n, f in KINKED.items() if n not in FEW}
    compare(more | {"bounded": bounded}, OPERANDS)


@pytest.mark.once
def test_sixteen_bits() -> None:
    names = ("maximum", "six by clip", "leaky by maximum", "zero below")
    narrow = [a.astype(jnp.bfloat16) for a in OPERANDS]
    compare({n: unit(KINKED[n]) for n in names}, narrow, 0.04)


def test_what_is_found() -> None:
    found = {n: params(unit(f)) for n, f in KINKED.items()}
    assert all(len(sites) == 1 for sites in found.values())
    slopes = {n: sites[0].get("slopes") for n, sites in found.items()}
    assert slopes["maximum"] == slopes["twice"] == ((0.0, 0.5),)
    assert slopes["zero below"] == ((0.0, 1.0), ("nan", 1.0))
    assert slopes["six by clip"] == ((0.0, 0.5), (6.0, 0.5))
    (site,) = params(bounded)
    assert site["slopes_up"] == ((7.0, 1.0), ("nan", 1.0))


def test_what_is_usual_has_none() -> None:
    for name, f in USUAL.items():
        (site,) = params(unit(f))
        assert not {"slopes", "slopes_up"} & set(site), name


def bounded(x: Any, gate: Any, up: Any, bias: Any) -> Any:
    other = x @ up
    return jax.nn.silu(x @ gate + bias) * jnp.where(other > 7, 7.0, other)


def test_layers_that_differ_in_a_rule() -> None:
    """They are alike but for `jax.nn.relu`, which has a derivative of its own."""

    def layers(x: Any, gate: Any, up: Any, down: Any) -> Any:
        for i, act in enumerate((jax.nn.relu, KINKED["maximum"])):
            x = x + act(x @ gate[i]) * (x @ up[i]) @ down[i]
        return x

    weights = [np.stack([a, a]) for a in (GATE, UP, UP.T)]
    shapes = [jax.ShapeDtypeStruct(a.shape, "float32") for a in (X, *weights)]
    first, second = params(layers, shapes)
    assert "slopes" not in first
    assert second["slopes"] == ((0.0, 0.5),)


@jax.custom_jvp
def gated(a: Any, b: Any) -> Any:
    return jax.nn.relu(a) * b


@gated.defjvp
def _rule(primals: Any, tangents: Any) -> Any:
    (a, b), (s, t) = primals, tangents
    return gated(a, b), jax.nn.relu(a) * t + jnp.where(a > 0, s * b, 0)


def test_what_is_left_as_written() -> None:
    def ruled(x: Any, gate: Any, up: Any, bias: Any) -> Any:
        return gated(x @ gate + bias, x @ up)

    def twice(x: Any, gate: Any, up: Any, bias: Any) -> Any:
        y = x @ gate + bias
        return jax.nn.relu(y) * (x @ up) + jnp.maximum(y, 0) * (x @ jnp.cos(up))

    report = rewriter.explain(ruled, implementation=FORCED)(*SHAPES)
    assert "custom rule for derivatives" in report.why_not("gated_linear_unit")
    report = rewriter.explain(twice, implementation=FORCED)(*SHAPES)
    assert not report.sites
    assert "with and without a rule" in report.why_not("gated_linear_unit")


CHOICES: dict[str, Callable[[Any], Any]] = {
    "mask": lambda a: jnp.where(MASK, a, 0.0),
    "not the mask": lambda a: jnp.where(~MASK, 0.0, a),
    "select": lambda a: jax.lax.select(jnp.broadcast_to(MASK, a.shape), a, a * 0),
    "of rows": lambda a: jnp.where(jnp.arange(8)[:, None] > 2, a, 0.0),
    "finite": lambda a: jnp.where(jnp.isfinite(a), a, 0.0),
    "not infinite": lambda a: jnp.where(jnp.isinf(a), 0.0, a),
    "below infinity": lambda a: jnp.where(jnp.abs(a) < jnp.inf, a, 0.0),
    "small": lambda a: jnp.where(jnp.abs(a) > 1e30, 0.0, a),
    "no NaN": lambda a: jnp.where(a == a, a, 0.0),
    "numbers": jnp.nan_to_num,
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices_in_a_branch_are_left_as_written(name: str) -> None:
    """They hide NaN and infinities of the branch, and a factor of 0 does not."""
    choice = CHOICES[name]

    def chosen(x: Any, gate: Any, up: Any, bias: Any) -> Any:
        return jax.nn.silu(x @ gate) * choice(x @ up + bias)

    assert not params(chosen)


def test_choices_of_the_result_are_none_of_the_unit() -> None:
    f = unit(jax.nn.silu)
    assert params(lambda *args: jnp.where(MASK, f(*args), 0.0))
    assert params(lambda *args: f(*args) * MASK)


def test_layers_that_are_computed_again_for_gradients() -> None:
    """JAX computes an activation again without its rule; the gradients are there."""

    def loss(gates: Any, x: Any, up: Any) -> Any:
        @jax.checkpoint
        def layer(x: Any, gate: Any) -> Any:
            return x + (jax.nn.relu(x @ gate) * (x @ up)) @ up.T, None

        return (jax.lax.scan(layer, x, gates)[0] ** 2).sum()

    args = np.stack([GATE, -GATE]), X, UP
    grad = jax.grad(loss, (0, 1, 2))
    fast = rewriter.optimize(grad, implementation=FORCED, strict=True)
    assert any(s.replaced and s.backward for s in fast.report(*args).sites)
    for got, want in zip(fast(*args), jax.jit(grad)(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * abs(want).max())


@pytest.mark.once
def test_experts() -> None:
    sizes = np.array([3, 0, 5], "i4")
    w, up = (np.stack([a, 2 * a, -a]) for a in (GATE, UP))

    def of(activation: Callable[[Any], Any]) -> Callable[..., Any]:
        def f(x: Any, w: Any, up: Any) -> Any:
            gate, other = (jax.lax.ragged_dot(x, m, sizes) for m in (w, up))
            return activation(gate) * other

        return f

    names = ("maximum", "six by clip", "leaky by maximum")
    compare({n: of(KINKED[n]) for n in names}, (X, w, up))
    (site,) = params(of(KINKED["maximum"]), [X, w, up])
    assert site["slopes"] == ((0.0, 0.5),)


@pytest.mark.once
def test_experts_by_parts() -> None:
    op = registry().op("ragged_gated_linear_unit")
    dot = registry().kernel("ragged_dot", "memory_bounded")
    how = {
        "group_sizes": jnp.array([3, 0, 5]), "activation": "relu",
        "slopes": ((0.0, 0.5),),
    }  # fmt: skip
    w, up = (np.stack([a, 2 * a, -a]) for a in (GATE, UP))
    arrays = {"x": X, "w": w, "w_up": up}

    def of_product(**given: Any) -> Any:
        return dot.backward(**given, out=None, residuals=())

    out, back = jax.vjp(lambda given: op.reference(**given, **how), arrays)
    made, kept = by_parts.forward(**arrays, **how, residuals=True, product=dot.forward)
    np.testing.assert_allclose(made, out, 1e-4, 1e-4)
    grads = by_parts.backward(
        **arrays, **how, residuals=kept, cotangent=jnp.ones_like(out),
        product_backward=of_product,
    )  # fmt: skip
    for name, want in back(jnp.ones_like(out))[0].items():
        np.testing.assert_allclose(grads[name], want, 1e-4, 1e-4)
    assert grads["w"][:, :, 0].any()


@pytest.mark.parametrize("bounds", [(-2.0, 2.0), (None, 2.0), (-2.0, None)])
def test_derivatives_beyond_a_bound_are_chosen(bounds: Any) -> None:
    """Those of `jnp.clip`, but 0 for an infinite cotangent, where a product is NaN."""
    y = np.array([-3.0, -2.0, 0.5, 2.0, 3.0, np.nan, np.inf, -np.inf], "f4")
    out, back = jax.vjp(lambda y: clipped_by_choice(y, bounds), y)
    want, back_of_clip = jax.vjp(lambda y: jnp.clip(y, *bounds), y)
    np.testing.assert_array_equal(out, want)
    up = np.arange(1.0, 9.0, dtype="f4")
    np.testing.assert_array_equal(back(up)[0], back_of_clip(up)[0])
    infinite = np.full_like(up, np.inf)
    (got,), slopes = back(infinite), back(np.ones_like(up))[0]
    beyond = (slopes == 0) & ~np.isnan(y)
    np.testing.assert_array_equal(np.asarray(got)[beyond], 0)
    assert np.isinf(np.asarray(got)[slopes > 0]).all()


def test_gradients_of_bounded_units_are_replaced() -> None:
    both = unit(lambda a: jax.nn.silu(jnp.clip(a, -1.0, 1.0)))
    report = rewriter.explain(gradients(both), implementation=FORCED)(*SHAPES)
    assert [(s.kernel, s.backward) for s in report.sites] == [("memory_bounded", True)]


@pytest.mark.once
def test_bounded_units_with_overflow_in_their_gradients() -> None:
    """The cotangent of a clipped entry is infinite, and its gradient is exactly 0."""
    assert not check([program(718225)], WAYS).findings
