"""Ragged dots of 8-bit rows and matrices on Hopper: numbers, and what it takes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter
from rewriter.kernels.ragged.dot import OP
from rewriter.kernels.ragged.dot.hopper import eight_bits
from rewriter.kernels.ragged.dot.hopper.eight_bits import FEW, KERNEL, MORE
from rewriter.ops import device
from rewriter.ops.kernel import spec_of, worth_measuring
from tests import slow
from tests.kernels.ragged.test_hopper_dot import on_hopper
from tests.support.arrays import stored
from tests.support.kernels import simulator

pytestmark = pytest.mark.once

HERE = device.named("h100")
I8, E4 = "int8", "float8_e4m3fn"
SIZES = (70, 0, 3, 120)


def make(
    kind: str = I8, mode: str = "forward", m: int = 200, k: int = 256, n: int = 192
) -> dict[str, Any]:
    r = np.random.default_rng(0)
    shape = (n, k) if mode == "transposed" else (k, n)
    return {
        "lhs": stored(r, (m, k), kind), "rhs": stored(r, (4, *shape), kind),
        "group_sizes": np.array(SIZES, "int32"),
    }  # fmt: skip


def params(kind: str, mode: str, **more: Any) -> dict[str, Any]:
    return {"mode": mode, "out_dtype": "int32" if kind == I8 else "float32", **more}


def wanted(given: dict[str, Any], mode: str) -> np.ndarray:
    x, w = (np.asarray(given[name], "f8") for name in ("lhs", "rhs"))
    w = w.swapaxes(1, 2) if mode == "transposed" else w
    ends = np.cumsum(SIZES)
    made = np.zeros((len(x), w.shape[2]))
    for g, (size, end) in enumerate(zip(SIZES, ends, strict=True)):
        made[end - size : end] = x[end - size : end] @ w[g]
    return made


CASES = [
    (I8, "forward", MORE), (E4, "transposed", dataclasses.replace(FEW, promoted=2)),
    (I8, "transposed", FEW), (E4, "forward", dataclasses.replace(MORE, promoted=1)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "mode", "config"), slow.first(2, CASES, several=True), ids=str
)
def test_simulated(kind: str, mode: str, config: Any) -> None:
    """The kernel's own code, a Python thread per warpgroup, few blocks: many turns."""
    given = make(kind, mode)
    few = dataclasses.replace(config, programs=2)
    with simulator.simulated_ragged_dot():
        got = KERNEL.forward(**given, **params(kind, mode), config=few)
    want = wanted(given, mode)
    if kind == I8:
        np.testing.assert_array_equal(np.asarray(got, "f8"), want)
    np.testing.assert_allclose(
        np.asarray(got, "f8"), want, rtol=0, atol=1e-6 * np.abs(want).max()
    )


def test_supports() -> None:
    for kind, mode, _ in CASES:
        use = spec_of(OP, make(kind, mode), params(kind, mode))
        assert eight_bits.supports(use).ok
        found, _ = worth_measuring(KERNEL.space, use, HERE, 24)
        assert eight_bits.default(use, HERE) in found
    for given, how, why in (
        (make(k=64), params(I8, "forward"), "k is 64"),
        (make(n=96), params(I8, "forward"), "n is 96"),
        (make(), {"mode": "forward", "out_dtype": "int8"}, "the result is int8"),
        (make("bfloat16"), params(E4, "forward"), "lhs is bfloat16"),
        (make(E4), params(E4, "forward", precision="F32_F32_F32"), "at precision"),
    ):
        verdict = eight_bits.supports(spec_of(OP, given, how))
        assert why in "; ".join(r.text for r in verdict.reasons)


@pytest.mark.parametrize("kind", [I8, E4])
def test_lowers_on_a_cpu(kind: str) -> None:
    call = jax.jit(functools.partial(KERNEL.forward, **params(kind, "forward")))
    exported = jax.export.export(call, platforms=["cuda"])(**make(kind))
    assert exported.mlir_module().count("mosaic_gpu_v2") == 1


def experts(x: Any, w: Any, scale: Any, sizes: Any) -> Any:
    """Rows are rounded by their largest number, and scaled behind the product."""
    s = jnp.max(jnp.abs(x), -1, keepdims=True) / 127
    q = jnp.round(x / s).astype(jnp.int8)
    y = lax.ragged_dot(q, w, sizes, preferred_element_type=jnp.int32)
    of_rows = jnp.repeat(scale, sizes, 0, total_repeat_length=len(x))
    return y.astype(jnp.float32) * s * of_rows


def test_it_is_chosen() -> None:
    struct = jax.ShapeDtypeStruct
    given = (
        struct((8192, 4096), "float32"), struct((16, 4096, 4096), I8),
        struct((16, 4096), "float32"), struct((16,), "int32"),
    )  # fmt: skip
    (site,) = rewriter.explain(experts, target="h100")(*given).sites
    assert site.kernel == "hopper_eight_bits"


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("kind", "mode", "config"), CASES, ids=str)
def test_numbers(kind: str, mode: str, config: Any) -> None:
    for k in (256, 1024):
        given = make(kind, mode, k=k)
        use = spec_of(OP, given, params(kind, mode))
        for one in worth_measuring(KERNEL.space, use, HERE, 24)[0]:
            call = functools.partial(KERNEL.forward, **params(kind, mode), config=one)
            got, want = np.asarray(jax.jit(call)(**given), "f8"), wanted(given, mode)
            digits = 0.0 if kind == I8 else 2.0**-8
            limit = digits * np.abs(want).max()
            np.testing.assert_allclose(got, want, rtol=0, atol=limit)
