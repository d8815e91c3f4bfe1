"""Kernels weigh the keys that a mask hides in rows whose other keys a bias hides."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rewriter.kernels.attention import OP
from rewriter.kernels.attention.ring import supports as ring_supports
from rewriter.ops.kernel import Kernel, spec_of
from rewriter.ops.registry import registry
from tests.support.kernels import simulator, tpu

BY_NAME = {kernel.name: kernel for kernel in registry().kernels("attention")}
B, T, S, N, H = 2, 40, 48, 2, 16
LOW = float(jnp.finfo(jnp.float32).min)
SEEN = np.arange(S) <= np.arange(T)[:, None] + 2
LOST, NAN = (slice(0, T, 7), 0), (slice(None), 3, 1)
"""Rows of the first head without visible keys, and one of the second without any."""


def operands(dtype: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    q, up = (rng.normal(size=(B, T, N, H)) for _ in range(2))
    k, v = (rng.normal(size=(B, S, N, H)) for _ in range(2))
    bias = rng.normal(size=(1, N, T, S)).astype(np.float32)
    bias[:, 0, ::7][:, SEEN[::7]] = -np.inf
    bias[:, 0, 0, 30:] = -np.inf  # of the hidden ones, too
    named = {"q": q, "k": k, "v": v, "up": up}
    return {n: jnp.asarray(x, dtype) for n, x in named.items()} | {"bias": bias}


def as_written(fill: float, added: bool) -> Callable[..., Any]:
    """The program in float32."""

    def f(q: Any, k: Any, v: Any, bias: Any) -> Any:
        s = jnp.einsum("btnh,bsnh->bnts", q, k) / 4 + bias
        s = s + jnp.where(SEEN, 0, fill) if added else jnp.where(SEEN, s, fill)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)

    return f


@contextlib.contextmanager
def as_it_is() -> Iterator[None]:
    yield


WHERE: dict[str, tuple[str, Callable[[], Any]]] = {
    "memory_bounded": ("float32", as_it_is),
    "mosaic_tpu": ("float32", tpu.interpreted),
    "hopper": ("bfloat16", simulator.simulated),
}
WAYS = {
    "chosen": (-1e9, False),
    "chosen lowest": (LOW, False),
    "added": (-1e9, True),
    "added lowest": (LOW, True),
}


def check(kernel: Kernel, dtype: str, fill: float, added: bool, lost: bool) -> None:
    named = operands(dtype)
    if not lost:
        named["bias"] = np.where(np.isinf(named["bias"]), 0, named["bias"])
    up, wide = named.pop("up"), {n: x.astype(np.float32) for n, x in named.items()}
    want, pull = jax.vjp(as_written(fill, added), *wide.values())
    given = {"scale": 0.25, "window": (None, 0), "shift": 2, "fill": fill}
    given |= {"fill_passes": added, "open_bias": True}
    out, saved = kernel.forward(**named, **given, residuals=True)
    alone = kernel.forward(**named, **given)
    close = {"rtol": 0, "atol": 1e-4 if dtype == "float32" else 4e-2}
    for x in (out, alone):
        np.testing.assert_allclose(np.float32(x), want, **close)
    assert kernel.backward is not None
    grads = kernel.backward(
        **named, **given, out=out, residuals=saved, cotangent=up
    )  # fmt: skip
    for name, theirs in zip(named, pull(jnp.float32(up)), strict=True):
        np.testing.assert_allclose(np.float32(grads[name]), theirs, **close)


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "finite"])
@pytest.mark.parametrize("way", ["chosen", "added lowest"])
def test_by_tiles(way: str, lost: bool) -> None:
    check(BY_NAME["memory_bounded"], "float32", *WAYS[way], lost)


@pytest.mark.once
@pytest.mark.parametrize("lost", [True, False], ids=["lost", "finite"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WHERE)
def test_in_every_kernel(name: str, way: str, lost: bool) -> None:
    dtype, where = WHERE[name]
    with where():
        check(BY_NAME[name], dtype, *WAYS[way], lost)


def check_low_scores(kernel: Kernel, dtype: str, fill: float, added: bool) -> None:
    """One row of one head scores less than the fill; products are exact."""
    named = {n: np.round(2 * np.asarray(x, np.float32)) / 2
             for n, x in operands("float32").items() if n != "bias"}  # fmt: skip
    named["q"][0, 5, 1], named["k"] = 4 * fill, abs(named["k"])
    up, named = named.pop("up"), {n: jnp.asarray(x, dtype) for n, x in named.items()}
    zero, wide = jnp.zeros((1, 1, 1, 1)), [x.astype("float32") for x in named.values()]
    want, pull = jax.vjp(lambda *x: as_written(fill, added)(*x, zero), *wide)
    given = {"scale": 0.25, "window": (None, 0), "shift": 2, "fill": fill}
    given["fill_passes"] = added
    out, saved = kernel.forward(**named, **given, residuals=True)
    close = {"rtol": 0, "atol": 1e-4 if dtype == "float32" else 4e-2}
    for x in (out, kernel.forward(**named, **given)):
        np.testing.assert_allclose(np.float32(x), want, **close)
    assert kernel.backward is not None
    grads = kernel.backward(
        **named, **given, out=out, residuals=saved, cotangent=jnp.asarray(up, dtype)
    )
    for name, theirs in zip("qkv", pull(jnp.float32(up)), strict=True):
        size = max(1.0, abs(theirs).max())
        np.testing.assert_allclose(
            np.float32(grads[name]) / size, theirs / size, **close
        )


@pytest.mark.parametrize("added", [False, True], ids=["chosen", "added"])
@pytest.mark.parametrize("fill", [-(2.0**12), -(2.0**40)])
def test_low_scores_by_tiles(fill: float, added: bool) -> None:
    check_low_scores(BY_NAME["memory_bounded"], "float32", fill, added)


@pytest.mark.once
@pytest.mark.parametrize("added", [False, True], ids=["chosen", "added"])
@pytest.mark.parametrize("name", ["mosaic_tpu", "hopper"])
def test_low_scores_beside_a_near_fill(name: str, added: bool) -> None:
    dtype, where = WHERE[name]
    with where():
        check_low_scores(BY_NAME[name], dtype, -(2.0**12), added)


def test_fills_that_are_near_are_looked_at() -> None:
    given = operands("bfloat16")
    near, far = (
        spec_of(OP, {n: given[n] for n in "qkv"}, {"fill": fill, "window": (None, 0)})
        for fill in (-1e4, -1e9)
    )
    assert "fill" in str(BY_NAME["cudnn"].supports(near))
    assert "fill" not in str(BY_NAME["cudnn"].supports(far))
    assumes = BY_NAME["hopper"].traits.assumes
    assert assumes is not None
    assert not assumes(near)
    assert "above a mask's fill of -1e+09" in assumes(far)
    assert BY_NAME["memory_bounded"].traits.assumes is None


def test_others_refuse() -> None:
    given = operands("bfloat16")
    del given["up"]
    params = {"fill": -1e9, "empty_rows": "mean", "open_bias": True}
    spec = spec_of(OP, given, params)
    verdict = BY_NAME["cudnn"].supports(spec)
    assert "assume=('finite',)" in str(verdict)
    assert "cannot merge" in str(ring_supports(spec, 2))
