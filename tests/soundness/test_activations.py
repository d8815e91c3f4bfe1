"""Gated units of NaN and infinities: what activations and their derivatives give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter

FORCED = {"gated_linear_unit": "memory_bounded"}
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "maximum": lambda a: jnp.maximum(a, 0),
    "relu": jax.nn.relu,
    "product": lambda a: a * (a > 0),
    "square of a product": lambda a: jnp.square(a * (a > 0)),
    "relu6": jax.nn.relu6,
    "clip": lambda a: jnp.clip(a, 0, 6),
    "squared": lambda a: jax.nn.relu(a) ** 2,
    "leaky": jax.nn.leaky_relu,
    "elu": jax.nn.elu,
    "selu": jax.nn.selu,
    "celu": jax.nn.celu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "hard_sigmoid": jax.nn.hard_sigmoid,
    "hard_swish": jax.nn.hard_swish,
    "sigmoid": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "fmax": lambda a: jnp.fmax(a, 0.0),
    "fmin of fmax": lambda a: jnp.fmin(jnp.fmax(a, 0.0), 6.0),
    "less fmin": lambda a: -jnp.fmin(-a, 0.0),
    "chosen": lambda a: jnp.where((a > 0) | jnp.isnan(jnp.float32(0)), a, 0),
    "chosen otherwise": lambda a: jnp.where(~((a > 0) & (a < jnp.inf)), 0, a),
}
REPLACE_NAN = {n for n in ACTIVATIONS if n.startswith(("f", "less", "chosen"))}
"""They give a number for NaN, which kernels do not: they stay as written."""


@pytest.fixture(autouse=True)
def quick_compilation() -> Iterator[None]:
    """Skip XLA's optimizations: compiling takes far longer than running here."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def of_units(wrap: Callable[[Any], Any]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x, gate, up = (
        rng.normal(size=s).astype("f4") for s in ((8, 16), (16, 32), (16, 32))
    )
    gate[3, 5], gate[4, 6] = np.nan, np.inf
    gate[0, 7] = -np.inf

    def loss(activation: Callable[[Any], Any]) -> Callable[..., Any]:
        def unit(x: Any, gate: Any, up: Any) -> Any:
            out = activation(x @ gate) * (x @ up)
            return (out * jnp.arange(32.0)).sum(), out

        return unit

    functions = {n: wrap(loss(f)) for n, f in ACTIVATIONS.items()}
    every = jax.jit(lambda *args: {n: f(*args) for n, f in functions.items()})
    return every(x, gate, up)


def gradients(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(f, (0, 1, 2), has_aux=True)


def optimized(f: Callable[..., Any]) -> Callable[..., Any]:
    return rewriter.optimize(f, implementation=FORCED, strict=True)


def test_numbers_and_gradients() -> None:
    want = of_units(gradients)
    for wrap in (lambda f: gradients(optimized(f)), lambda f: optimized(gradients(f))):
        got = of_units(wrap)
        for name in ACTIVATIONS:
            pairs = zip(*(jax.tree.leaves(x[name]) for x in (want, got)), strict=True)
            for x, y in pairs:
                np.testing.assert_allclose(y, x, rtol=2e-4, atol=1e-3, err_msg=name)


def test_which_are_left_as_written() -> None:
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((8, 16), (16, 32), (16, 32))]
    for name, f in ACTIVATIONS.items():
        report = rewriter.explain(
            lambda x, gate, up, f=f: f(x @ gate) * (x @ up), implementation=FORCED
        )(*shapes)
        assert any(s.replaced for s in report.sites) == (name not in REPLACE_NAN), name
