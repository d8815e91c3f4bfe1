"""Ragged dot on Hopper: its schedule, what it lowers to, and its numbers on a GPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.ragged.dot import KERNELS, OP, hopper
from rewriter.kernels.ragged.dot.hopper import by_groups, by_rows, config, schedule
from rewriter.kernels.ragged.dot.hopper.config import Tiles
from rewriter.kernels.ragged.dot.ranges import bounds
from rewriter.kernels.shared import pallas_gpu, work_stealing
from rewriter.ops import device
from rewriter.ops.kernel import spec_of, worth_measuring
from rewriter.ops.registry import registry
from tests import slow
from tests.kernels.ragged.test_dot import MODES, exact, exact_grads
from tests.support.kernels import simulator
from tests.support.kernels.simulated_gpu import machine

pytestmark = pytest.mark.once

KERNEL = next(k for k in KERNELS if k.name == "hopper")
PATTERNS = list(itertools.product((0, 1), repeat=8))
"""Which of eight groups have rows."""

SIZES = {  # m, group sizes
    "even": (512, [128] * 4),
    "uneven": (700, [3, 400, 0, 200, 97]),
    "one takes all": (300, [0, 0, 300, 0]),
    "one row": (300, [0, 1, 0]),
    "one row of one": (1, [0, 1, 0]),
    "rows left over": (500, [3, 0, 200]),
    "all empty": (400, [0, 0, 0]),
    "first and last": (1000, [1, 0, 0, 998, 1]),
    "just over": (386, [129, 128, 129]),
    "just under": (382, [127, 127, 128]),
    "ones": (77, [1] * 77),
    "more groups than rows": (5, [0, 1] * 5),
    "too many": (200, [150, 90, 30]),
    "negative": (200, [50, -20, 100]),
}


HARDEST = ("uneven", "one row of one", "just over", "too many")


# ----------------------------------------------------------------- schedule
def ranges(sizes: Any, m: int) -> list[tuple[int, int]]:
    """Each group's rows, and at last those of none: plain Python."""
    made, at = [], 0
    for size in sizes:
        end = min(m, at + max(0, size))
        made.append((at, end))
        at = end
    return [*made, (at, m)]


def check_tiles(sizes: Any, m: int, rows: int, table: Any) -> None:
    """Every row is in exactly one tile, of its own group, in order."""
    count, tiles = int(table[0, 0]), np.asarray(table[1:])
    assert count <= len(tiles) == schedule.most_tiles(m, len(sizes), rows)
    wanted = [
        (g, at, min(rows, end - at))
        for g, (start, end) in enumerate(ranges(sizes, m))
        for at in range(start, end, rows)
    ]
    groups = len(sizes)
    spare = [t for t in tiles[:count] if t[2] == 0]
    assert not spare or sum(sizes) > m
    assert [tuple(t) for t in tiles[: count - len(spare)]] == [
        (min(g, groups - 1), at, n, int(g < groups)) for g, at, n in wanted
    ]
    assert sum(n for _, _, n in wanted) == m


of_rows = jax.jit(schedule.of_rows, static_argnums=(1, 2))


@pytest.mark.parametrize("rows", slow.first(1, [64, 128, 256]))
@pytest.mark.parametrize("case", SIZES)
def test_tiles_of_rows(case: str, rows: int) -> None:
    m, sizes = SIZES[case]
    check_tiles(sizes, m, rows, of_rows(np.array(sizes, "int32"), m, rows))


def test_tiles_of_rows_for_all_patterns_of_empty_groups() -> None:
    for seed, pattern in enumerate(PATTERNS):
        sizes = np.random.default_rng(seed).integers(1, 200, 8) * pattern
        for m in (900, 1700):  # some rows too few, some too many
            check_tiles(sizes, m, 64, of_rows(sizes.astype("int32"), m, 64))


@pytest.mark.parametrize("case", SIZES)
def test_bounds(case: str) -> None:
    m, sizes = SIZES[case]
    starts, ends = bounds(jnp.array(sizes), m)
    assert [*zip(starts.tolist(), ends.tolist(), strict=True)] == ranges(sizes, m)[:-1]


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32"])
def test_sizes_of_other_types(dtype: str) -> None:
    sizes = [200, 0, 120, 255]
    check_tiles(sizes, 700, 64, of_rows(np.array(sizes, dtype), 700, 64))
    starts, ends = bounds(jnp.array(sizes, dtype), 700)
    assert (starts.tolist(), ends.tolist()) == (
        [0, 200, 200, 320],
        [200, 200, 320, 575],
    )


