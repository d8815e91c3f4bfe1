"""References from their traces: the same results and the same gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from rewriter.op import Op
from rewriter.reference import differentiable, referenced
from rewriter.registry import registry


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
        dims = {"x": "d", "out": "d"}
        return Op("scaled", ("x",), ("x",), dims, lambda x: x * factor)

    def gradient(factor):
        op = scaled_by(factor)
        x = jnp.ones(3)
        return jax.grad(lambda x: differentiable(op, {"x": x}, {}).sum())(x)

    with jax.checking_leaks():
        np.testing.assert_array_equal(jax.jit(gradient)(jnp.arange(3.0)), [0, 1, 2])
        np.testing.assert_array_equal(jax.jit(gradient)(jnp.full(3, 5.0)), [5, 5, 5])
