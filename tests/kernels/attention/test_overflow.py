"""Rows that overflow without their maximum are NaN in every kernel, and no others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from rewriter.kernels.attention import OP
from rewriter.kernels.attention.overflow import PARAM, overflows
from rewriter.kernels.attention.ring import supports as ring_supports
from rewriter.ops.kernel import Kernel, spec_of
from rewriter.ops.registry import registry
from tests.support.kernels import simulator, tpu

BY_NAME = {kernel.name: kernel for kernel in registry().kernels("attention")}
B, T, S, N, H = 2, 40, 48, 2, 16
GIVEN = {"scale": 1.0, "window": (None, 8), "unshifted": "float32"}
LARGE, SMALL = slice(0, T, 7), slice(3, T, 7)
"""Rows of the first head whose scores are all large, and all small."""


def operands(dtype: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    q, v = rng.normal(size=(B, T, N, H)), rng.normal(size=(B, S, N, H))
    k = 1 + 0.1 * rng.normal(size=(B, S, N, H))
    q[:, LARGE, 0], q[:, SMALL, 0] = 9, -9  # scores of 144 and -144
    named = {"q": q, "k": k, "v": v}
    return {n: np.asarray(jax.numpy.asarray(x, dtype)) for n, x in named.items()}


def weighed(q: Any, k: Any, v: Any) -> Any:
    """The program: float32, no maximum."""
    numpy, wide = jax.numpy, (x.astype("float32") for x in (q, k, v))
    q, k, v = wide
    keep = np.arange(S)[None] <= np.arange(T)[:, None] + 8
    e = numpy.exp(numpy.where(keep, numpy.einsum("btnh,bsnh->bnts", q, k), -np.inf))
    return numpy.einsum("bnts,bsnh->btnh", e / e.sum(-1, keepdims=True), v)


@contextlib.contextmanager
def as_it_is() -> Iterator[None]:
    yield


WHERE: dict[str, tuple[str, Callable[[], Any]]] = {
    "memory_bounded": ("float32", as_it_is),
    "mosaic_tpu": ("float32", tpu.interpreted),
    "hopper": ("bfloat16", simulator.simulated),
}


def check(kernel: Kernel, dtype: str) -> None:
    named = operands(dtype)
    up = named["q"][..., ::-1].copy()
    want, pull = jax.vjp(weighed, *named.values())
    want_q = np.isnan(np.asarray(pull(up.astype("float32"))[0], np.float32))
    out, saved = kernel.forward(**named, **GIVEN, residuals=True)
    alone = kernel.forward(**named, **GIVEN)
    bad = np.isnan(np.asarray(want)).any(-1)
    assert bad[:, LARGE, 0].all()
    assert bad[:, SMALL, 0].all()
    assert bad.sum() == B * (6 + 6)
    for x in (out, alone):
        x = np.asarray(x, np.float32)
        np.testing.assert_array_equal(np.isnan(x), np.isnan(want))
        np.testing.assert_allclose(x[~bad], np.asarray(want)[~bad], atol=2e-2)
    assert kernel.backward is not None
    grads = kernel.backward(**named, **GIVEN, out=out, residuals=saved, cotangent=up)
    found = {n: np.isnan(np.asarray(g, np.float32)) for n, g in grads.items()}
    np.testing.assert_array_equal(found["q"], want_q)
    assert found["k"][:, :, 0].any()
    assert not found["k"][:, :, 1].any()
    assert not found["v"][:, :, 1].any()


@pytest.mark.parametrize("name", WHERE)
def test_rows_that_overflow(name: str) -> None:
    dtype, where = WHERE[name]
    with where():
        check(BY_NAME[name], dtype)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("name", ["memory_bounded", "hopper"])
def test_rows_that_overflow_on_a_gpu(name: str) -> None:
    check(BY_NAME[name], "bfloat16")


def test_others_refuse() -> None:
    """Kernels that do not give the log-sum-exp of their rows, and rings."""
    wide = np.zeros((B, 256, N, 64), "float16")
    spec = spec_of(OP, dict.fromkeys("qkv", wide), {PARAM: "float32"})
    for name in ("cudnn", "hopper_decode"):
        text = BY_NAME[name].supports(spec).reasons[0].text
        assert "which rows overflow" in text
    assert "overflow" in ring_supports(spec, 2).reasons[0].text
    assert BY_NAME["memory_bounded"].supports(spec).ok


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_its_ends_are_those_of_the_exponential(dtype: str) -> None:
    scores = np.linspace(-120, 120, 481).astype(dtype)
    share = lambda s: jax.numpy.exp(s) / jax.numpy.exp(s)
    want = np.isnan(np.asarray(jax.jit(share)(scores), np.float32))
    got = jax.jit(overflows, static_argnums=1)(scores.astype("float32"), dtype)
    np.testing.assert_array_equal(got, want)