@pytest.mark.parametrize("rows", [1, 5, 8, 64])
@pytest.mark.parametrize("columns", [1, 7])
@pytest.mark.parametrize("width", [1, 4, 8])
def test_every_tile_has_one_place(rows: int, columns: int, width: int) -> None:
    every = range(rows * columns)
    places = [schedule.place(i, rows, columns, width) for i in every]
    assert sorted(places) == [*itertools.product(range(rows), range(columns))]
    traced = jax.jit(jax.vmap(lambda i: schedule.place(i, rows, columns, width)))
    row, column = traced(jnp.arange(rows * columns, dtype=jnp.int32))
    assert [*zip(row.tolist(), column.tolist(), strict=True)] == places
    near = [abs(a[1] - b[1]) <= 1 for a, b in itertools.pairwise(places)]
    assert all(near)


def test_pieces_fill_the_last_step() -> None:
    for rows in (8, 64):
        for valid in range(1, rows):
            filled = np.zeros(rows, int)  # 1 for a valid row, 2 for one of zeros
            filled[valid] += 2
            piece = rows // 2
            while piece:
                real, here, there = schedule.part_of_tile(valid, piece, rows)
                at = here if real else there
                filled[at : at + piece] += 1 if real else 2
                piece //= 2
            assert filled.tolist() == [1] * valid + [2] * (rows - valid)


# ----------------------------------------------------------------- what it takes
def operands(
    m: int = 256, k: int = 128, n: int = 192, g: int = 4, mode: str = "forward",
    dtype: Any = jnp.bfloat16, right: Any = None,
) -> dict[str, Any]:  # fmt: skip
    shape = {"forward": (g, k, n), "transposed": (g, n, k), "contracting": (m, n)}
    return {
        "lhs": jax.ShapeDtypeStruct((m, k), dtype),
        "rhs": jax.ShapeDtypeStruct(shape[mode], right or dtype),
        "group_sizes": jax.ShapeDtypeStruct((g,), jnp.int32),
    }


def spec(
    mode: str = "forward", out: str | None = None, precision: Any = None, **more: Any
) -> Any:
    params = {"mode": mode, "out_dtype": out, "precision": precision}
    return spec_of(OP, operands(mode=mode, **more), params)


@pytest.mark.parametrize("mode", MODES)
def test_supports(mode: str) -> None:
    assert hopper.supports(spec(mode)).ok
    assert hopper.supports(spec(mode, m=1, dtype=jnp.float16)).ok
    assert hopper.supports(spec(mode, out="float32")).ok
    for given, why in (
        (spec(mode, k=100), "k is 100"),
        (spec(mode, n=96), "n is 96"),
        (spec(mode, dtype=jnp.float32), "lhs is float32"),
        (spec(mode, right=jnp.float16), "rhs float16"),
        (spec(mode, out="float16"), "the result is float16"),
        (spec(mode, m=0), "size 0"),
    ):
        verdict = hopper.supports(given)
        assert why in "; ".join(r.text for r in verdict.reasons)
        assert not verdict.ok


@pytest.mark.parametrize("mode", MODES)
def test_what_it_takes_of_float32(mode: str) -> None:
    of = lambda **more: KERNEL.supports(spec(mode, dtype=jnp.float32, **more))
    assert of().ok
    assert of(precision="high").ok
    assert "precision highest" in str(of(precision="highest"))
    assert "rhs bfloat16" in str(of(right=jnp.bfloat16))


def test_other_gpus_are_refused() -> None:
    for name in ("h100", "h200"):
        assert hopper.runs_on(device.named(name)).ok
    assert hopper.runs_on(device.Device("NVIDIA GH200 480GB", "cuda")).ok
    for name in ("a100", "b200", "l40s"):
        assert not hopper.runs_on(device.named(name)).ok
    given = operands(8192, 2048, 2048, 64)
    only = {"ragged_dot": ["hopper", "xla"]}
    call = lambda *x: jax.lax.ragged_dot(*x)
    report = rewriter.explain(call, target="a100", implementation=only)
    (site,) = report(*given.values()).sites
    assert "A100-SXM4-80GB is not a Hopper GPU" in dict(site.not_chosen)["hopper"]


def test_configs_are_pruned() -> None:
    here = device.named("h200")
    for mode in MODES:
        found, pruned = worth_measuring(hopper.SPACE, spec(mode), here, 24)
        assert len(found) >= 4
        assert not pruned
    for bad, code in (
        (Tiles(stages=5), "shared_memory"),
        (Tiles(256, 256), "registers"),
        (Tiles(96), "block_m"),
        (Tiles(64, 64), "block_n"),
        (Tiles(128, 96), "block_n"),
        (Tiles(stages=1), "stages"),
    ):
        codes = [r.code for r in config.fits(bad, spec(), here).reasons]
        assert code in codes


