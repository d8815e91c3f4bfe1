"""Quantized dots on Hopper: what is taken, the numbers, the roundings, the choice."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.quantized_dot import OP, hopper
from rewriter.kernels.quantized_dot.hopper import KERNEL, MANY, Tiles
from rewriter.kernels.quantized_dot.reference import computed
from rewriter.kernels.shared.rounding import in_float32
from rewriter.ops import device
from rewriter.ops.kernel import spec_of, worth_measuring
from rewriter.ops.stored import EIGHT_BITS, numbers_of
from rewriter.ops.widening import by_steps
from tests import slow
from tests.kernels.ragged.test_hopper_dot import on_hopper
from tests.support.kernels import simulator

MODES = ("forward", "transposed")
TAKEN = (*EIGHT_BITS, "int4")
HERE = device.named("h100")
ONCE = "float32 *scale bfloat16"
NARROW = "bfloat16 *scale"


def make(
    m: int, k: int, n: int, groups: int = 1, mode: str = "forward",
    stored: str = "int8", scale: str = "float32",
) -> dict[str, Any]:  # fmt: skip
    r = np.random.default_rng(0)
    shape = (k, n) if mode == "forward" else (n, k)
    if stored == "int8":
        w = r.integers(-127, 128, shape).astype("int8")
    else:
        w = np.asarray(numbers_of(jnp.asarray(r.standard_normal(shape)), stored))
    return {
        "x": r.standard_normal((m, k)).astype("bfloat16"),
        "w": w,
        "w_scale": r.uniform(0.01, 0.03, (groups, n)).astype(scale),
    }


def with_zeros(given: dict[str, Any]) -> dict[str, Any]:
    """Also with zero points of groups, whole numbers and others."""
    shape = given["w_scale"].shape
    zeros = np.random.default_rng(1).uniform(-9, 9, shape)
    zeros[:, ::2] = zeros[:, ::2].round()
    return {**given, "w_zero": zeros.astype("float32")}


SHIFTED = (
    "float32 -zero *scale bfloat16",
    "bfloat16 -zero *scale",
    "bfloat16 *scale +zero",
    "float32 *scale bfloat16 -zero",
    "bfloat16 -8.0 *scale",
    "int32 -8.0 float32 *scale bfloat16",
)
"""Steps with addends."""

REFUSED = ("bfloat16 *scale +zero", "float32 *scale bfloat16 -zero")
"""Those whose rounding the compiler would leave out."""


def structs(**given: Any) -> dict[str, Any]:
    made = make(**given)
    return {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in made.items()}


def spec(widen: str | None = ONCE, mode: str = "forward", **given: Any) -> Any:
    sizes = {"m": 16, "k": 256, "n": 256, **given}
    params = {"widen": widen, "mode": mode}
    return spec_of(OP, structs(mode=mode, **sizes), params)


def wanted(given: dict[str, Any], **params: Any) -> np.ndarray:
    """The result as the program rounds it, in a sum of another order."""
    arrays = {n: jnp.asarray(x) for n, x in given.items()}
    return np.asarray(computed(**arrays, **params), np.float64)


def close(got: Any, want: np.ndarray, limit: float = 1e-5) -> None:
    got = np.asarray(got, np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=limit * np.abs(want).max())


# ----------------------------------------------------------------- what it takes
@pytest.mark.once
def test_supports() -> None:
    for mode in MODES:
        for stored in TAKEN:
            assert hopper.supports(spec(mode=mode, stored=stored)).ok
        assert hopper.supports(spec(mode=mode, groups=4)).ok
        assert hopper.supports(spec(NARROW, mode=mode, m=1)).ok
    for given, why in (
        (spec(k=100), "k is 100"),
        (spec(n=192), "n is 192"),
        (spec(groups=8), "groups of 32 numbers"),
        (spec(stored="uint8"), "rhs is uint8"),
        (spec("float32 *scale"), "does not compute the steps"),
        (spec("bfloat16 /scale"), "does not compute the steps"),
        (spec("int32 -zero float32 *scale bfloat16"), "does not compute the steps"),
    ):
        verdict = hopper.supports(given)
        assert why in "; ".join(r.text for r in verdict.reasons)
        assert not verdict.ok


@pytest.mark.once
@pytest.mark.parametrize("m", [1, 64, 256])
@pytest.mark.parametrize("sizes", [(4096, 14336), (14336, 4096), (8192, 28672)])
def test_configs(m: int, sizes: tuple[int, int]) -> None:
    k, n = sizes
    use = dataclasses.replace(
        spec(), shapes=(("x", (m, k)), ("w", (k, n)), ("w_scale", (1, n)))
    )
    found, _ = worth_measuring(KERNEL.space, use, HERE, 24)
    assert hopper.default(use, HERE) in found
    assert hopper.fits(hopper.default(use, HERE), use, HERE).ok
    assert not hopper.fits(Tiles(splits=5), use, HERE).ok


@pytest.mark.once
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("stored", EIGHT_BITS)
def test_one_rounding_is_that_of_16_bits(stored: str, dtype: str) -> None:
    """Each number of 8 bits times 16-bit factors, and rounded as the program does."""
    every = np.arange(256, dtype=np.uint8).view(stored)
    scale = np.random.default_rng(0).uniform(1e-3, 3.0, (1, 64)).astype(dtype)
    numbers = np.broadcast_to(every[:, None], (256, 64))
    with np.errstate(over="ignore", invalid="ignore"):
        once = (numbers.astype(np.float32) * scale.astype(np.float32)).astype(dtype)
    for widen in (f"{dtype} *scale", f"float32 *scale {dtype}"):
        how = in_float32(widen, dtype)
        assert how is not None
        assert how.steps == (("*", "scale"),)
        got = by_steps(jnp.asarray(numbers), widen, jnp.asarray(scale), None, 0)
        np.testing.assert_array_equal(
            np.asarray(got, np.float32), once.astype(np.float32)
        )


# ------------------------------------------------------------------------ numbers
CONFIGS = [
    Tiles(), Tiles(splits=2), Tiles(block_n=256, stages=5), Tiles(apart=True, stages=5),
    dataclasses.replace(MANY, splits=4),
]  # fmt: skip
SIZES = [((3, 256, 256), 1), ((70, 256, 128), 2), ((5, 512, 384), 4)]
USES = [
    (case, config, widen, mode)
    for i, case in enumerate(SIZES)
    for j, config in enumerate(CONFIGS)
    for widen in (ONCE, NARROW)
    for mode in MODES
    if (i + j) % 2 or mode == "forward"
]


@pytest.mark.parametrize(
    ("case", "config", "widen", "mode"),
    slow.first(4, USES[::-5], several=True),
    ids=str,
)
def test_simulated(case: Any, config: Tiles, widen: str, mode: str) -> None:
    """The kernel's own code, a Python thread per warpgroup, few blocks: many turns."""
    (m, k, n), groups = case
    given = make(m, k, n, groups, mode)
    params = {"widen": widen, "mode": mode, "sums": "float32"}
    few = dataclasses.replace(config, programs=2)
    with simulator.simulated_ragged_dot():
        got = KERNEL.forward(**given, **params, config=few)
    close(got, wanted(given, **params))


