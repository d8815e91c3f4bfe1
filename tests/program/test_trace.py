"""Tracing keeps what jax.jit means, and hands closed-over values on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rewriter.program import trace
from rewriter.program.trace import Bound


def test_the_program_is_the_functions():
    fn = jax.jit(jnp.sin)
    traced = trace.trace(fn, (1.0,))
    assert traced.kept is trace.trace(jax.jit(jnp.sin), (1.0,)).kept
    assert [e.primitive.name for e in traced.closed_jaxpr.eqns] == ["sin"]
    assert traced.closed_jaxpr.in_avals[0].weak_type


def test_closed_over_arrays_become_constants():
    table, weight = np.eye(3, dtype=bool), jnp.arange(3.0)
    fn = jax.jit(lambda x, y: jnp.where(table, x + y, weight))
    args = (jnp.ones((3, 3)), 2.0)
    traced = trace.trace(fn, args)
    program = traced.closed_jaxpr
    assert len(program.consts) == 2
    assert len(program.in_avals) == 2
    leaves, _ = trace.split(fn, args, {})
    got = jax.jit(lambda *xs: traced.run(Bound.of(program), xs))(*leaves)
    np.testing.assert_array_equal(got, fn(*args))


def test_new_constants_and_forwarded_results():
    fn = jax.jit(lambda x: (x, x + 1, None))
    traced = trace.trace(fn, (jnp.ones(2),))
    names = jax.make_jaxpr(lambda x: [o for o in fn(x) if o is not None])(jnp.ones(2))
    assert len(names.out_avals) == 2
    table = jnp.arange(2.0)
    outs = len(traced.closed_jaxpr.out_avals)
    other = jax.make_jaxpr(lambda x: [x + 1 + 0 * table] * outs)(jnp.ones(2))
    got = traced.run(Bound.of(other), [jnp.ones(2)])
    assert got[2] is None
    np.testing.assert_array_equal(got[1], [2, 2])


def test_same_signature_same_program():
    fn = jax.jit(lambda x: x * 2)
    first, second = (trace.trace(fn, (v,)).closed_jaxpr for v in (1.0, 2.0))
    assert first is second


def test_inlined_functions():
    fn = jax.jit(lambda x: x * 2 + 1, inline=True)
    traced = trace.trace(fn, (jnp.ones(2),))
    assert traced.closed_jaxpr.in_avals[0].shape == (2,)
    got = traced.run(Bound.of(traced.closed_jaxpr), [jnp.ones(2)])
    np.testing.assert_array_equal(got, [3, 3])


def test_shapes_are_enough():
    spec = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    traced = trace.trace(jax.jit(lambda a, *, b: a @ b.T), (spec,), {"b": spec})
    assert traced.closed_jaxpr.out_avals[0].shape == (2, 2)


def test_options_lifted_from_a_jitted_function():
    fn = jax.jit(
        lambda x, n: x * n, static_argnums=1, donate_argnums=0, keep_unused=True,
        compiler_options={"xla_embed_ir_in_executable": True},
    )  # fmt: skip
    options = trace.jit_options(fn, {})
    assert options["static_argnums"] == (1,)
    assert options["donate_argnums"] == (0,)
    assert options["keep_unused"] is True
    assert options["compiler_options"] == {"xla_embed_ir_in_executable": True}
    assert trace.jit_options(fn, {"donate_argnums": ()})["donate_argnums"] == ()


@pytest.mark.parametrize("names", [["x['a']", "y", "flag"], ["x['a']", "y"]])
def test_leaf_names(names):
    fn = jax.jit(lambda x, y, flag=0: x)
    args = ({"a": 1.0}, 2.0) + ((3,) if len(names) == 3 else ())
    assert trace.leaf_names(fn, args, {}) == names


def test_names():
    import functools

    assert trace.name_of(functools.partial(test_names)) == "test_names"
    assert trace.name_of(object()) == "object"
