"""Slices of kernels, and how few equations they cost."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rewriter.kernels.attention.xla.backward import backward
from rewriter.kernels.attention.xla.forward import forward
from rewriter.kernels.shared.slices import part, quotient, remainder, with_part

Q = jax.ShapeDtypeStruct((2, 1040, 4, 64), jnp.float32)


@pytest.mark.parametrize("starts", [(0, 0), (1, 2), (3, 9), (jnp.int32(2), 1)])
def test_parts_are_those_of_jax(starts):
    x = np.arange(40.0, dtype=np.float32).reshape(4, 10)
    at, new = [jnp.int32(s) for s in starts], jnp.full((2, 3), -1, jnp.float32)
    np.testing.assert_array_equal(
        part(jnp.asarray(x), starts, (2, 3)), lax.dynamic_slice(x, at, (2, 3))
    )
    np.testing.assert_array_equal(
        with_part(jnp.asarray(x), new, starts), lax.dynamic_update_slice(x, new, at)
    )


@pytest.mark.parametrize("wide", [False, True])
def test_quotients_are_those_of_python(wide):
    with jax.enable_x64(wide):
        for x in (0, 1, 5, 12):
            for y in (1, 2, 5, 7):
                for given in (x, jnp.int32(x)):
                    assert quotient(given, y) == x // y
                    assert remainder(given, y) == x % y


def _primitives(jaxpr, counts):
    for eqn in jaxpr.eqns:
        counts[eqn.primitive.name] += 1
        for body in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns")):
            body = getattr(body, "jaxpr", body)
            if hasattr(body, "eqns"):
                _primitives(body, counts)
    return counts


def _forward(q, k, v):
    with jax.disable_jit():
        return forward(q, k, v, residuals=True, window=(None, 0))


def _backward(q, k, v, out, lse, up):
    with jax.disable_jit():
        given = {"out": out, "residuals": (lse,), "cotangent": up}
        return backward(q, k, v, window=(None, 0), **given)


@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_kernels_compare_no_start_with_zero(passes):
    """What is traced is lowered and compiled, in each program anew."""
    lse = jax.ShapeDtypeStruct((2, 4, 1040), jnp.float32)
    code, given = (_forward, [Q] * 3)
    if passes == "backward":
        code, given = _backward, [*[Q] * 4, lse, Q]
    counts = _primitives(jax.make_jaxpr(code)(*given).jaxpr, collections.Counter())
    assert not counts["sign"]
    assert not counts["rem"]
    assert sum(counts.values()) < {"forward": 140, "backward": 220}[passes]
