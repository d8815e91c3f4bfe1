"""The kernel of activations: what it takes, what it lowers to, and its numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rewriter.kernels.activations import hopper, hopper_kernel
from rewriter.kernels.shared import hopper as shared
from rewriter.ops import device
from rewriter.ops.elementwise_program import ElementwiseProgram
from rewriter.ops.row_program import FULL
from tests.support.kernels import simulator

FULL_BF16 = (FULL, "bfloat16")


def program(fn: Any, arrays: int, sums: bool) -> ElementwiseProgram:
    scalars = jax.make_jaxpr(fn)(*[jax.ShapeDtypeStruct((), "float32")] * arrays)
    return ElementwiseProgram(
        (FULL_BF16,) * arrays, "bfloat16", sums, str(scalars), scalars
    )


def gelu(x: Any) -> Any:
    return 0.5 * x * (1 + jnp.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def mish(x: Any) -> Any:
    y = jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
    return x * jnp.tanh(jnp.where(x != x, x, y))


def slope(of: Any) -> Any:
    return lambda x, up: jax.jvp(of, (x,), (up,))[1]


FUNCTIONS = {
    "forward": gelu, "gradient": slope(gelu), "gradient and sums": slope(gelu),
    "mish": mish, "gradient of mish": slope(mish),
}  # fmt: skip
PROGRAMS = {
    name: program(fn, 1 + ("gradient" in name), "sums" in name)
    for name, fn in FUNCTIONS.items()
}


def drawn(m: int, d: int, count: int) -> list[np.ndarray]:
    draws = np.random.default_rng(m)
    made = [draws.normal(size=(m, d)) * 2 for _ in range(count)]
    return [x.astype(jnp.bfloat16) for x in made]


def check(found: Any, given: Any, name: str) -> None:
    """Results against the function in float64, rounded once; sums of those."""
    how = PROGRAMS[name]
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in given]
        exact = np.asarray(FUNCTIONS[name](*wide))
    made = np.asarray(found[0], np.float64)
    np.testing.assert_allclose(made, exact, 2.0**-8, 2e-4)
    if how.sums:
        want = made.sum(0)
        np.testing.assert_allclose(np.asarray(found[1]), want, 1e-5, 1e-3)
    assert len(found) == 1 + how.sums


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("m", [8, 12, 128])
def test_simulated(name: str, m: int) -> None:
    how = PROGRAMS[name]
    given = drawn(m, 2048, len(how.inputs))
    with simulator.simulated_activations():
        check(hopper_kernel.computed(how, given), given, name)


def test_supports() -> None:
    how, sums = PROGRAMS["forward"], PROGRAMS["gradient and sums"]
    assert hopper.supports(how, 4096, 3072).ok
    assert hopper.supports(how, 1024, 97).ok
    assert hopper.supports(sums, 4096, 3072).ok
    for one, m, d, why in (
        (how, 1000, 97, "not a multiple of 1024"),
        (sums, 4096, 1536, "whose sums are not supported"),
        (sums, 4094, 1024, "whose sums are not supported"),
    ):
        assert why in hopper.supports(one, m, d).reasons[0].text


@pytest.mark.parametrize("name", PROGRAMS)
def test_lowers_on_a_cpu(name: str) -> None:
    how = PROGRAMS[name]
    given = [jax.ShapeDtypeStruct((4096, 3072), "bfloat16")] * len(how.inputs)
    run = lambda *x: hopper.forward(*x, program=how)
    text = jax.export.export(jax.jit(run), platforms=("cuda",))(*given).mlir_module()
    assert text.count("mosaic_gpu_v2") == 1


on_hopper = pytest.mark.skipif(
    jax.default_backend() != "gpu" or not shared.runs_on(device.attached()).ok,
    reason="needs a Hopper GPU",
)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("size", [(8, 2048), (4096, 3072), (25216, 3072), (100, 1024)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers(name: str, size: tuple[int, int]) -> None:
    how = PROGRAMS[name]
    given = [jnp.asarray(x) for x in drawn(*size, len(how.inputs))]
    first = hopper.forward(*given, program=how)
    check(first, given, name)
    for again, once in zip(hopper.forward(*given, program=how), first, strict=True):
        np.testing.assert_array_equal(np.asarray(again), np.asarray(once))


@pytest.mark.gpu
@on_hopper
def test_every_number() -> None:
    """All numbers of bfloat16: infinite and NaN results where JAX has them."""
    bits = jnp.tile(jnp.arange(1 << 16, dtype=jnp.uint16), 16).reshape(-1, 1024)
    x = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    how = PROGRAMS["forward"]
    (got,) = hopper.forward(x, program=how)
    want = jax.jit(gelu)(x.astype(jnp.float32)).astype(jnp.bfloat16)
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    seen = np.isfinite(want)
    np.testing.assert_allclose(got[seen], want[seen], 2.0**-7, 1e-6)
