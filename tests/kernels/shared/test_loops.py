"""Loops of kernels stay loops where the calls of `jax.jit` are left out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.shared import loops
from rewriter.ops.kernel import Traits
from rewriter.ops.registry import registry
from tests.support.programs import FORCED, attention

ROWS, WIDTH, PLAIN = 4096, 64, "memory_bounded"
pytestmark = pytest.mark.once


def counted(x: Any) -> Any:
    def step(i: Any, c: Any) -> Any:
        return jnp.where(c > i, c, c * 2)

    return loops.fori_loop(0, 5, step, x)


def scanned(x: Any) -> Any:
    return loops.scan(lambda c, y: (jnp.clip(c + y, 0, 9), c.sum()), x[0], x)


def names(jaxpr: Any) -> set[str]:
    found = {e.primitive.name for e in jaxpr.eqns}
    bodies = jax.extend.core.jaxprs_in_params
    return found.union(*(names(b) for e in jaxpr.eqns for b in bodies(e.params)))


@pytest.mark.parametrize("f", [counted, scanned])
def test_bodies_are_traced_as_what_is_around(f: Any) -> None:
    x = np.ones((4, 4), np.float32)
    wanted = f(x)
    assert names(jax.make_jaxpr(f)(x).jaxpr) & {"jit", "pjit"}
    with jax.disable_jit():
        inside = names(jax.make_jaxpr(f)(x).jaxpr)
        assert inside & {"scan", "while"}
        assert not inside & {"jit", "pjit"}
        jax.tree.map(np.testing.assert_allclose, f(x), wanted)


def test_a_kernel_is_lowered_without_calls_but_with_its_loops() -> None:
    x = jax.ShapeDtypeStruct((1, 1024, 1, 8), jnp.float32)
    grad = jax.grad(lambda q: attention(q, q, q).sum())
    lowered = rewriter.optimize(grad, implementation=FORCED).lower(x).as_text()
    assert "stablehlo.while" in lowered
    assert "@_where" not in lowered


def test_a_kernel_says_that_it_is_flat() -> None:
    """A loop of `jax.lax` in another's kernel would be unrolled."""
    flat = {k.name for k in registry().kernels("attention") if k.traits.flat}
    assert flat == {"memory_bounded"}
    assert not Traits().flat


def attends(x: Any, w: Any) -> Any:
    q, k, v = (y.reshape(1, -1, 2, WIDTH // 2) for y in jnp.split(x @ w, 3, -1))
    return attention(q, k, v).reshape(x.shape)


def gates(x: Any, w: Any) -> Any:
    gate, up, down = jnp.split(w, 3, -1)
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down.T


def picks(x: Any, w: Any) -> Any:
    experts = w.reshape(3, WIDTH, -1)
    return jax.lax.ragged_dot(x, experts, jnp.full(3, ROWS // 3, jnp.int32))


LAYERS = {
    "attention": (attends, 3 * WIDTH),
    "gated_linear_unit": (gates, 12 * WIDTH),
    "ragged_dot": (picks, 3 * WIDTH),
}


@pytest.mark.parametrize("name", LAYERS)
def test_unrolled_checkpoints_hold_no_zeros_of_other_layers(
    name: str,
) -> None:
    """The zeros that loops start with are not made for all layers at once."""
    layer, columns = LAYERS[name]

    def loss(x: Any, weights: Any) -> Any:
        for w in weights:
            x = x + jax.checkpoint(layer)(x, w)
        return (x**2).sum()

    grad = jax.grad(loss, (0, 1))
    fast = rewriter.optimize(grad, implementation={name: [PLAIN]})
    args = lambda layers: [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((ROWS, WIDTH), (layers, WIDTH, columns))
    ]

    def more(fn: Any) -> float:
        held = [fn.lower(*args(n)).compile().memory_analysis() for n in (2, 5)]
        few, many = (x.temp_size_in_bytes for x in held)
        return (many - few) / 3

    assert fast.report(*args(2)).counts(replaced=True)[name]
    bytes_of_a_layer = 4 * WIDTH * (ROWS + columns)
    if (found := more(fast)) > 1.1 * bytes_of_a_layer:
        # XLA of older JAX runs checkpoints again before their gradients are due.
        assert found <= 1.1 * more(jax.jit(grad))
        assert jax.__version_info__ < (0, 11)
