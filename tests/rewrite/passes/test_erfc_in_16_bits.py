"""`erfc` of 16-bit numbers by fewer operations: as exact as their digits."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import rewriter
from rewriter.ops import device
from rewriter.rewrite.passes.erfc_in_16_bits import PASS, erfc
from rewriter.rewrite.short_erfc import short_erfc

pytestmark = pytest.mark.once

H100 = device.named("h100")
ROUNDED = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Half the distance of numbers, relative to their size."""


def every(dtype: str) -> jax.Array:
    """All numbers of 16 bits, with infinities and NaN."""
    return jax.lax.bitcast_convert_type(jnp.arange(1 << 16, dtype=jnp.uint16), dtype)


@pytest.mark.parametrize("dtype", ROUNDED)
def test_every_number(dtype):
    x = every(dtype)
    with np.errstate(invalid="ignore"):  # NaNs of all kinds
        got, wide = (
            np.asarray(a.astype(jnp.float32)).astype(np.float64)
            for a in (jax.jit(erfc)(x), x)
        )
    want = np.array([math.erfc(v) for v in wide])
    smallest = float(jnp.finfo(dtype).tiny)
    normal = want >= smallest
    error = np.abs(got - want)[normal] / want[normal]
    assert error.max() <= 1.08 * ROUNDED[dtype]
    assert (got[want < smallest] <= smallest).all()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wide))
    assert got[wide == 0].tolist() == [1.0, 1.0]
    assert got[wide == np.inf].tolist() == [0.0]
    assert got[wide == -np.inf].tolist() == [2.0]


def test_in_float32_it_differs_little():
    x = np.linspace(-9, 9, 100001)
    got = np.asarray(short_erfc(jnp.asarray(x, jnp.float32)), np.float64)
    want = np.array([math.erfc(v) for v in np.asarray(x, np.float32).astype(float)])
    assert (np.abs(got / want - 1)).max() < 4e-5  # exp(-81) in float32 alone: 4e-6


def test_derivatives_are_those_of_erfc():
    x = jnp.linspace(-3, 3, 256).astype("bfloat16")
    for order in (jax.grad, lambda f: jax.grad(jax.grad(f))):
        got, want = (
            np.asarray(jax.vmap(order(f))(x), np.float64) for f in (erfc, jax.lax.erfc)
        )
        np.testing.assert_allclose(got, want, rtol=2e-2, atol=1e-2)


LARGE = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)


def gelu(x):
    return jax.nn.gelu(x, approximate=False)


CHANGED: dict[str, Any] = {
    "gelu": gelu,
    "float16": lambda x: gelu(x.astype("float16")),
    "in a jit": jax.jit(gelu),
    "in a loop": lambda x: jax.lax.map(gelu, jnp.stack([x, x])),
    "in a branch": lambda x: jax.lax.cond(x[0, 0] > 0, gelu, jnp.sin, x),
    "checkpointed": lambda x: jax.checkpoint(gelu)(x),
    "gradient": jax.grad(lambda x: gelu(x).astype("float32").sum()),
    "vmap": jax.vmap(gelu),
}
LEFT: dict[str, Any] = {
    "float32": lambda x: gelu(x.astype("float32")),
    "tanh": jax.nn.gelu,
    "erf": jax.lax.erf,
    "small": lambda x: gelu(x[:256]),
}


@pytest.mark.parametrize("name", [*CHANGED, *LEFT])
def test_large_arrays_of_16_bits(name):
    fn = {**CHANGED, **LEFT}[name]
    before = jax.make_jaxpr(fn)(LARGE)
    after, found = PASS(before, H100)
    assert bool(found) == (name in CHANGED)
    if not found:
        assert after is before
        return
    assert " = erfc " not in str(after)
    assert {f.what for f in found} == {"erfc"}
    x = jax.random.normal(jax.random.key(0), LARGE.shape, LARGE.dtype)
    (got,), (want,) = (jaxpr_as_fun(p)(x) for p in (after, before))
    got, want = (np.asarray(y, np.float32) for y in (got, want))
    np.testing.assert_allclose(got, want, rtol=2**-6, atol=2**-8)


def test_other_platforms_stay():
    before = jax.make_jaxpr(gelu)(LARGE)
    for kind in ("cpu", "tpu_v5e"):
        assert PASS(before, device.named(kind)) == (before, ())


def test_in_a_model():
    """Beside a replaced norm; reported, and not where numerics are strict."""

    @jax.grad
    def fn(x, up, down):
        root = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        return jnp.sum((gelu((x * root) @ up) @ down) ** 2)

    like = lambda *shape: jax.ShapeDtypeStruct(shape, "bfloat16")
    given = like(8192, 512), like(512, 2048), like(2048, 512)
    with rewriter.config(target="h100", disable=("activations",)):
        report = rewriter.explain(fn)(*given)
    assert Counter((c.by, c.what) for c in report.changes) == {
        ("recompute_activations", "erfc"): 1,
        ("erfc_in_16_bits", "erfc"): 2,
    }
    assert "by fewer operations, exact to 16 bits" in str(report)
    with rewriter.config(target="h100", numerics="strict"):
        assert rewriter.explain(fn)(*given).changes == ()
