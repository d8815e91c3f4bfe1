"""Dots of packed numbers and few rows on Hopper: what it takes, numbers, the choice."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.quantized_dot import PACKED
from rewriter.kernels.quantized_dot.few_rows.config import Tiles
from rewriter.kernels.quantized_dot.packed_few_rows import KERNEL, of_numbers, supports
from rewriter.ops import device
from rewriter.ops.kernel import spec_of
from rewriter.ops.packing import Packing, unpacked
from tests import slow
from tests.kernels.ragged.test_hopper_dot import on_hopper
from tests.support.kernels import simulator

HERE = device.named("h200")
ZEROS = "float32 -zero float16 *scale"
ONCE = "float16 -8.0 *scale"
CAST = "float16"
LOOKED_UP = "float32 *scale float16", "float32 float16"
CODEBOOK = tuple(np.linspace(-1, 1, 16).astype("float32").tolist())
PACKINGS = {
    "gptq": ("k words 01234567 unsigned uint8", "forward"),
    "awq": ("n words 04152637 unsigned uint8", "forward"),
    "another order of rows": ("k words 75316420 signed int8", "forward"),
    "transposed": ("k words 01234567 unsigned uint8", "transposed"),
    "an order of transposed": ("k words 40516273 unsigned uint8", "transposed"),
    "bytes of columns": ("n turns low signed int8", "forward"),
    "bytes of transposed": ("k turns high unsigned uint8", "transposed"),
}
CONFIGS = [
    None, Tiles(), Tiles(depth=64, stages=3, turns=3), Tiles(splits=2, stages=2),
    Tiles(256, stages=3, turns=1, across=2), Tiles(256, 64, 4, 2, 1, splits=2),
    Tiles(256, stages=3, turns=3, by_warps=True), Tiles(splits=2, by_warps=True),
]  # fmt: skip


def make(
    name: str, widen: str = ZEROS, m: int = 5, k: int = 512, n: int = 256, z: int = 4
) -> tuple[dict[str, Any], dict[str, Any]]:
    r = np.random.default_rng(0)
    text, mode = PACKINGS[name]
    packing = Packing(*text.split())
    shape = [k, n]
    shape["kn".index(packing.axis)] //= packing.count
    bits = "uint32" if packing.order == "words" else "uint8"
    w = r.integers(0, np.iinfo(bits).max, shape, bits, endpoint=True)
    w = w if mode == "forward" else np.ascontiguousarray(w.T)
    given: dict[str, Any] = {
        "x": r.standard_normal((m, k)).astype("float16"),
        "w": w.view(bits.removeprefix("u")),
    }
    if "scale" in widen:
        given["w_scale"] = r.uniform(0.01, 0.03, (z, n)).astype("float16")
    if "zero" in widen:
        given["w_zero"] = r.integers(0, 16, (z, n)).astype("int32")
    params = {"packing": text, "mode": mode, "widen": widen}
    if widen in LOOKED_UP:
        params["codebook"] = CODEBOOK
    return given, params


def wanted(given: dict[str, Any], params: dict[str, Any]) -> np.ndarray:
    """The result in float64, of a matrix in float16 as the program rounds it."""
    packing = Packing(*params["packing"].split())
    axis = int((packing.axis == "n") != (params["mode"] == "transposed"))
    numbers = np.asarray(unpacked(jnp.asarray(given["w"]), packing, axis))
    numbers = numbers if params["mode"] == "forward" else numbers.T
    k = len(numbers)
    wide = numbers.astype("float32")
    if "codebook" in params:
        wide = np.array(params["codebook"], "float32")[numbers]
    repeated = lambda a: np.repeat(a, k // a.shape[0], 0)
    if "w_zero" in given:
        wide = wide - repeated(given["w_zero"])
    if "-8" in params["widen"]:
        wide = wide - 8
    if "codebook" not in params:
        wide = wide.astype("float16")
    if "w_scale" in given:
        wide = wide * repeated(given["w_scale"])
    wide = wide.astype("float16")
    return given["x"].astype("f8") @ wide.astype("f8")


def near(got: Any, want: np.ndarray) -> bool:
    return bool(np.abs(np.asarray(got, "f8") - want).max() <= 1e-3 * np.abs(want).max())


@pytest.mark.once
def test_supports() -> None:
    for name in PACKINGS:
        assert supports(spec_of(PACKED, *make(name))).ok, name
    given, params = make("gptq")
    use = spec_of(PACKED, given, params)
    numbers = of_numbers(use)
    assert numbers.shape("w") == (512, 256)
    assert numbers.dtype("w") == "uint4"
    halves = {**params, "packing": "k halves low signed int8"}
    many = dict(make("gptq", z=32)[0])
    for spec, why in (
        (spec_of(PACKED, *make("gptq", m=65)), "65 rows"),
        (spec_of(PACKED, {**given, "w": given["w"].astype("int8")}, halves), "half"),
        (spec_of(PACKED, many, params), "fewer than 32 numbers"),
        (dataclasses.replace(use, dtypes=(("x", "float32"), *use.dtypes[1:])), "x is"),
    ):
        verdict = supports(spec)
        assert not verdict.ok
        assert why in "; ".join(r.text for r in verdict.reasons), why
    turned = {**params, "packing": PACKINGS["awq"][0], "mode": "transposed"}
    assert not supports(spec_of(PACKED, given, turned)).ok


USES = [
    (name, config, widen)
    for name in PACKINGS
    for config in CONFIGS
    for widen in (ZEROS, ONCE, CAST, *LOOKED_UP)
    if "transposed" not in name or config is None or config.depth == 128
    if widen not in LOOKED_UP or name in ("gptq", "transposed", "bytes of transposed")
]


@pytest.mark.parametrize(
    ("name", "config", "widen"), slow.first(3, USES[::-5], several=True), ids=str
)
def test_simulated(name: str, config: Tiles | None, widen: str) -> None:
    given, params = make(name, widen)
    config = config or KERNEL.space.default(spec_of(PACKED, given, params), HERE)
    with simulator.simulated_few_rows():
        got = KERNEL.forward(**given, **params, config=config)
    assert near(got, wanted(given, params))


@pytest.mark.once
@pytest.mark.parametrize("name", ["gptq", "awq", "transposed", "bytes of columns"])
@pytest.mark.parametrize("widen", [ZEROS, LOOKED_UP[0]])
@pytest.mark.parametrize("config", [Tiles(), Tiles(256, by_warps=True)], ids=str)
def test_lowers_on_a_cpu(name: str, widen: str, config: Tiles) -> None:
    given, params = make(name, widen)
    if not supports(spec_of(PACKED, given, params)).ok:
        assert "codebook" in params
        return
    call = jax.jit(functools.partial(KERNEL.forward, **params, config=config))
    text = jax.export.export(call, platforms=["cuda"])(**given).mlir_module()
    assert text.count("mosaic_gpu_v2") == 1


@pytest.mark.once
@pytest.mark.parametrize(("m", "chosen"), [(1, True), (64, True), (256, False)])
def test_the_choice(m: int, chosen: bool) -> None:
    """A program of GPTQ, with zero points that are packed too."""
    k, n, z = 4096, 14336, 32

    def numbers(w: Any, axis: int) -> Any:
        shifts = (jnp.arange(8) * 4).reshape([8] + [1] * (1 - axis))
        return (jnp.expand_dims(w, axis + 1) >> shifts) & 15

    def program(x: Any, w: Any, zeros: Any, scales: Any) -> Any:
        w = numbers(w, 0).reshape(z, -1, n) - numbers(zeros, 1).reshape(z, 1, n)
        return x @ (w * scales[:, None]).reshape(k, n)

    struct = jax.ShapeDtypeStruct
    args = (
        struct((m, k), "float16"), struct((k // 8, n), "int32"),
        struct((z, n // 8), "int32"), struct((z, n), "float16"),
    )  # fmt: skip
    (site,) = rewriter.explain(program, target="h200")(*args).sites
    assert site.form == PACKED.name
    assert (site.kernel == "hopper_few_rows") == chosen


# ------------------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("m", [1, 20, 64])
@pytest.mark.parametrize(("name", "config", "widen"), USES, ids=str)
def test_numbers(name: str, config: Tiles | None, widen: str, m: int) -> None:
    given, params = make(name, widen, m)
    spec = spec_of(PACKED, given, params)
    config = config or KERNEL.space.default(spec, HERE)
    if not KERNEL.space.fits(config, spec, HERE).ok:
        config = KERNEL.space.default(spec, HERE)
    got = jax.jit(functools.partial(KERNEL.forward, **params, config=config))(**given)
    assert near(got, wanted(given, params))
