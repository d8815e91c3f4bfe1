"""Ragged dots of 8-bit matrices on Hopper: what is taken, the numbers, the choice."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.ragged.dot import STORED as OP
from rewriter.kernels.ragged.dot.hopper import stored as hopper
from rewriter.kernels.ragged.dot.hopper.stored import KERNEL, MANY, Tiles
from rewriter.ops import device
from rewriter.ops.kernel import spec_of, worth_measuring
from rewriter.ops.stored import EIGHT_BITS as DTYPES
from rewriter.ops.stored import numbers_of as quantized
from tests import slow
from tests.kernels.ragged.test_dot import exact
from tests.kernels.ragged.test_hopper_dot import SIZES, close, on_hopper
from tests.support.kernels import simulator

MODES = ("forward", "transposed")
HERE = device.named("h200")


def operands(
    m: int = 256, k: int = 128, n: int = 256, g: int = 4, mode: str = "forward",
    rows: str = "bfloat16", stored: str = "int8", scale: bool = True,
) -> dict[str, Any]:  # fmt: skip
    shape = (g, k, n) if mode == "forward" else (g, n, k)
    made = {
        "lhs": jax.ShapeDtypeStruct((m, k), rows),
        "rhs": jax.ShapeDtypeStruct(shape, stored),
        "group_sizes": jax.ShapeDtypeStruct((g,), "int32"),
    }
    if scale:
        made["rhs_scale"] = jax.ShapeDtypeStruct((g, n), "float32")
    return made


def spec(mode: str = "forward", out: str | None = None, **more: Any) -> Any:
    return spec_of(OP, operands(mode=mode, **more), {"mode": mode, "out_dtype": out})


# ----------------------------------------------------------------- what it takes
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_supports(mode: str, stored: str) -> None:
    assert hopper.supports(spec(mode, stored=stored)).ok
    assert hopper.supports(spec(mode, m=1, rows="float16", scale=False)).ok
    assert hopper.supports(spec(mode, out="float32")).ok
    for given, why in (
        (spec(mode, k=100), "k is 100"),
        (spec(mode, n=96), "n is 96"),
        (spec(mode, rows="float32"), "lhs is float32"),
        (spec(mode, stored="uint8"), "rhs is uint8"),
        (spec(mode, out="float16"), "the result is float16"),
        (spec(mode, m=0), "size 0"),
    ):
        verdict = hopper.supports(given)
        assert why in "; ".join(r.text for r in verdict.reasons)
        assert not verdict.ok
    verdict = hopper.supports(spec("forward", n=192))
    assert [r.text for r in verdict.reasons] == ["n is 192, not a multiple of 128"]


@pytest.mark.parametrize("mode", MODES)
def test_configs_are_pruned(mode: str) -> None:
    for m in (16, 4096):
        found, pruned = worth_measuring(KERNEL.space, spec(mode, m=m), HERE, 24)
        assert len(found) >= 3
        assert not pruned
    for bad, code in (
        (Tiles(stages=6), "shared_memory"),
        (Tiles(128, 128), "apart"),
        (Tiles(256, 128, apart=True), "registers"),
        (Tiles(stages=1), "stages"),
    ):
        assert code in [r.code for r in hopper.fits(bad, spec(mode), HERE).reasons]


# ------------------------------------------------------------------------ numbers
def make(
    sizes: list[int], m: int, k: int, n: int, mode: str, rows: str, stored: str,
    scale: bool = True,
) -> dict[str, Any]:  # fmt: skip
    r = np.random.default_rng(0)
    g = len(sizes)
    shape = (g, k, n) if mode == "forward" else (g, n, k)
    matrices = quantized(jnp.asarray(r.standard_normal(shape), "float32"), stored)
    made = {
        "lhs": r.standard_normal((m, k)).astype(rows),
        "rhs": np.array(matrices),
        "group_sizes": np.array(sizes, "int32"),
    }
    if scale:
        made["rhs_scale"] = r.uniform(0.01, 0.03, (g, n)).astype("float32")
    return made


def wanted(given: dict[str, Any], mode: str) -> Any:
    """The result in float64."""
    matrices = given["rhs"].astype(np.float32).astype(np.float64)
    if "rhs_scale" in given:
        scale = given["rhs_scale"].astype(np.float64)
        matrices *= scale[:, :, None] if mode == "transposed" else scale[:, None]
    sizes = np.maximum(given["group_sizes"], 0)
    return exact(given["lhs"].astype(np.float64), matrices, sizes, mode)


TILES = [
    Tiles(), Tiles(64, 128, 8), Tiles(64, 128, apart=True), Tiles(behind=False),
    MANY, dataclasses.replace(MANY, width=2),
]  # fmt: skip
SIMULATED = {  # m, k, n, group sizes
    "several tiles": (230, 128, 384, [70, 0, 130, 20]),
    "rows left over": (200, 64, 128, [3, 0, 90]),
    "many steps": (260, 448, 128, [200, 1, 59]),
    "one row of one": (1, 64, 128, [0, 1]),
}
PAIRS = [(case, tiles) for case in SIMULATED for tiles in TILES[:5]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("case", "tiles"), slow.first(4, PAIRS[::-3], several=True), ids=str
)
def test_simulated(case: str, tiles: Tiles, mode: str) -> None:
    """The kernel's own code, a Python thread per warpgroup, few blocks: many turns."""
    m, k, n, sizes = SIMULATED[case]
    few = dataclasses.replace(tiles, programs=2)
    given = make(sizes, m, k, n, mode, "bfloat16", "int8")
    want = wanted(given, mode)
    given["lhs"][sum(sizes) :] = np.nan
    with simulator.simulated_ragged_dot():
        got = KERNEL.forward(**given, mode=mode, config=few)
    close(got, want, "bfloat16")