@pytest.mark.once
@pytest.mark.parametrize("widen", SHIFTED)
@pytest.mark.parametrize("mode", MODES)
def test_simulated_with_addends(mode: str, widen: str) -> None:
    """Rows of the identity: each rounding is the program's."""
    given = with_zeros(make(128, 128, 128, 2, mode))
    given["x"] = np.eye(128, dtype="bfloat16")
    if "zero" not in widen:
        del given["w_zero"]
    params = {"widen": widen, "mode": mode, "sums": "float32"}
    assert hopper.supports(spec_of(OP, given, params)).ok is (widen not in REFUSED)
    with simulator.simulated_ragged_dot():
        got = KERNEL.forward(**given, **params, config=Tiles(programs=2))
    np.testing.assert_array_equal(np.asarray(got, np.float64), wanted(given, **params))


@pytest.mark.once
@pytest.mark.parametrize("mode", MODES)
def test_simulated_int4(mode: str) -> None:
    given = make(5, 256, 256, 2, mode, "int4")
    params = {"widen": NARROW, "mode": mode, "sums": "float32"}
    config = dataclasses.replace(hopper.PACKED, programs=2)
    with simulator.simulated_ragged_dot():
        got = KERNEL.forward(**given, **params, config=config)
    close(got, wanted(given, **params))


@pytest.mark.once
@pytest.mark.parametrize("splits", [1, 2])
def test_simulated_with_scales_behind_the_product(splits: int) -> None:
    given = make(5, 256, 128)
    params = {"widen": "bfloat16", "behind": "*scale bfloat16", "sums": "float32"}
    with simulator.simulated_ragged_dot():
        config = Tiles(splits=splits, programs=2)
        got = KERNEL.forward(**given, **params, config=config)
    assert got.dtype == jnp.bfloat16
    close(got, wanted(given, **params), 2**-7)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("stored", TAKEN)
@pytest.mark.parametrize("widen", [ONCE, NARROW, "bfloat16", "bfloat16 *0.03125"])
def test_numbers(widen: str, stored: str, config: Tiles, mode: str) -> None:
    for m, groups in ((1, 1), (16, 2), (200, 4)):
        given = make(m, 1024, 384, groups, mode, stored)
        if "scale" not in widen:
            del given["w_scale"]
        params = {"widen": widen, "mode": mode, "sums": "float32"}
        call = functools.partial(KERNEL.forward, **params, config=config)
        got = jax.jit(call)(**given)
        with jax.default_matmul_precision("highest"):
            close(got, wanted(given, **params), 1e-4)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stored", EIGHT_BITS)