def test_few_rows_a_group_have_small_tiles() -> None:
    here = device.named("h200")
    assert config.default(spec(m=256, g=128), here).block_m == 64
    assert config.default(spec(m=8192, g=8), here) == Tiles()


def test_ops_are_folders() -> None:
    assert "mosaic" not in registry().ops()
    assert "ragged_dot" in registry().ops()


@pytest.mark.parametrize(("m", "g"), [(8192, 64), (32768, 128)])
def test_it_is_chosen_on_hopper_gpus(m: int, g: int) -> None:
    given = operands(m, 2048, 1536, g)
    call = lambda *x: jax.lax.ragged_dot(*x)
    for target in ("h200", "h100"):
        report = rewriter.explain(call, target=target, tune="off")(*given.values())
        (site,) = report.sites
        assert (site.kernel, site.origin) == ("hopper", "estimated")
    (site,) = rewriter.explain(call, target="a100", tune="off")(*given.values()).sites
    assert site.kernel != "hopper"
    artifact = rewriter.export(call, platforms=("cuda",))(*given.values())
    assert artifact.manifest["custom_calls"] == []  # which GPU it is is not known


# ---------------------------------------------------------------------- lowering
def value_and_gradients(given: dict[str, Any], up: Any, **more: Any) -> Any:
    tiles = more.pop("config", None)
    out, residuals = KERNEL.forward(**given, residuals=True, config=tiles, **more)
    assert KERNEL.backward is not None
    grads = KERNEL.backward(
        **given, out=None, residuals=residuals, cotangent=up, config=tiles, **more
    )
    return out, grads["lhs"], grads["rhs"]


LOWERED = [
    ("forward", Tiles(), "bfloat16"),
    ("forward", Tiles(64, 128, 6), "float16"),
    ("transposed", Tiles(256, 128, behind=False), "bfloat16"),
    ("contracting", Tiles(128, 192), "bfloat16"),
    ("forward", Tiles(128, 128, 6, apart=True), "bfloat16"),
    ("transposed", Tiles(claimed=False), "bfloat16"),
    ("contracting", Tiles(64, 256), "float16"),
]


@pytest.mark.parametrize(
    ("mode", "tiles", "dtype"), slow.first(3, LOWERED, several=True)
)
def test_lowers_on_a_cpu(mode: str, tiles: Tiles, dtype: str) -> None:
    given = operands(mode=mode, dtype=jnp.dtype(dtype))
    up = jax.eval_shape(lambda x: OP.reference(**x, mode=mode), given)
    call = jax.jit(lambda x, up: value_and_gradients(x, up, mode=mode, config=tiles))
    exported = jax.export.export(call, platforms=["cuda"])(given, up)
    assert exported.mlir_module().count("mosaic_gpu_v2") >= 3
    assert [x.shape for x in exported.out_avals] == [
        up.shape, given["lhs"].shape, given["rhs"].shape
    ]  # fmt: skip


@pytest.mark.skipif(
    not work_stealing.AVAILABLE, reason="jax 0.11 lets kernels change memory"
)
def test_tiles_are_claimed_in_every_transformation() -> None:
    """What counts them is memory of each call: in loops, branches, checkpoints too."""

    def net(x: Any, ws: Any, sizes: Any) -> Any:
        layer = lambda x, w: KERNEL.forward(lhs=x, rhs=w, group_sizes=sizes)
        x, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, ws)
        return jax.lax.cond(sizes[0] > 3, lambda: layer(x, ws[0]), lambda: x)

    sizes = jnp.full((2, 4), 64, jnp.int32)
    given = (
        jnp.ones((2, 256, 64), jnp.bfloat16),
        jnp.ones((2, 3, 4, 64, 64), "bfloat16"),
    )
    for call in (net, jax.vmap(net)):
        args = [x if call is not net else x[0] for x in (*given, sizes)]
        text = jax.jit(call).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        aliased = re.findall(r"custom_call @mosaic_gpu_v2.*output_operand_alias", text)
        assert len(aliased) == text.count("@mosaic_gpu_v2") == 2


