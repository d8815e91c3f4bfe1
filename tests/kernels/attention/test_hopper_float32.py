"""Attention of float32 on Hopper: operands as sums of two numbers of 16 bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rewriter.kernels.attention import hopper
from rewriter.kernels.attention.hopper import backward_kernel, forward_kernel
from rewriter.kernels.attention.hopper.backward_config import BackwardTiles
from rewriter.kernels.attention.hopper.config import Tiles
from rewriter.kernels.shared.halves import Halves, pairs, split
from rewriter.ops.kernel import Spec
from tests.kernels.attention.test_hopper import (
    CAUSAL,
    H200,
    error,
    exact_gradients,
    needs_hopper,
    operands,
    spec,
)
from tests.kernels.attention.test_hopper import split as numbers_of
from tests.support.kernels import simulator

LIMIT = 3e-5
"""Of the relative error. XLA's TF32 is 10 to 50 times less exact."""

ROUNDED = {"out_dtype": "float32"}


def test_halves_keep_sixteen_digits() -> None:
    x = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    x *= np.float32(2.0) ** np.arange(-60, 68).repeat(32)
    high, low = np.asarray(jax.jit(split)(x)).astype(np.float64)
    assert (np.abs(high + low - x) <= 2.0**-16 * np.abs(x)).all()
    assert low.any()  # XLA may drop a cast to 16 bits and back


def test_infinite_scores_stay_infinite() -> None:
    """Products of parts are added up as tensor cores do: in float32, in any order."""
    values = np.float32([np.inf, -np.inf, 0.0, -0.0, 1.0, -1.5, 0.1, -3e38, 1e-30])
    parts = np.asarray(jax.jit(split)(values)).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for i, x in enumerate(values):
            for j, y in enumerate(values):
                left, right = Halves(*parts[:, i]), Halves(*parts[:, j])
                got = np.sum([a * b for a, b in pairs(left, right)], dtype=np.float32)
                want = x * y
                assert np.isnan(got) == np.isnan(want), (x, y)
                if np.isinf(want):
                    assert got == want, (x, y)


def test_products_of_halves_leave_out_that_of_the_small_ones() -> None:
    both, other = Halves("q", "q'"), Halves("k", "k'")
    assert list(pairs(both, other)) == [("q'", "k"), ("q", "k'"), ("q", "k")]
    assert list(pairs(both, "k")) == [("q'", "k"), ("q", "k")]
    assert list(pairs("q", "k")) == [("q", "k")]