def test_every_number_is_rounded_as_in_the_program(stored: str, mode: str) -> None:
    """Rows of the identity: the result is the matrix."""
    k = n = 256
    every = np.arange(256, dtype=np.uint8).view(stored)
    every[~np.isfinite(every.astype(np.float32))] = 0  # would be in all sums
    matrix = np.stack([np.roll(every, i) for i in range(k)])
    scale = np.random.default_rng(0).uniform(0.1, 1.0, (4, n)).astype("float32")
    given = {
        "x": np.eye(k, dtype="bfloat16"),
        "w": (matrix.T if mode == "transposed" else matrix).copy(),
        "w_scale": scale,
    }
    for widen in (ONCE, NARROW):
        params = {"widen": widen, "mode": mode, "sums": "float32"}
        want = wanted(given, **params)
        for config in (Tiles(), Tiles(splits=4), MANY):
            call = functools.partial(KERNEL.forward, **params, config=config)
            np.testing.assert_array_equal(np.asarray(jax.jit(call)(**given)), want)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stored", TAKEN)
@pytest.mark.parametrize("widen", SHIFTED)
def test_addends_are_rounded_as_in_the_program(
    widen: str, stored: str, mode: str
) -> None:
    given = with_zeros(make(256, 256, 256, 4, mode, stored))
    given["x"] = np.eye(256, dtype="bfloat16")
    if "zero" not in widen:
        del given["w_zero"]
    params = {"widen": widen, "mode": mode, "sums": "float32"}
    if not hopper.supports(spec_of(OP, given, params)).ok:
        lossy = widen.startswith("int32") and stored.startswith("float8")
        assert lossy or widen in REFUSED
        return
    got = jax.jit(functools.partial(KERNEL.forward, **params))(**given)
    close(got, wanted(given, **params), 2e-3)  # XLA may fuse a product with a sum


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("mode", MODES)
def test_every_number_of_four_bits(mode: str) -> None:
    k = n = 256
    matrix = (np.arange(k * n).reshape(k, n) % 16 - 8 + np.eye(k, n)).clip(-8, 7)
    own = matrix.T if mode == "transposed" else matrix
    scale = np.random.default_rng(0).uniform(0.1, 1.0, (4, n)).astype("float32")
    given = {
        "x": np.eye(k, dtype="bfloat16"),
        "w": np.asarray(jnp.asarray(own, "int4")),
        "w_scale": scale,
    }
    for widen in (ONCE, NARROW):
        params = {"widen": widen, "mode": mode, "sums": "float32"}
        want = wanted(given, **params)
        for config in (Tiles(), hopper.PACKED, MANY):
            call = functools.partial(KERNEL.forward, **params, config=config)
            np.testing.assert_array_equal(np.asarray(jax.jit(call)(**given)), want)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_sums_are_the_same_each_time(config: Tiles) -> None:
    given = make(64, 4096, 1536, 32)
    call = jax.jit(functools.partial(KERNEL.forward, widen=ONCE, config=config))
    first = np.asarray(call(**given))
    close(first, wanted(given, widen=ONCE), 2**-6)
    for _ in range(20):
        np.testing.assert_array_equal(first, np.asarray(call(**given)))


# ------------------------------------------------------------ the choice, the lowering
LOWERED = [
    (Tiles(splits=2), "forward", "int8"),
    (hopper.PACKED, "transposed", "int4"),
    (MANY, "transposed", "float8_e4m3fn"),
    (hopper.PACKED, "forward", "int4"),
    (Tiles(splits=2), "transposed", "int8"),
    (MANY, "forward", "int8"),
]


@pytest.mark.parametrize(
    ("config", "mode", "stored"), slow.first(1, LOWERED, several=True), ids=str
)
def test_lowers_on_a_cpu(config: Tiles, mode: str, stored: str) -> None:
    given = structs(m=16, k=256, n=256, groups=2, mode=mode, stored=stored)
    given["w_zero"] = given["w_scale"]  # rounded to 16 bits by the steps
    how = {"widen": "bfloat16 -zero *scale", "mode": mode, "config": config}
    call = jax.jit(lambda x: KERNEL.forward(**x, **how))
    exported = jax.export.export(call, platforms=["cuda"])(given)
    assert exported.mlir_module().count("mosaic_gpu_v2") == 1
    assert [x.shape for x in exported.out_avals] == [(16, 256)]


@pytest.mark.gpu
@on_hopper
def test_a_whole_program() -> None:
    """The kernel in a program, and the gradient of rows and scales."""
    given = make(16, 4096, 14336, 1, scale="bfloat16")

    def written(x: Any, w: Any, scale: Any) -> Any:
        return x @ (w.astype(x.dtype) * scale)

    fast = rewriter.optimize(written, implementation={"quantized_dot": "hopper"})
    (site,) = fast.report(*given.values()).sites
    assert site.kernel == "hopper"
    close(fast(*given.values()), wanted(given, widen=NARROW), 2**-6)
    total = lambda f: lambda x, w, s: f(x, w, s).astype("float32").sum()
    got, want = (
        jax.jit(jax.grad(total(f), (0, 2)))(*given.values()) for f in (fast, written)
    )
    for a, b in zip(got, want, strict=True):
        close(a, np.asarray(b, np.float64), 2**-6)