@pytest.mark.skipif(
    not work_stealing.AVAILABLE, reason="jax 0.11 lets kernels change memory"
)
def test_claiming_is_seen_by_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that no one claims are not there."""
    given, _ = make([300, 200], 500, 128, 256, "forward", "bfloat16")

    def no_more(counter: Any, place: Any) -> None:
        del counter
        place[0] = 1 << 20

    with simulator.simulated_ragged_dot():
        monkeypatch.setattr(pallas_gpu, "claim", no_more)
        wrong = KERNEL.forward(**given, config=Tiles(programs=2))
    assert np.isnan(np.asarray(wrong, np.float32)).any()


def test_exports_as_an_op() -> None:
    given = operands(64, 64, 64, 2)
    artifact = rewriter.export(
        lambda *x: jax.lax.ragged_dot(*x),
        platforms=("cuda",),
        implementation={"ragged_dot": ["hopper", "xla"]},
    )(*given.values())
    assert "mosaic_gpu_v2" in artifact.manifest["custom_calls"]


def test_wide_cotangents_are_left_to_xla() -> None:
    """Tensor cores do not multiply float32 with 16 bits."""
    given, up = make([40, 0, 24], 70, 64, 64, "forward", "bfloat16")
    up = up.astype(np.float32)
    arrays = tuple(given.values())
    back = functools.partial(KERNEL.backward, out_dtype="float32", config=Tiles())
    grads = jax.jit(lambda x, up: back(**x, cotangent=up))(given, up)
    want = exact_grads(*arrays, up, "forward")
    for got, x in zip((grads["lhs"], grads["rhs"]), want, strict=True):
        assert got.dtype == jnp.bfloat16
        close(got, x, "bfloat16")


# ----------------------------------------------------------------------- numbers
on_hopper = pytest.mark.skipif(
    jax.default_backend() != "gpu" or not hopper.runs_on(device.attached()).ok,
    reason="needs a Hopper GPU",
)
TOLERANCE = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-5}
"""Of the largest entry: half a unit in the last place, twice."""


def make(
    sizes: list[int], m: int, k: int, n: int, mode: str, dtype: str, seed: int = 0
) -> tuple[dict[str, Any], Any]:
    r = np.random.default_rng(seed)
    g = len(sizes)
    right = {"forward": (g, k, n), "transposed": (g, n, k), "contracting": (m, n)}
    up = (g, k, n) if mode == "contracting" else (m, n)
    lhs, rhs, up = (
        r.standard_normal(x).astype(dtype) for x in ((m, k), right[mode], up)
    )
    return {"lhs": lhs, "rhs": rhs, "group_sizes": np.array(sizes, "int32")}, up


def close(got: Any, want: Any, dtype: str) -> None:
    got = np.asarray(got, np.float64)
    assert got.shape == want.shape
    error = np.abs(got - want).max(initial=0.0)
    assert error <= TOLERANCE[dtype] * max(1.0, np.abs(want).max(initial=0.0))


def check(given: dict[str, Any], up: Any, mode: str, **more: Any) -> None:
    dtype = str(given["lhs"].dtype)
    arrays = given["lhs"], given["rhs"], np.maximum(given["group_sizes"], 0)
    want = (exact(*arrays, mode), *exact_grads(*arrays, up, mode))
    call = jax.jit(lambda x, up: value_and_gradients(x, up, mode=mode, **more))
    for got, x in zip(call(given, up), want, strict=True):
        assert got.dtype == dtype
        close(got, x, dtype)


TILES = [
    Tiles(), Tiles(64, 128, 6), Tiles(256, 128, behind=False), Tiles(128, 192, width=2),
    Tiles(128, 128, 6, apart=True), Tiles(64, 256, apart=True, behind=False),
    Tiles(claimed=False), Tiles(64, 128, 6, claimed=False),
    Tiles(128, 128, 6, apart=True, claimed=False),
]  # fmt: skip


SIMULATED = {  # m, k, n, group sizes
    "several tiles": (230, 128, 320, [70, 0, 130, 20]),
    "rows left over": (200, 64, 128, [3, 0, 90]),
    "many steps": (460, 448, 64, [400, 1, 59]),
    "one row of one": (1, 64, 64, [0, 1]),
}
PAIRS = [
    (case, tiles)
    for case in SIMULATED
    for tiles in (TILES if case == "several tiles" else TILES[:9:4])
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("case", "tiles"), slow.first(5, reversed(PAIRS), several=True), ids=str
)
def test_simulated(case: str, tiles: Tiles, mode: str) -> None:
    """The kernels' own code, a Python thread per warpgroup, few blocks: many turns."""
    m, k, n, sizes = SIMULATED[case]
    few = dataclasses.replace(tiles, programs=2)
    given, _ = make(sizes, m, k, n, mode, "bfloat16")
    want = exact(*given.values(), mode)
    used = sum(sizes)
    given["lhs"][used:] = np.nan
    if mode == "contracting":
        given["rhs"][used:] = np.nan
    with simulator.simulated_ragged_dot():
        got = KERNEL.forward(**given, mode=mode, config=few)
    close(got, want, "bfloat16")