SIMULATED: dict[str, tuple[tuple[int, ...], dict[str, Any], Tiles, BackwardTiles]] = {
    "odd": (
        (1, 203, 181, 2, 2, 64, 64), {}, Tiles(64, 2, 2, 3), BackwardTiles(programs=2)
    ),
    "causal, groups": (
        (1, 200, 200, 4, 2, 32, 32), {"window": CAUSAL}, Tiles(64, 2, 3, 2, False),
        BackwardTiles(64, 128, programs=2, ahead=2),
    ),
    "wide, in eights": (
        (1, 136, 136, 1, 1, 128, 128), {"window": (70, 0)}, Tiles(64, 2, 2, 3, False),
        BackwardTiles(32, 32),
    ),
    "other values, lengths": (
        (2, 77, 90, 1, 1, 80, 48), {"kv_lengths": (90, 0), "empty_rows": "mean"},
        Tiles(32), BackwardTiles(),
    ),
    "soft cap": (
        (1, 70, 64, 1, 1, 16, 32), {"softcap": 2.0}, Tiles(64, claimed=True),
        BackwardTiles(claimed=True, programs=1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SIMULATED)
def test_its_code_run_by_threads(name: str) -> None:
    shape, params, tiles, back = SIMULATED[name]
    numbers, params = numbers_of(params, shape[5])
    q, k, v, up = (np.asarray(x) for x in operands(shape, "float32"))
    with simulator.simulated():
        out, residuals = forward_kernel.forward(
            q, k, v, residuals=True, config=tiles, **numbers, **params
        )
        grads = backward_kernel.backward(
            q, k, v, out=out, residuals=residuals, cotangent=up, config=back,
            **numbers, **params,
        )  # fmt: skip
    want = exact_gradients(q, k, v, up, **numbers, **params)
    for got, x in zip((out, *(grads[n] for n in "qkv")), want, strict=True):
        assert got.dtype == np.float32
        assert error(got, x) <= LIMIT


@pytest.mark.parametrize("swapped", [("q", "k", "v"), ("k", "v")])
def test_operands_whose_heads_lie_first(swapped: tuple[str, ...]) -> None:
    q, k, v, _ = (np.asarray(x) for x in operands((1, 70, 90, 2, 1, 32, 32), "float32"))
    with simulator.simulated():
        plain, first = (
            hopper.forward(q=q, k=k, v=v, scale=0.2, **more)
            for more in ({}, {"swapped": swapped})
        )
    np.testing.assert_array_equal(plain, first)


@pytest.mark.parametrize("asked", [None, "default", "high", "TF32_TF32_F32"])
def test_precisions_that_halves_reach(asked: str | None) -> None:
    more = {} if asked is None else {"precision": asked}
    assert hopper.supports(spec(jnp.float32, **more, **ROUNDED)).ok


def test_without_tf32_xla_is_more_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's libraries then multiply all digits."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert "NVIDIA_TF32_OVERRIDE=0" in str(
        hopper.supports(spec(jnp.float32, **ROUNDED))
    )


def mixed(name: str) -> Spec:
    """A use with one operand of 16 bits."""
    given = spec(jnp.float32, **ROUNDED)
    dtypes = tuple((n, "bfloat16" if n == name else x) for n, x in given.dtypes)
    return Spec(**{**vars(given), "dtypes": dtypes})


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (spec(jnp.float32, precision="highest", **ROUNDED), "at precision highest"),
        (spec(jnp.float32, weights="highest", **ROUNDED), "at precision highest"),
        (spec(jnp.float32, precision="F32_F32_F32", **ROUNDED), "F32_F32_F32"),
        (spec(jnp.float32, out_dtype="bfloat16"), "with a q of float32"),
        (mixed("k"), "with a q of float32"),
        (mixed("q"), "of one 16-bit float"),
        (spec(jnp.float32, shape=(2, 256, 4, 256), **ROUNDED), "of shared memory"),
    ],
)
def test_what_it_refuses(given: Spec, why: str) -> None:
    verdict = hopper.supports(given)
    assert not verdict.ok
    assert any(why in reason.text for reason in verdict.reasons), verdict


@pytest.mark.parametrize("h", [16, 64, 80, 128])
@pytest.mark.parametrize("window", [(None, None), CAUSAL])
def test_defaults_fit(h: int, window: Any) -> None:
    given = spec(jnp.float32, (1, 4096, 2, h), window=window, **ROUNDED)
    assert hopper.fits(hopper.default(given, H200), given, H200).ok
    back = hopper.backward_default(given, H200)
    assert hopper.fits_backward(back, given, H200).ok
    assert not back.divided


@pytest.mark.once
@pytest.mark.parametrize("shape", [(1, 256, 2, 64), (1, 203, 2, 128), (1, 203, 2, 80)])
def test_it_is_lowered_without_a_gpu(shape: tuple[int, ...]) -> None:
    x = jax.ShapeDtypeStruct(shape, jnp.float32)

    def both(q: Any, k: Any, v: Any, up: Any) -> Any:
        out, kept = hopper.forward(q=q, k=k, v=v, residuals=True, **ROUNDED)
        more = {"out": out, "residuals": kept, "cotangent": up}
        return out, hopper.backward(q=q, k=k, v=v, **more, **ROUNDED)

    exported = jax.export.export(jax.jit(both), platforms=["cuda"])(x, x, x, x)
    assert exported.mlir_module().count("mosaic_gpu_v2") == 3
    assert {str(x.dtype) for x in exported.out_avals} == {"float32"}


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("t", [512, 577])
@pytest.mark.parametrize("h", [32, 64, 80, 128])
@pytest.mark.parametrize("window", [(None, None), CAUSAL])
def test_numbers(t: int, h: int, window: Any) -> None:
    q, k, v, up = operands((2, t, t, 4, 2, h, h), "float32")
    given = {"window": window, "scale": h**-0.5}

    @jax.jit
    def both(q: Any, k: Any, v: Any, up: Any) -> Any:
        out, kept = hopper.forward(q=q, k=k, v=v, residuals=True, **given)
        more = {"out": out, "residuals": kept, "cotangent": up}
        grads = hopper.backward(q=q, k=k, v=v, **more, **given)
        return out, *(grads[n] for n in "qkv")

    got, again = both(q, k, v, up), both(q, k, v, up)
    want = exact_gradients(q, k, v, up, **given)
    for x, y, z in zip(got, again, want, strict=True):
        assert error(x, z) <= LIMIT
        np.testing.assert_array_equal(x, y)
