"""Losses over a vocabulary on TPUs, without one: numbers, memory, and what compiles."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.linear_cross_entropy import OP, tpu
from rewriter.kernels.linear_cross_entropy.tpu import Tiles
from rewriter.ops.kernel import spec_of
from rewriter.ops.registry import registry
from tests.support.kernels import tpu as on_tpu

KERNEL = registry().kernel(OP.name, "mosaic_tpu")
INF = float("inf")


def structs(n: int, k: int, v: int, dtype: str, bias: bool) -> dict[str, Any]:
    shapes = {"x": (n, k), "w": (k, v), "labels": (n,)}
    shapes |= {"bias": (v,)} if bias else {}
    dtypes = {"labels": "int32"}
    return {a: jax.ShapeDtypeStruct(s, dtypes.get(a, dtype)) for a, s in shapes.items()}


def drawn(n: int, k: int, v: int, dtype: str = "float32", bias: Any = None) -> Any:
    r = np.random.default_rng(n)
    made = {"x": r.normal(size=(n, k)), "w": r.normal(size=(k, v)) * k**-0.5}
    made = {a: jnp.asarray(x, dtype) for a, x in made.items()}
    if bias is not None:
        b = r.normal(size=v)
        b[2:5] = bias
        made["bias"] = jnp.asarray(b, dtype)
    return {**made, "labels": jnp.asarray(r.integers(-1, v + 1, n), "int32")}


def exact(given: Any, how: Any) -> np.ndarray:
    with jax.enable_x64(True):
        wide = {
            a: jnp.asarray(np.asarray(x), x.dtype if a == "labels" else "float64")
            for a, x in given.items()
        }
        return np.asarray(OP.reference(**wide, **how))


CASES: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "edges of all axes": ((70, 200, 330), Tiles(32, 128, 128), None, {}),
    "few numbers": ((3, 8, 11), None, 0.0, {"z_loss": 0.1}),
    "biases of -inf": ((40, 256, 1000), Tiles(16, 128, 256), -INF, {"soft_cap": 5.0}),
    "an infinite bias": ((17, 64, 300), Tiles(16, 128, 128), INF, {"nan_at": "none"}),
    "smoothed": ((40, 128, 1000), Tiles(16, 128, 256), None, {"label_smoothing": 0.1}),
    "fewer classes": ((9, 16, 400), Tiles(16, 128, 128), None,
                      {"used": 301, "outside": "zero", "scale": 0.5}),
    "log probabilities": ((9, 16, 400), None, 0.5,
                          {"outside": "clip", "of_log_probabilities": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_numbers(case: str) -> None:
    sizes, tiles, bias, how = CASES[case]
    given = drawn(*sizes, bias=bias)
    with on_tpu.interpreted():
        got = jax.jit(
            lambda given: tpu.forward(
                **given, config=tiles, precision="highest", **how
            )
        )(given)  # fmt: skip
    want = exact(given, how)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_numbers_in_bfloat16_with_gradients() -> None:
    """As a site: forward by the kernel, and gradients from its sums."""
    given = drawn(48, 64, 700, "bfloat16")
    safe = {**given, "labels": jnp.clip(given["labels"], 0, 699)}
    mean = lambda loss: lambda x, w: loss(x=x, w=w, labels=safe["labels"]).mean()

    def mine(**operands: Any) -> jax.Array:
        logs = jax.nn.log_softmax(operands["x"] @ operands["w"])
        rows = operands["labels"][:, None]
        return -jnp.take_along_axis(logs, rows, 1)[:, 0]

    fast = rewriter.optimize(
        mean(mine), implementation={OP.name: "mosaic_tpu"}, target="tpu_v5e"
    )
    assert [s.kernel for s in fast.report(safe["x"], safe["w"]).sites] == ["mosaic_tpu"]
    with on_tpu.interpreted():
        run = jax.jit(lambda **g: tpu.forward(**g, residuals=True))
        out, (top, weight) = run(**safe)
    space, each = KERNEL.backward_space, jnp.full((48,), 1 / 48)
    grads = KERNEL.backward(
        **safe, out=None, residuals=(top, weight), cotangent=each,
        config=space.default(spec_of(OP, safe, {}), on_tpu.KINDS["v5e"]),
    )  # fmt: skip
    np.testing.assert_allclose(out, exact(safe, {}), rtol=2e-2)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(safe[n], "f8")) for n in ("x", "w")]
        want = jax.grad(mean(OP.reference), (0, 1))(*wide)
        want = [np.asarray(a) for a in want]
    for name, true in zip(("x", "w"), want, strict=True):
        error = np.abs(np.asarray(grads[name], "f8") - true).max()
        assert error <= 2e-2 * np.abs(true).max(), name


def test_memory(capfd: pytest.CaptureFixture[str]) -> None:
    """Two cores, edges on every axis, NaN in memory that was not written."""
    given = drawn(40, 200, 150)
    with on_tpu.simulated(capfd, cores=2):
        got = tpu.forward(**given, config=Tiles(16, 128, 128), precision="highest")
        got = np.asarray(got)
    np.testing.assert_allclose(got, exact(given, {}), rtol=1e-5, atol=1e-5)


def test_supports() -> None:
    def of(*given: Any, **params: Any) -> Any:
        return tpu.supports(spec_of(OP, structs(*given), params))

    assert of(7, 9, 11, "float32", True, precision="high").ok
    for verdict, why in (
        (of(8, 8, 8, "float16", False), "is float16"),
        (of(0, 8, 8, "bfloat16", False), "size 0"),
        (of(8, 8, 8, "bfloat16", False, reduced=True), "split over devices"),
        (of(8, 8, 8, "bfloat16", False, precision="tf32"), "no choice of the compiler"),
    ):
        assert not verdict.ok
        assert why in "; ".join(r.text for r in verdict.reasons)


@pytest.mark.parametrize("kind", on_tpu.KINDS.values())
def test_defaults_fit(kind: Any) -> None:
    for sizes in ((8192, 4096, 128256), (5, 300, 7000)):
        use = spec_of(OP, structs(*sizes, "float32", True), {})
        assert tpu.fits(tpu.default(use, kind), use, kind).ok
    assert not tpu.fits(Tiles(classes=100), use, kind).ok


COMPILED = [(1024, 1024, 32000, "bfloat16", False), (100, 330, 1009, "float32", True)]


@on_tpu.needs_compiler
@pytest.mark.parametrize(
    ("generation", "case"), on_tpu.each_generation(COMPILED), ids=str
)
def test_compiles(generation: str, case: Any) -> None:
    given, here = structs(*case), on_tpu.KINDS[generation]
    how: dict[str, Any] = {}
    if case[3] == "float32":
        how = {"soft_cap": 30.0, "label_smoothing": 0.1, "precision": "highest"}
    tiles = tpu.default(spec_of(OP, given, how), here)
    text = on_tpu.compiled(
        generation, lambda g: tpu.forward(**g, config=tiles, **how), given
    )
    assert text.count('custom_call_target="tpu_custom_call"') == 1