@pytest.mark.parametrize("mode", MODES)
def test_float32_is_multiplied_in_halves(mode: str) -> None:
    """16 of 24 digits are kept, in the rows of every group and of none."""
    given, _ = make([70, 0, 30], 110, 128, 64, mode, "float32")
    want = exact(*given.values(), mode)
    with simulator.simulated_ragged_dot():
        got = KERNEL.forward(**given, mode=mode, config=Tiles(programs=2))
    assert got.dtype == np.float32
    assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()


@pytest.mark.parametrize("mode", ["forward", "contracting"])
def test_the_simulator_sees_barriers_of_other_tiles(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warpgroup that skips a tile must not share the barriers of its parts."""
    given, _ = make([300, 200], 500, 128, 256, mode, "bfloat16")
    tiles = Tiles(128, 128, 3, apart=True, programs=1)
    skipped = lambda self, tile, slot: self.shared["ready"].at[slot]
    monkeypatch.setattr(by_rows._Block, "ready", skipped)
    skipped = lambda self, name, tile, slot: self.shared[name].at[slot]
    monkeypatch.setattr(by_groups.Block, "barrier", skipped)
    monkeypatch.setattr(machine, "PATIENCE_S", 1.0)
    with simulator.simulated_ragged_dot(), pytest.raises(AssertionError):
        KERNEL.forward(**given, mode=mode, config=tiles)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("case", "tiles"),
    [(c, t) for c in SIZES for t in (TILES if c in HARDEST else TILES[:1])],
    ids=str,
)
def test_numbers(case: str, tiles: Tiles, mode: str) -> None:
    m, sizes = SIZES[case]
    check(*make(sizes, m, 192, 320, mode, "bfloat16"), mode, config=tiles)


@pytest.mark.gpu
@on_hopper
def test_numbers_for_all_patterns_of_empty_groups() -> None:
    call = jax.jit(lambda x, up: value_and_gradients(x, up))
    for seed, pattern in enumerate(PATTERNS):
        sizes = np.random.default_rng(seed).integers(1, 200, 8) * pattern
        given, up = make(sizes.tolist(), 900, 128, 64, "forward", "float16", seed)
        arrays = tuple(given.values())
        want = (exact(*arrays, "forward"), *exact_grads(*arrays, up, "forward"))
        for got, x in zip(call(given, up), want, strict=True):
            close(got, x, "float16")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["rows left over", "uneven"])
def test_nan_does_not_leak(case: str, mode: str) -> None:
    """From rows of no group, rows of other groups, and matrices without rows."""
    m, sizes = SIZES[case]
    given, up = make(sizes, m, 128, 192, mode, "bfloat16")
    used = min(m, sum(sizes))
    arrays = given["lhs"], given["rhs"], given["group_sizes"]
    want = [exact(*arrays, mode), *exact_grads(*arrays, up, mode)]
    empty = sizes.index(0)
    given["lhs"][used:] = np.nan
    first, last = 0, sizes[0]  # a whole group, which alone may see it
    given["lhs"][first:last] = np.inf
    if mode == "contracting":
        given["rhs"][used:] = np.nan
    else:
        up[used:], given["rhs"][empty] = np.nan, np.nan
    call = jax.jit(lambda x, up: value_and_gradients(x, up, mode=mode))
    for got, x in zip(call(given, up), want, strict=True):
        got, x = np.asarray(got, np.float64), np.asarray(x)
        if len(got) == len(sizes):
            close(got[1:], x[1:], "bfloat16")
        else:
            close(got[last:], x[last:], "bfloat16")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("mode", MODES)
def test_wide_results(mode: str) -> None:
    m, sizes = SIZES["uneven"]
    given, _ = make(sizes, m, 192, 320, mode, "bfloat16")
    out = KERNEL.forward(**given, mode=mode, out_dtype="float32")
    assert out.dtype == jnp.float32
    close(out, exact(*given.values(), mode), "float32")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_sums_over_many_rows_are_the_same_each_time(tiles: Tiles, mode: str) -> None:
    """Tiles, stages and turns enough that a missing wait would show."""
    r = np.random.default_rng(0)
    sizes = r.multinomial(4096, r.dirichlet(np.full(16, 1.0))).tolist()
    given, _ = make(sizes, 4096, 1024, 1536, mode, "bfloat16")
    call = jax.jit(lambda x: KERNEL.forward(**x, mode=mode, config=tiles))
    first = np.asarray(call(given))
    close(first, exact(*given.values(), mode), "bfloat16")
    for _ in range(20):
        np.testing.assert_array_equal(first, np.asarray(call(given)))