@pytest.mark.parametrize("scale", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tiles", [Tiles(), Tiles(64, 512, 2)], ids=str)
def test_numbers_times_scales_are_rounded_as_in_the_program(
    tiles: Tiles, mode: str, scale: str
) -> None:
    """Rows of the identity in each group give the matrices, bit by bit."""
    k, n = 64, 384
    given = make([k, k], 2 * k, k, n, mode, "bfloat16", "int8")
    given["lhs"] = np.concatenate([np.eye(k, dtype="bfloat16")] * 2)
    given["rhs_scale"] = given["rhs_scale"].astype(scale)
    numbers = given["rhs"].swapaxes(1, 2) if mode == "transposed" else given["rhs"]
    scales = given["rhs_scale"].astype(np.float32)[:, None]
    want = (numbers.astype(np.float32) * scales).astype("bfloat16")
    few = dataclasses.replace(tiles, programs=2)
    with simulator.simulated_ragged_dot():
        got = KERNEL.forward(**given, mode=mode, out_dtype="float32", config=few)
    want = want.astype(np.float32).reshape(2 * k, n)
    np.testing.assert_array_equal(np.asarray(got), want)


def test_the_simulator_sees_places_that_are_read_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One place for what is widened would be written while it is multiplied."""
    monkeypatch.setattr("rewriter.kernels.ragged.dot.hopper.widen.PLACES", 1)
    m, k, n, sizes = SIMULATED["many steps"]
    given = make(sizes, m, k, n, "forward", "bfloat16", "int8")
    with simulator.simulated_ragged_dot():
        got = KERNEL.forward(**given, config=Tiles(programs=2))
    with pytest.raises(AssertionError):
        close(got, wanted(given, "forward"), "bfloat16")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stored", DTYPES)
def test_reference(stored: str, mode: str) -> None:
    for scale in (True, False):
        given = make([5, 0, 9], 20, 32, 24, mode, "float32", stored, scale)
        for call in (OP.reference, OP.general):
            close(call(**given, mode=mode), wanted(given, mode), "float32")


@pytest.mark.parametrize("mode", MODES)
def test_cotangent_of_rows(mode: str) -> None:
    """By matrices that are dequantised; of the scale it is the reference's."""
    given = make([40, 0, 24], 70, 64, 128, mode, "bfloat16", "int8")
    up = np.random.default_rng(1).standard_normal((70, 128)).astype("float32")
    rest = {n: x for n, x in given.items() if n != "lhs"}
    f = lambda lhs: OP.reference(lhs=lhs, **rest, mode=mode, out_dtype="float32")
    (want,) = jax.vjp(f, given["lhs"])[1](jnp.asarray(up))
    assert KERNEL.backward is not None
    back = functools.partial(KERNEL.backward, mode=mode, out_dtype="float32")
    got = jax.jit(lambda x, up: back(**x, cotangent=up))(given, up)
    assert got.keys() == {"lhs"}
    close(got["lhs"], np.asarray(want, np.float64), "bfloat16")


CASES = [  # group sizes, tiles, dtype: each with others that are plain
    *((case, TILES[0], "int8") for case in SIZES),
    *(("uneven", tiles, stored) for tiles in TILES for stored in DTYPES),
    *(("one row of one", tiles, "int8") for tiles in TILES[1:]),
]


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("case", "tiles", "stored"), dict.fromkeys(CASES), ids=str)
def test_numbers(case: str, tiles: Tiles, stored: str, mode: str) -> None:
    m, sizes = SIZES[case]
    given = make(sizes, m, 192, 384, mode, "bfloat16", stored)
    got = jax.jit(functools.partial(KERNEL.forward, mode=mode, config=tiles))(**given)
    assert got.dtype == jnp.bfloat16
    close(got, wanted(given, mode), "bfloat16")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", ["bfloat16", "float16"])
