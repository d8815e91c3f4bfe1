"""What TPU kernels share, and that the ways to prove them see what is wrong."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from rewriter.errors import ConfigError
from rewriter.hardware import ahead_of_time
from rewriter.kernels.shared import pallas_tpu
from rewriter.ops.device import Device
from rewriter.ops.tpu import GENERATIONS
from tests.support.arrays import normal
from tests.support.kernels import tpu

A, B = normal(256, 256), normal(256, 384, seed=1)


def product(
    a: Any, b: Any, precision: str | None = None, parallel: int = 2, zeroed: bool = True
) -> Any:
    """A product of matrices in blocks of 128."""

    def body(a_ref: Any, b_ref: Any, out_ref: Any, sum_ref: Any) -> None:
        step = pl.program_id(2)

        @pl.when((step == 0) & zeroed)
        def _() -> None:
            sum_ref[...] = jnp.zeros_like(sum_ref)

        sum_ref[...] += pallas_tpu.dot(a_ref[...], b_ref[...], precision=precision)

        @pl.when(step == pl.num_programs(2) - 1)
        def _() -> None:
            out_ref[...] = sum_ref[...].astype(out_ref.dtype)

    (m, k), n = a.shape, b.shape[1]
    (out,) = pallas_tpu.call(
        body,
        "product",
        pallas_tpu.Grid((m // 128, n // 128, k // 128), parallel),
        [
            pl.BlockSpec((128, 128), lambda i, j, s: (i, s)),
            pl.BlockSpec((128, 128), lambda i, j, s: (s, j)),
        ],
        [pl.BlockSpec((128, 128), lambda i, j, s: (i, j))],
        [pallas_tpu.shaped((m, n), a.dtype, a)],
        [pallas_tpu.VMEM((128, 128), jnp.float32)],
    )(a, b)
    return out


@tpu.needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("generation", [g.name for g in GENERATIONS])
def test_a_kernel_is_compiled_for_each_generation(generation: str, dtype: str) -> None:
    a, b = (jax.ShapeDtypeStruct(x.shape, dtype) for x in (A, B))
    tpu.compiled(generation, lambda a, b: product(a, b, "highest"), a, b)
    with jax.default_matmul_precision("highest"):
        tpu.compiled(generation, product, a, b)


@tpu.needs_compiler
def test_the_compiler_refuses_what_is_too_large() -> None:
    def copied(x: Any, vmem: int) -> Any:
        def body(x_ref: Any, out_ref: Any) -> None:
            out_ref[...] = x_ref[...]

        block = pl.BlockSpec((2048, 1024), lambda i: (i, 0))
        out = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
        grid = pallas_tpu.Grid((4,), 1)
        made = pallas_tpu.call(body, "copied", grid, [block], [block], out, vmem=vmem)
        return made(x)

    x = jax.ShapeDtypeStruct((8192, 1024), jnp.float32)
    with pytest.raises(Exception, match=r"(?i)vmem"):  # its class differs
        tpu.compiled("v5e", lambda x: copied(x, 0), x)
    tpu.compiled("v5e", lambda x: copied(x, 36 << 20), x)


def test_only_tpus_are_compiled_for() -> None:
    with pytest.raises(ConfigError, match="NVIDIA H200"):
        ahead_of_time.compiled(Device("NVIDIA H200", "cuda"), jnp.sin, A)


def test_numbers() -> None:
    with tpu.interpreted():
        got = product(A, B, "highest")
    np.testing.assert_allclose(got, np.asarray(A, np.float64) @ B, atol=1e-4)


def test_memory(capfd: pytest.CaptureFixture[str]) -> None:
    with tpu.simulated(capfd):
        got = product(A, B, "highest")
    np.testing.assert_allclose(got, np.asarray(A, np.float64) @ B, atol=1e-4)


def test_memory_that_was_not_written_is_seen(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with tpu.simulated(capfd):
        got = product(A, B, zeroed=False)
    assert np.isnan(got).all()


def test_cores_that_share_a_block_are_seen(capfd: pytest.CaptureFixture[str]) -> None:
    """The axis that is summed is none to split over two cores."""
    a, b = A[:128], B[:, :128]
    with pytest.raises(Exception, match=r"(?i)race"), tpu.simulated(capfd, cores=2):
        jax.block_until_ready(product(a, b, parallel=3))


@tpu.needs_compiler
def test_programs_see_no_mesh_of_explicit_axes() -> None:
    """JAX has no rule for a ragged dot over one."""
    shapes = ((64, 128), "float32"), ((2, 128, 128), "float32"), ((2,), "int32")
    specs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    program = ahead_of_time.compiled(tpu.KINDS["v5e"], jax.lax.ragged_dot, *specs)
    assert "ragged" in program.as_text()
