"""Functions of scores inside of `jax.shard_map`, where types say what varies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from rewriter.ops.score import _bound

AUTO = (jax.sharding.AxisType.Auto,)


def test_an_equation_of_what_varies_and_what_does_not() -> None:
    mesh = jax.sharding.AbstractMesh((2,), ("x",), AUTO)
    double = lambda x: _bound(lax.mul_p, {}, x, jnp.arange(4.0))
    parts = jax.shard_map(double, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))
    (out,) = jax.make_jaxpr(parts)(jnp.ones((4, 4))).out_avals
    assert out.shape == (4, 4)