@pytest.mark.parametrize("stored", DTYPES)
def test_every_number_of_8_bits(stored: str, rows: str, mode: str) -> None:
    """Rows of the identity: the result is the matrices, times a power of two."""
    k, n = 256, 256
    every = np.arange(256, dtype=np.uint8).view(stored)
    every[~np.isfinite(every.astype(np.float32))] = 0  # would be in all sums
    matrix = np.stack([np.roll(every, i) for i in range(k)])
    scale = np.full((1, n), 0.5, np.float32)
    given = {
        "lhs": np.eye(k, dtype=rows),
        "rhs": (matrix.T if mode == "transposed" else matrix)[None].copy(),
        "group_sizes": np.array([k], np.int32),
        "rhs_scale": scale,
    }
    for config in (Tiles(), MANY):
        call = functools.partial(KERNEL.forward, mode=mode, config=config)
        got = jax.jit(functools.partial(call, out_dtype="float32"))(**given)
        np.testing.assert_array_equal(np.asarray(got), matrix.astype(np.float32) / 2)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("stored", ["float8_e4m3fn", "float8_e5m2"])
def test_nan_stays_in_its_column(stored: str) -> None:
    given = make([40, 0, 24], 70, 64, 128, "forward", "bfloat16", stored)
    want = wanted(given, "forward")
    given["rhs"][0, 3, 5] = np.nan
    given["rhs"][1] = np.nan  # of no row
    given["lhs"][64:] = np.nan  # of no group
    got = np.array(jax.jit(KERNEL.forward)(**given), np.float64)
    assert np.isnan(got[:40, 5]).all()
    got[:40, 5] = want[:40, 5]
    close(got, want, "bfloat16")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("tiles", "stored", "mode"),
    [
        *((tiles, "int8", mode) for tiles in TILES for mode in MODES),
        *((tiles, "float8_e4m3fn", "forward") for tiles in TILES),
    ],
    ids=str,
)
def test_sums_are_the_same_each_time(tiles: Tiles, stored: str, mode: str) -> None:
    """Tiles, stages and turns enough that a missing wait would show."""
    r = np.random.default_rng(0)
    sizes = r.multinomial(1024, r.dirichlet(np.full(16, 1.0))).tolist()
    given = make(sizes, 1024, 1024, 1536, mode, "bfloat16", stored)
    call = jax.jit(functools.partial(KERNEL.forward, mode=mode, config=tiles))
    first = np.asarray(call(**given))
    close(first, wanted(given, mode), "bfloat16")
    for _ in range(20):
        np.testing.assert_array_equal(first, np.asarray(call(**given)))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("stored", DTYPES)
