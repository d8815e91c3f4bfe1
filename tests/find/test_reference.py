"""References from their traces: the same results and the same gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from rewriter import _jax
from rewriter.find.reference import differentiable, referenced
from rewriter.ops.op import Op, Operand
from rewriter.ops.registry import registry


def test_gradients_from_a_trace_are_those_of_the_reference() -> None:
    op = registry().op("attention")
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, 6, 2, 4)) for key in keys)
    lengths = jnp.array([3, 6])
    params = {"scale": 0.5, "window": (None, 0), "empty_rows": "nan"}

    def both(call):
        def fn(q, k, v):
            given = {"q": q, "k": k, "v": v, "kv_lengths": lengths}
            return call(given)

        out, back = jax.vjp(fn, q, k, v)
        return out, back(jnp.cos(out))

    want = both(lambda given: op.reference(**given, **params))
    for trace in (referenced, differentiable):
        got = both(lambda given, trace=trace: trace(op, given, params))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want
        )


def test_a_reference_that_holds_an_array_is_not_kept() -> None:
    def scaled_by(factor):
        return Op("scaled", (Operand("x", "d", True),), "d", lambda x: x * factor)

    def gradient(factor):
        op = scaled_by(factor)
        x = jnp.ones(3)
        return jax.grad(lambda x: differentiable(op, {"x": x}, {}).sum())(x)

    with jax.checking_leaks():
        np.testing.assert_array_equal(jax.jit(gradient)(jnp.arange(3.0)), [0, 1, 2])
        np.testing.assert_array_equal(jax.jit(gradient)(jnp.full(3, 5.0)), [5, 5, 5])


def test_a_trace_is_one_equation_of_what_it_is_part_of() -> None:
    op = registry().op("attention")
    x = jnp.ones((2, 6, 2, 4))
    given = {"q": x, "k": x, "v": x}
    traced = jax.make_jaxpr(lambda: referenced(op, given, {"scale": 0.5}))()
    assert len(traced.eqns) == 1
    assert len(traced.eqns[0].params["jaxpr"].eqns) > 10


def test_traces_of_our_own_are_those_of_jax() -> None:
    table = np.arange(6.0, dtype=np.float32)

    def code(x, y):
        return [jnp.where(x > 0, y, 1), (x @ y.T) * table[0], jnp.sin(table), 2.0]

    structs = [jax.ShapeDtypeStruct((4, 8), jnp.float32)] * 2
    got, want = _jax.trace_flat(code, structs), jax.make_jaxpr(code)(*structs)
    assert str(got) == str(want)
    x = jnp.ones((4, 8))
    for a, b in zip(jaxpr_as_fun(got)(x, x), code(x, x), strict=True):
        np.testing.assert_array_equal(a, b)
