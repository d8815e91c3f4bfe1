"""A loop over a symbolic batch gives what the kernel gives for a known one."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from rewriter.kernels.attention import KERNELS, OP
from rewriter.kernels.attention.by_entry import (
    backward_by_entry,
    by_entry,
    forward_by_entry,
)
from rewriter.ops.kernel import spec_of
from rewriter.support.verdict import YES, no
from tests import slow
from tests.support.kernels import tpu

KNOWN = next(k for k in KERNELS if k.name == "memory_bounded")
KNOWN = replace(
    KNOWN, supports=lambda s: no("symbolic", "symbolic") if s.symbolic else YES
)
LOOP = by_entry(KNOWN)
MORE = {
    "none": {},
    "bias of all": {"bias": (1, 4, 24, 24)},
    "bias of each": {"bias": ("b", 1, 24, 24)},
    "slopes": {"alibi": (4,)},
    "sinks": {"sinks": (4,)},
}


def run(kernel, operands, up, **params):
    out, saved = kernel.forward(**operands, **params, residuals=True)
    grads = kernel.backward(
        **operands, **params, out=out, residuals=saved, cotangent=up
    )
    return out, saved, dict(grads)


@pytest.mark.parametrize(
    "name", slow.unless(lambda name: name in ("bias of all", "sinks"), MORE)
)
def test_as_the_kernel(name):
    shapes = (
        dict.fromkeys("qkv", ("b", 24, 4, 16)) | MORE[name] | {"up": ("b", 24, 4, 16)}
    )
    scope = export.SymbolicScope()
    specs = {
        n: jax.ShapeDtypeStruct(
            export.symbolic_shape(", ".join(map(str, s)) + ",", scope=scope),
            jnp.float32,
        )
        for n, s in shapes.items()
    }

    def f(kernel):
        return lambda a: run(
            kernel,
            {n: x for n, x in a.items() if n != "up"},
            a["up"],
            window=(None, 0),
            scale=0.25,
        )

    exported = export.export(jax.jit(f(LOOP)))(specs)
    rng = np.random.default_rng(0)
    for b in (1, 3):
        arrays = {
            n: jnp.asarray(
                rng.normal(size=[b if d == "b" else d for d in s]), jnp.float32
            )
            for n, s in shapes.items()
        }
        got, want = exported.call(arrays), jax.jit(f(KNOWN))(arrays)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_what_it_supports():
    b, t = export.symbolic_shape("b, t")

    def verdict(q, bias=None):
        x = jax.ShapeDtypeStruct(q, jnp.float32)
        operands = {"q": x, "k": x, "v": x}
        if bias:
            operands["bias"] = jax.ShapeDtypeStruct(bias, jnp.float32)
        return LOOP.supports(spec_of(OP, operands, {}))

    assert verdict((b, 24, 4, 16)).ok
    assert verdict((2 * b, 24, 4, 16), (1, 4, 24, 24)).ok
    assert not verdict((b, t, 4, 16)).ok
    assert not verdict((2, t, 4, 16)).ok
    assert not verdict((b, 24, 4, 16), (2, 4, 24, 24)).ok


@pytest.mark.once
@pytest.mark.slow
def test_the_kernel_for_tpus_in_a_loop():
    """As it computes the whole batch, in an interpreter."""
    kernel = next(k for k in KERNELS if k.name == "mosaic_tpu")
    assert kernel.backward is not None
    rng = np.random.default_rng(0)
    shapes = {**dict.fromkeys(("q", "k", "v", "up"), (2, 16, 2, 16)), "sinks": (2,)}
    arrays = {
        n: jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in shapes.items()
    }
    up = arrays.pop("up")
    params = {"window": (None, 0), "scale": 0.25}
    with tpu.interpreted():
        want = run(kernel, arrays, up, **params)
        given = {**arrays, **params, "residuals": True}
        out, saved = forward_by_entry(kernel.forward, given)
        given |= {"out": out, "residuals": saved, "cotangent": up}
        got = out, saved, backward_by_entry(kernel.backward, given)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
