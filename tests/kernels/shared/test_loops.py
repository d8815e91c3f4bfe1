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
