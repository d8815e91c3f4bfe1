"""Layers iterated in Python over stacked weights: their gradients are found."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.find.sliced_operands import layers
from rewriter.program.graph import Graph
from tests.gradients.test_gradients import FORCED, equal
from tests.support.arrays import normal

D, F, T, LAYERS = 16, 32, 8, 3
WEIGHTS = {
    "gate": normal(LAYERS, D, F, size=0.1),
    "up": normal(LAYERS, D, F, seed=1, size=0.1),
    "down": normal(LAYERS, F, D, seed=2, size=0.1),
}
X = normal(2, T, D, seed=3)


def unit(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def iterated(w, x):
    for gate, up, down in zip(w["gate"], w["up"], w["down"], strict=True):
        x = x + unit(x, gate, up, down)
    return (x**2).mean()


def indexed(w, x):
    for i in range(LAYERS):
        x = x + unit(x, *(w[n][i] for n in ("gate", "up", "down")))
    return (x**2).mean()


def sliced(w, x):
    take = jax.lax.dynamic_index_in_dim
    for i in range(LAYERS):
        x = x + unit(x, *(take(w[n], i, 0, False) for n in ("gate", "up", "down")))
    return (x**2).mean()


def split(w, x):
    parts = {n: jnp.split(a, LAYERS) for n, a in w.items()}
    for i in range(LAYERS):
        x = x + unit(x, *(parts[n][i][0] for n in ("gate", "up", "down")))
    return (x**2).mean()


def cast(w, x):
    """Weights are cast as a whole."""
    w = jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(jnp.float32), w)
    return indexed(w, x)


def checkpointed(w, x):
    for layer in zip(w["gate"], w["up"], w["down"], strict=True):
        x = x + jax.checkpoint(unit)(x, *layer)
    return (x**2).mean()


LOOPS = (iterated, indexed, sliced, split, cast, checkpointed)


def in_float64(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


@pytest.mark.parametrize("loss", LOOPS, ids=lambda f: f.__name__)
def test_gradients_of_every_layer(loss: Callable) -> None:
    step = jax.grad(loss, argnums=(0, 1))
    report = rewriter.explain(step)(WEIGHTS, X)
    counts = report.counts(backward=True)
    assert counts["gated_linear_unit"] == LAYERS
    fast = rewriter.optimize(step, implementation=FORCED, strict=True)
    assert str(fast.jaxpr(WEIGHTS, X)).count("rewriter_site_backward[") == LAYERS
    # A gradient that is rounded to bfloat16 may be rounded to either side.
    rounding = 2.0**-8 if loss is cast else 1e-5
    equal(fast(WEIGHTS, X), step(WEIGHTS, X), tolerance=rounding)
    with jax.enable_x64(True):
        args = in_float64((WEIGHTS, X))
        equal(fast(*args), step(*args), tolerance=1e-12)


def test_both_gradients_of_a_layer_belong_to_its_op() -> None:
    """The first layer reads the input, so that all its gradients are values."""
    step = jax.grad(lambda w, x: (unit(x, *next(zip(*w, strict=True))) ** 2).sum())
    w = [WEIGHTS[n] for n in ("gate", "up", "down")]
    fast = rewriter.optimize(step, implementation=FORCED, strict=True)
    text = str(fast.jaxpr(w, X))
    assert "logistic" not in text
    assert text.count("rewriter_site_backward[") == 1
    equal(fast(w, X), step(w, X))


def test_a_wrong_gradient_of_a_layer_is_not_taken_for_one() -> None:
    """The program's own rule doubles what the second layer's gate gets."""

    @jax.custom_vjp
    def doubled(w):
        return w

    doubled.defvjp(lambda w: (w, None), lambda _, g: (2 * g,))

    @jax.custom_vjp
    def silu(x):
        return jax.nn.silu(x)

    silu.defvjp(lambda x: (jax.nn.silu(x), x), lambda x, g: (g * jax.nn.sigmoid(x),))

    def loss(w, x, act, gate):
        for i, layer in enumerate(zip(w["gate"], w["up"], w["down"], strict=True)):
            g, up, down = layer
            x = x + (act(x @ (gate(g) if i == 1 else g)) * (x @ up)) @ down
        return (x**2).mean()

    for act, gate in ((silu, lambda w: w), (jax.nn.silu, doubled)):
        step = jax.grad(lambda w, x, a=act, g=gate: loss(w, x, a, g), argnums=(0, 1))
        fast = rewriter.optimize(step, implementation=FORCED, strict=True)
        equal(fast(WEIGHTS, X), step(WEIGHTS, X))
        right = jax.grad(indexed, argnums=(0, 1))(WEIGHTS, X)
        wrong = step(WEIGHTS, X)[0]["gate"]
        assert np.abs(np.asarray(wrong - right[0]["gate"])).max() > 1e-4


def test_layers_of_different_stacks_are_told_apart() -> None:
    """One layer divided by the root mean square of another is no norm."""

    def fn(x):
        return x[0] * jax.lax.rsqrt(jnp.mean(x[1] ** 2, -1, keepdims=True) + 1e-6)

    def norm(x):
        return x[1] * jax.lax.rsqrt(jnp.mean(x[1] ** 2, -1, keepdims=True) + 1e-6)

    assert rewriter.explain(fn)(X).counts()["rms_norm"] == 0
    assert rewriter.explain(norm)(X).counts()["rms_norm"] == 1
    fast = rewriter.optimize(norm, implementation=FORCED, strict=True)
    equal(fast(X), norm(X))


@pytest.mark.parametrize(
    ("fn", "count"),
    [
        (lambda x: [jnp.sin(a) for a in x], 2),
        (lambda x: jnp.sin(x[-1]), 1),
        (lambda x: jnp.sin(x[:, 1]), 0),  # not the leading axis
        (lambda x: jnp.sin(x[:1]), 0),  # still an axis
        (lambda x: jnp.sin(jnp.cos(x)[0]), 0),  # not of an input
        (lambda x: jnp.sin(x[0, :4]), 0),  # not the whole layer
    ],
)
def test_layers(fn: Callable, count: int) -> None:
    assert len(list(layers(Graph(jax.make_jaxpr(fn)(X))))) == count
