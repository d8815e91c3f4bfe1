"""Programs in an order or layout that a library's rewriting leaves behind."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import rewriter
from tests.gradients.test_gradients import FORCED, equal
from tests.support.arrays import normal

B, T, N, H, E, LAYERS = 2, 6, 3, 4, 5, 2


def sites(fn: Callable, *args) -> list:
    """The sites of a function; swapped for their references, its numbers stay."""
    report = rewriter.explain(fn)(*args)
    assert not report.failures
    fast = rewriter.optimize(fn, implementation=FORCED, strict=True)
    equal(jax.jit(fast)(*args), jax.jit(fn)(*args))
    return report.sites


# --------------------------------------------- results without a cotangent
def weights_of(q, k):
    return jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) * 0.5, -1)


def transposed(o):
    return o.transpose(0, 2, 1, 3)


def backward(p, q, k, v, ct, scale=1.0):
    """Gradients of attention; the cotangent stays in the layout of the arguments."""
    dv = jnp.einsum("bnts,btne->bsne", p, ct) * scale
    dp = jnp.einsum("btne,bsne->bnts", ct, v) * scale
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * 0.5
    dq, dk = jnp.einsum("bnts,bsnh->btnh", ds, k), jnp.einsum("bnts,btnh->bsnh", ds, q)
    return dq, dk, dv


def layers(layer: Callable) -> Callable:
    """Several calls of a layer, each with arguments of its own."""
    return lambda *args: [layer(*(a[i] for a in args)) for i in range(LAYERS)]


def only_transposed(q, k, v, ct):
    p = weights_of(q, k)
    out = transposed(jnp.einsum("bnts,bsne->bnte", p, v))
    return out, backward(p, q, k, v, ct)


def scaled_too(q, k, v, ct):
    p = weights_of(q, k)
    out = transposed(jnp.einsum("bnts,bsne->bnte", p, v) * -2.0)
    return out, backward(p, q, k, v, ct, -2.0)


def axes_joined(q, k, v, ct):
    p = weights_of(q, k)
    out = jnp.einsum("bnts,bsne->bnte", p, v)
    out = out.reshape(B * N, T, E).reshape(B, N, T, E)
    return transposed(out), backward(p, q, k, v, ct)


def read_beside(q, k, v, ct):
    p = weights_of(q, k)
    out = jnp.einsum("bnts,bsne->bnte", p, v)
    return transposed(out), out + 1, backward(p, q, k, v, ct)


ARGS = tuple(
    normal(LAYERS, B, T, N, size, seed=i) for i, size in enumerate((H, H, E, E))
)


@pytest.mark.parametrize("layer", [only_transposed, scaled_too, axes_joined])
def test_the_cotangent_is_of_the_result_in_another_layout(layer: Callable) -> None:
    found = sites(layers(layer), *ARGS)
    assert [(s.op, s.backward) for s in found] == [("attention", True)] * LAYERS


def test_a_result_that_is_read_twice_has_another_cotangent() -> None:
    found = sites(layers(read_beside), *ARGS)
    assert [(s.op, s.backward) for s in found] == [("attention", False)] * LAYERS


# ------------------------------------------------- gradients before results
def unit_gradients(x, w_gate, w_up, g, u, s, ct):
    dg = ct * u * s + g * (ct * u) * (s * (1 - s))
    du = g * s * ct
    return du @ w_up.T + dg @ w_gate.T, x.T @ dg, x.T @ du


@pytest.mark.parametrize("call", [lambda fn: fn, jax.jit], ids=["plain", "jit"])
def test_a_unit_comes_before_products_of_its_gradients(call: Callable) -> None:
    def step(x, w_gate, w_up, ct):
        g, u = x @ w_gate, x @ w_up
        s = jax.nn.sigmoid(g)
        gradients = call(unit_gradients)(x, w_gate, w_up, g, u, s, ct)
        return g * s * u, gradients

    shapes = ((7, 4), (4, 6), (4, 6), (7, 6))
    args = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    (site,) = sites(step, *args)
    assert site.backward
    assert site.params["activation"] == "silu"


def test_a_unit_that_is_multiplied_is_still_one() -> None:
    def fn(x, w_gate, w_up, keep):
        g, u = x @ w_gate, x @ w_up
        return jax.nn.silu(g) * (u * keep)

    shapes = ((7, 4), (4, 6), (4, 6), (7, 6))
    (site,) = sites(fn, *(normal(*shape, seed=i) for i, shape in enumerate(shapes)))
    assert site.params["activation"] == "silu"


# ------------------------------------------------------------ ones laid out
@pytest.mark.parametrize("moved", [lambda x: x[::-1], jnp.transpose, lambda x: x[2:]])
def test_weights_summed_by_a_product_with_ones(moved: Callable) -> None:
    def fn(q, k, v):
        e = jnp.exp(jnp.einsum("btnh,bsnh->bnts", q, k))
        ones = moved(jnp.ones((T + 2, T)))[:T, :T]
        total = jnp.einsum("bnts,su->btnu", e, ones)[..., :1]
        return transposed(jnp.einsum("bnts,bsne->bnte", e, v)) / total

    (site,) = sites(fn, *(a[0] for a in ARGS[:3]))
    assert site.op == "attention"


# ------------------------------------------------------- numbers apart
MASK = jnp.tril(jnp.ones((T, T), bool)) & (jnp.arange(T) > 1)
"""The first two queries see no key."""


@pytest.mark.parametrize("value_read_too", [False, True])
def test_values_that_are_scaled_apart_from_the_weights(value_read_too: bool) -> None:
    def fn(q, k, v):
        s = jnp.einsum("btnh,bsnh->bnts", q, k)
        p = jax.nn.softmax(jnp.where(MASK, s, -1e9), -1)
        v = v * 0.25
        return jnp.einsum("bnts,bsne->btne", p * 4, v), v if value_read_too else ()

    (site,) = sites(fn, *(a[0] for a in ARGS[:3]))
    assert site.params["empty_rows"] == "mean"


def test_an_absolute_value_times_itself() -> None:
    def fn(x):
        size = jnp.abs(x)
        return x * jax.lax.rsqrt(jnp.mean(size * size, -1, keepdims=True) + 1e-6)

    (site,) = sites(fn, normal(3, 8))
    assert site.op == "rms_norm"


# ------------------------------------------------------ what cancels out
def zero_before_division(q, k, v):
    """The sum of weights divides their product, behind an addition of nothing."""
    scores = jnp.einsum("btnh,bsnh->bnts", q, k)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    total = weights.sum(-1).transpose(0, 2, 1)[..., None]
    out = jnp.einsum("bnts,bsne->bnte", weights, v) - 0.0 + 0.0
    return transposed(out) / total


def clipped_with_tanh(x, w, u):
    """A clipped gate, silu by a hyperbolic tangent."""
    gate = jnp.minimum(1.0, jnp.maximum(-1.0, x @ w))
    return gate * (0.5 * (1 + jnp.tanh(0.5 * gate))) * (x @ u)


def magnitude_halved_and_doubled(x, scale):
    """The square of an absolute value that passes through two factors."""
    size = jnp.abs(x) * 0.5 * 2.0
    return x * jax.lax.rsqrt((size * size).mean(-1, keepdims=True) + 1e-5) * scale


CANCELLED = (
    (zero_before_division, "attention", [a[0] for a in ARGS[:3]]),
    (clipped_with_tanh, "gated_linear_unit", [normal(4, 8), *[normal(8, 6)] * 2]),
    (magnitude_halved_and_doubled, "rms_norm", [normal(4, 8), normal(8)]),
)


@pytest.mark.parametrize(("fn", "op", "args"), CANCELLED)
def test_what_cancels_out_is_no_obstacle(fn: Callable, op: str, args: list) -> None:
    (site,) = sites(fn, *args)
    assert site.op == op


@pytest.mark.parametrize(("fn", "op", "args"), CANCELLED)
def test_it_is_none_in_gradients_either(fn: Callable, op: str, args: list) -> None:
    def step(cotangent, *args):
        out, back = jax.vjp(fn, *args)
        return out, back(cotangent)

    (site,) = sites(step, fn(*args) * 0.5, *args)
    assert (site.op, site.backward) == (op, True)


def test_a_power_of_one_side_is_no_square_of_the_magnitude() -> None:
    """2 max(x, 0) - x is |x|, and 2 max(x, 0) + x is not."""

    def lopsided(x, scale):
        size = 2 * jnp.maximum(x, 0) + x
        return x * jax.lax.rsqrt((size * size).mean(-1, keepdims=True) + 1e-5) * scale

    assert not sites(lopsided, normal(4, 8), normal(8))


def test_a_unit_whose_result_is_computed_behind_its_gradients() -> None:
    def step(x, w, u, ct):
        gate, up = x @ w, x @ u
        half = jax.nn.sigmoid(gate)
        slope = half * (1 - half)
        silu = gate * half
        of_up = silu * ct
        through = ct * up
        of_gate = through * half + gate * through * slope
        grads = of_gate @ w.T + of_up @ u.T, x.T @ of_gate, x.T @ of_up
        scaled = [of_gate * 2.0, of_up * 3.0, of_gate * 0.5]
        return grads, scaled, silu * up

    (site,) = sites(step, normal(4, 8), normal(8, 6), normal(8, 6), normal(4, 6))
    assert (site.op, site.params["activation"]) == ("gated_linear_unit", "silu")
    assert site.backward


# ------------------------------------------------ gate and up of one product
def halves(y):
    return jnp.split(y, 2, -1)


def stacked_rows(y):
    y = y.reshape(*y.shape[:-1], 2, -1)
    return y[..., 0, :], y[..., 1, :]


def stacked_split(y):
    parts = jnp.split(y.reshape(*y.shape[:-1], 2, -1), 2, -2)
    return [p[..., 0, :] for p in parts]


def interleaved(y):
    return y[..., ::2], y[..., 1::2]


@pytest.mark.parametrize("apart", [halves, stacked_rows, stacked_split, interleaved])
@pytest.mark.parametrize("activation", [jax.nn.silu, lambda y: jax.nn.gelu(y, False)])
def test_gradients_of_branches_of_one_product(
    apart: Callable, activation: Callable
) -> None:
    def loss(x, w, b):
        gate, up = apart(x @ w + b)
        return jnp.sin(activation(gate) * up).sum()

    step = jax.value_and_grad(loss, (0, 1, 2))
    (site,) = sites(step, normal(3, 4, 8), normal(8, 12), normal(12))
    assert (site.op, site.backward) == ("gated_linear_unit", True)