def test_a_whole_program(stored: str) -> None:
    """As a program has it: the kernel is chosen, and the gradient is the program's."""
    r = np.random.default_rng(0)
    sizes = r.multinomial(256, r.dirichlet(np.full(64, 2.0))).tolist()
    given = make(sizes, 256, 2048, 1536, "forward", "bfloat16", stored)
    fast = rewriter.optimize(_written)
    (site,) = fast.report(*given.values()).sites
    assert (site.kernel, site.form) == ("hopper", "quantized_ragged_dot")
    close(fast(*given.values()), wanted(given, "forward"), "bfloat16")
    total = lambda f: lambda x, *rest: f(x, *rest).astype("float32").sum()
    got, want = (jax.jit(jax.grad(total(f)))(*given.values()) for f in (fast, _written))
    close(got, np.asarray(want, np.float64), "bfloat16")


def _written(lhs: Any, rhs: Any, group_sizes: Any, scale: Any) -> Any:
    matrices = (rhs.astype("float32") * scale[:, None]).astype(lhs.dtype)
    return jax.lax.ragged_dot(lhs, matrices, group_sizes)


# ------------------------------------------------------------ the choice, the lowering
@pytest.mark.parametrize("stored", DTYPES)
def test_it_is_chosen_where_few_rows_read_all_matrices(stored: str) -> None:
    few = operands(256, 2048, 1536, 128, stored=stored)
    for target in ("h200", "h100"):
        (site,) = rewriter.explain(_written, target=target)(*few.values()).sites
        assert (site.op, site.form) == ("ragged_dot", "quantized_ragged_dot")
        assert (site.kernel, site.origin) == ("hopper", "estimated")
        assert "xla" in dict(site.not_chosen)
    for target in ("a100", "tpu_v5e", "cpu"):
        (site,) = rewriter.explain(_written, target=target)(*few.values()).sites
        assert (site.op, site.form) == ("ragged_dot", "")


def test_a_ragged_dot_is_left_where_its_kernel_is_asked_for() -> None:
    few = operands(256, 2048, 1536, 128)
    only = {"ragged_dot": ["hopper", "xla"]}
    report = rewriter.explain(_written, target="h200", implementation=only)
    (site,) = report(*few.values()).sites
    assert (site.kernel, site.form) == ("hopper", "")
    assert "rhs bf16" in site.shapes
    assert "forced" in dict(site.not_chosen)["quantized_ragged_dot"]


LOWERED = [
    ("forward", Tiles(), "int8", "bfloat16"),
    ("transposed", MANY, "float8_e4m3fn", "bfloat16"),
    ("forward", Tiles(64, 128, 8), "float8_e5m2", "float16"),
    ("transposed", Tiles(behind=False), "int8", "float16"),
]


@pytest.mark.parametrize(
    ("mode", "tiles", "stored", "rows"), slow.first(2, LOWERED, several=True)
)
def test_lowers_on_a_cpu(mode: str, tiles: Tiles, stored: str, rows: str) -> None:
    given = operands(mode=mode, stored=stored, rows=rows)
    call = jax.jit(lambda x: KERNEL.forward(**x, mode=mode, config=tiles))
    exported = jax.export.export(call, platforms=["cuda"])(given)
    assert exported.mlir_module().count("mosaic_gpu_v2") == 1
    assert [x.shape for x in exported.out_avals] == [(256, 256)]
