"""Ragged dot on TPUs, without one: its steps, numbers, memory, and what compiles."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.hardware import ahead_of_time
from rewriter.kernels.ragged.dot import KERNELS, OP, tpu
from rewriter.kernels.ragged.dot.products import Product, products
from rewriter.kernels.ragged.dot.tpu import config, schedule
from rewriter.kernels.ragged.dot.tpu.config import Tiles, blocks
from rewriter.ops import device
from rewriter.ops.kernel import spec_of, worth_measuring
from tests import slow
from tests.kernels.ragged.test_dot import MODES, exact, exact_grads
from tests.kernels.ragged.test_hopper_dot import SIZES, ranges
from tests.support.kernels import tpu as on_tpu

pytestmark = pytest.mark.once

KERNEL = next(k for k in KERNELS if k.name == "mosaic_tpu")
GENERATIONS = tuple(on_tpu.KINDS)


# ----------------------------------------------------------------- schedule
@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def steps(by: str, sizes: Any, m: int, rows: int) -> Any:
    return getattr(schedule, by)(sizes, m, rows)


def visits(sizes: Any, m: int, rows: int, empty: bool) -> list[tuple[int, int, range]]:
    """(group, tile, its rows in the tile) in plain Python; with groups of no rows?"""
    made = []
    for group, (start, end) in enumerate(ranges(sizes, m)[:-1]):
        for tile in range(start // rows, -(-end // rows) if end > start else 0):
            low, high = max(start - tile * rows, 0), min(end - tile * rows, rows)
            made.append((group, tile, range(low, high)))
        if empty and end <= start:
            made.append((group, -1, range(0)))
    return made


@pytest.mark.parametrize("rows", [16, 128])
@pytest.mark.parametrize("case", SIZES)
def test_every_tile_is_visited(case: str, rows: int) -> None:
    m, sizes = SIZES[case]
    table, count = steps("of_rows", np.array(sizes, "int32"), m, rows)
    table = np.asarray(table).reshape(schedule.FIELDS, -1)
    assert count <= table.shape[1] == schedule.most_steps(m, len(sizes), rows)
    wanted = visits(sizes, m, rows, empty=False)
    got = table[:, :count]
    found = [
        (g, t, range(a, b))
        for g, t, a, b in zip(*got[: schedule.FIRST].tolist(), strict=True)
    ]
    assert found[: len(wanted)] == wanted
    used = {t for _, t, _ in wanted}
    rest = [t for t in range(-(-m // rows)) if t not in used]
    assert [t for _, t, _ in found[len(wanted) :]] == rest
    assert not got[schedule.HIGH, len(wanted) :].any()
    tiles = got[schedule.TILE].tolist()
    assert tiles == sorted(tiles)
    firsts = [t for t, f in zip(tiles, got[schedule.FIRST], strict=True) if f]
    assert firsts == [*range(-(-m // rows))]
    last = wanted[-1] if wanted else (0, 0, range(0))
    for step in range(len(wanted), count):  # what is there already
        assert (got[schedule.GROUP, step], got[schedule.READ, step]) == last[:2]


@pytest.mark.parametrize("rows", [16, 128])
@pytest.mark.parametrize("case", SIZES)
def test_every_group_is_visited(case: str, rows: int) -> None:
    m, sizes = SIZES[case]
    table, count = steps("of_groups", np.array(sizes, "int32"), m, rows)
    got = np.asarray(table).reshape(schedule.FIELDS, -1)[:, :count]
    found = [
        (g, t if b else -1, range(a, b))
        for g, t, a, b in zip(*got[: schedule.FIRST].tolist(), strict=True)
    ]
    assert found == visits(sizes, m, rows, empty=True)
    assert (got[schedule.READ] < -(-m // rows)).all()
    groups = got[schedule.GROUP].tolist()
    assert [g for g, f in zip(groups, got[schedule.FIRST], strict=True) if f] == [
        *range(len(sizes))
    ]
    assert [g for g, f in zip(groups, got[schedule.LAST], strict=True) if f] == [
        *range(len(sizes))
    ]


# ----------------------------------------------------------------- what it takes
def operands(
    m: int = 700, k: int = 256, n: int = 384, g: int = 4, mode: str = "forward",
    dtype: Any = "bfloat16", right: Any = None,
) -> dict[str, Any]:  # fmt: skip
    shape = {"forward": (g, k, n), "transposed": (g, n, k), "contracting": (m, n)}
    return {
        "lhs": jax.ShapeDtypeStruct((m, k), dtype),
        "rhs": jax.ShapeDtypeStruct(shape[mode], right or dtype),
        "group_sizes": jax.ShapeDtypeStruct((g,), jnp.int32),
    }


def spec(mode: str = "forward", out: str | None = None, **more: Any) -> Any:
    precision = more.pop("precision", None)
    params = {"mode": mode, "out_dtype": out, "precision": precision}
    return spec_of(OP, operands(mode=mode, **more), params)


@pytest.mark.parametrize("mode", MODES)
def test_supports(mode: str) -> None:
    for given in (
        spec(mode), spec(mode, m=1, k=1, n=1, g=1), spec(mode, dtype="float32"),
        spec(mode, right="float32"), spec(mode, out="float32"),
        spec(mode, k=7000, n=100), spec(mode, precision="highest"),
    ):  # fmt: skip
        assert tpu.supports(given).ok
    for given, why in (
        (spec(mode, dtype="float16"), "lhs is float16"),
        (spec(mode, out="float16"), "the result is float16"),
        (spec(mode, precision="bf16_bf16_f32_x3"), "no choice of the compiler"),
        (spec(mode, m=0), "size 0"),
        (spec(mode, m=1 << 24), "SMEM"),
    ):
        verdict = tpu.supports(given)
        assert why in "; ".join(r.text for r in verdict.reasons)
        assert not verdict.ok


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [*on_tpu.KINDS.values(), device.Device("", "tpu")])
def test_defaults_fit(kind: device.Device, mode: str) -> None:
    for given in (
        spec(mode, m=8192, k=4096, n=14336, g=8), spec(mode, m=9, k=7000, n=30),
        spec(mode, m=32768, k=2048, n=1536, g=128, dtype="float32"),
        spec(mode, m=1 << 18, g=256, out="float32"),
    ):  # fmt: skip
        for space in (KERNEL.space, KERNEL.backward_space):
            assert space is not None
            assert space.fits(space.default(given, kind), given, kind).ok
            found, _ = worth_measuring(space, given, kind, 24)
            assert found


def test_what_does_not_fit() -> None:
    here, given = on_tpu.KINDS["v5p"], spec(m=8192, k=8192, n=8192, g=8)
    for bad, code in (
        (Tiles(1024, 8192, 4096), "vmem"),
        (Tiles(100), "block_m"),
        (Tiles(block_k=100), "block_k"),
        (Tiles(chunk=8), "chunk"),
    ):
        codes = [r.code for r in config.fits(bad, given, here).reasons]
        assert code in codes
    many = spec(m=1 << 20, g=512)
    assert not config.fits(Tiles(16, chunk=16), many, here).ok


def test_blocks_divide_the_columns_where_they_can() -> None:
    product = Product("forward", 1000, 3072, 14336, 8, (2, 2, 2))
    for most in (128, 512, 1000, 2048):
        b = blocks(product, Tiles(512, most, most))
        assert (product.k % b.k, product.n % b.n) == (0, 0)
        assert max(b.k, b.n) <= most


def test_products_of_a_pass() -> None:
    """The cotangents are products of the operands' own sizes."""
    for mode in MODES:
        given = spec(mode, out="float32")
        (whole,) = products(given)
        left, right = products(given, backward=True)
        assert (whole.mode, whole.items) == (mode, (2, 2, 4))
        assert {whole.mode, left.mode, right.mode} == set(MODES)
        for p in (left, right):
            assert p.m == 700
            assert {p.k, p.n} == {256, 384}
            assert 4 in p.items[:2]
        counted = config.steps(given, Tiles(), Tiles(), "forward_and_vjp")
        assert set(counted) == set(config.NAMES.values())


# ------------------------------------------------------------------------ choice
def site(target: str, mode: str, m: int = 8192, k: int = 4096, n: int = 4096) -> Any:
    given = operands(m, k, n, 16, mode)
    call = lambda **x: OP.reference(**x, mode=mode)
    (found,) = rewriter.explain(call, target=target, tune="off")(**given).sites
    return found


@pytest.mark.parametrize("target", [f"tpu_{g}" for g in GENERATIONS])
def test_it_is_chosen_where_it_is_estimated_to_be_faster(target: str) -> None:
    """Always for groups; on v5p and later XLA multiplies rows as fast."""
    assert site(target, "contracting").kernel == "mosaic_tpu"
    wins = {"forward": ["tpu_v5e"], "transposed": ["tpu_v4", "tpu_v5e", "tpu_v6e",
                                                   "tpu_7x"]}  # fmt: skip
    for mode, where in wins.items():
        found = site(target, mode)
        assert (found.kernel == "mosaic_tpu") == (target in where)
        assert found.origin == "estimated"
        if target not in where:
            assert "estimated to" in dict(found.not_chosen)["mosaic_tpu"]


def test_it_is_not_chosen_for_tpus_of_unknown_kind() -> None:
    artifact = rewriter.export(lambda *x: jax.lax.ragged_dot(*x), platforms=("tpu",))(
        *operands(m=2048).values()
    )
    assert "tpu_custom_call" not in artifact.manifest["custom_calls"]


# ----------------------------------------------------------------------- numbers
def make(
    sizes: list[int], m: int, k: int, n: int, mode: str, dtype: Any, seed: int = 0
) -> tuple[dict[str, Any], Any]:
    r = np.random.default_rng(seed)
    g = len(sizes)
    right = {"forward": (g, k, n), "transposed": (g, n, k), "contracting": (m, n)}
    up = (g, k, n) if mode == "contracting" else (m, n)
    dtype = jnp.dtype(dtype)
    lhs, rhs, up = (
        r.standard_normal(x).astype(dtype) for x in ((m, k), right[mode], up)
    )
    return {"lhs": lhs, "rhs": rhs, "group_sizes": np.array(sizes, "int32")}, up


TOLERANCE = {"float32": 1e-5, "bfloat16": 8e-3}
close = functools.partial(on_tpu.close, tolerance=TOLERANCE)


def check(
    given: dict[str, Any], up: Any, mode: str, tiles: Tiles | None, **more: Any
) -> None:
    """Value and gradients against float64, with NaN in rows of no group."""
    arrays = given["lhs"], given["rhs"], np.maximum(given["group_sizes"], 0)
    want = exact(*arrays, mode), *exact_grads(*arrays, up, mode)
    used = min(len(given["lhs"]), sum(arrays[2]))
    given["lhs"][used:] = np.nan
    (given["rhs"] if mode == "contracting" else up)[used:] = np.nan
    more = {"mode": mode, "config": tiles, **more}

    @jax.jit
    def both(given: Any, up: Any) -> Any:
        out, residuals = tpu.forward(**given, residuals=True, **more)
        given = {**given, "out": None, "residuals": residuals}
        grads = tpu.backward(**given, cotangent=up, **more)
        return out, grads["lhs"], grads["rhs"]

    with on_tpu.interpreted():
        made = both(given, up)
    for got, x in zip(made, want, strict=True):
        close(got, x)


SMALL = Tiles(256, 128, 128, 128, 128)
TILES = [SMALL, Tiles(128, 256, 384, 128, 64), Tiles(512, 512, 256, 256, 32)]
PAIRS = [
    (case, mode)
    for i, case in enumerate(SIZES)
    for mode in (MODES if case == "uneven" else MODES[i % 3 : i % 3 + 1])
]


@pytest.mark.parametrize(("case", "mode"), slow.first(9, PAIRS, several=True))
def test_numbers(case: str, mode: str) -> None:
    m, sizes = SIZES[case]
    check(*make(sizes, m, 200, 330, mode, "float32"), mode, SMALL, precision="highest")


@pytest.mark.parametrize("tiles", slow.first(1, TILES), ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_numbers_in_bfloat16(mode: str, tiles: Tiles) -> None:
    check(*make([70, 0, 300, 20], 430, 260, 390, mode, "bfloat16"), mode, tiles)


@pytest.mark.parametrize("mode", MODES)
def test_mixed_types_and_wide_results(mode: str) -> None:
    given, up = make([70, 0, 130, 20], 230, 64, 130, mode, "bfloat16")
    check(given, up.astype("float32"), mode, None, out_dtype="float32")
    given, up = make([70, 0, 130, 20], 230, 64, 130, mode, "float32")
    given["rhs"] = given["rhs"].astype(jnp.bfloat16)
    check(given, up, mode, SMALL, precision="highest")


def test_matrices_without_rows_do_not_leak() -> None:
    given, _ = make([40, 0, 30], 90, 64, 64, "forward", "float32")
    given["rhs"][1] = np.nan
    with on_tpu.interpreted():
        out = tpu.forward(**given, config=SMALL)
    assert np.isfinite(out).all()
    assert not np.asarray(out)[70:].any()


# ------------------------------------------------------------------------ memory
SIMULATED = [
    ("forward", [70, 0, 90, 20], (200, 128, 256)),
    ("transposed", [0, 100, 0], (130, 300, 130)),
    ("contracting", [0, 70, 0, 90], (200, 128, 256)),
]


@pytest.mark.parametrize(("mode", "sizes", "shape"), SIMULATED)
def test_memory(
    mode: str, sizes: list[int], shape: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two cores, NaN in memory that was not written; columns that do not divide."""
    given, _ = make(sizes, *shape, mode, "float32")
    want = exact(*given.values(), mode)
    tiles = Tiles(64, 256, 128, 128, 32)
    with on_tpu.simulated(capfd, cores=2):
        got = tpu.forward(**given, mode=mode, config=tiles, precision="highest")
        got = np.asarray(got)
    close(got, want)


# ----------------------------------------------------------------------- compiled
CORE = [
    ("forward", (1024, 2048, 1536, 8), "bfloat16", None, None),
    ("transposed", (300, 330, 200, 5), "float32", "highest", "bfloat16"),
    ("contracting", (256, 512, 384, 64), "bfloat16", None, "float32"),
]


@on_tpu.needs_compiler
@pytest.mark.parametrize(("generation", "case"), on_tpu.each_generation(CORE), ids=str)
def test_compiles(generation: str, case: Any) -> None:
    mode, shape, dtype, precision, out = case
    given = operands(*shape, mode, dtype)
    params = {"mode": mode, "precision": precision, "out_dtype": out}
    use, here = spec_of(OP, given, params), on_tpu.KINDS[generation]
    up = jax.eval_shape(lambda x: OP.reference(**x, **params), given)
    first, second = tpu.default(use, here), tpu.default_backward(use, here)

    def both(x: Any, up: Any) -> Any:
        forward = tpu.forward(**x, **params, config=first)
        return forward, tpu.backward(**x, **params, cotangent=up, config=second)

    text = on_tpu.compiled(generation, both, given, up)
    assert text.count('custom_call_target="tpu_custom_call"') == 3


@on_tpu.needs_compiler
def test_no_matrix_is_copied() -> None:
    """XLA transposes all matrices before its own kernel multiplies by them."""
    given = operands(1024, 2048, 2048, 32, "transposed")
    program = ahead_of_time.compiled(
        on_tpu.KINDS["v5e"], lambda x: tpu.forward(**x, mode="transposed"), given
    )
    plain = ahead_of_time.compiled(
        on_tpu.KINDS["v5e"], lambda x: OP.reference(**x, mode="transposed"), given
    )
    matrices = 32 * 2048 * 2048 * 2
    assert program.memory_analysis().temp_size_in_bytes < matrices / 4
    assert plain.memory_analysis().temp_size_in_bytes >= matrices


# ------------------------------------------------------------- the whole engine
FORCED = {"ragged_dot": ["mosaic_tpu", "xla"]}


def loss(lhs: Any, rhs: Any, sizes: Any) -> Any:
    return jnp.sum(jnp.sin(jax.lax.ragged_dot(lhs, rhs, sizes)))


def in_scan(lhs: Any, rhs: Any, sizes: Any) -> Any:
    layer = lambda x, w: (jnp.tanh(jax.lax.ragged_dot(x, w, sizes)), None)
    return jax.lax.scan(layer, lhs, rhs)[0]


WHOLE = {
    "grad": (jax.grad(loss, (0, 1)), (256, 128), (4, 128, 128)),
    "scan": (in_scan, (256, 128), (3, 4, 128, 128)),
}


@pytest.mark.parametrize("how", WHOLE)
def test_programs_for_tpus_hold_it(how: str) -> None:
    function, left, right = WHOLE[how]
    specs = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (left, right)]
    specs.append(jax.ShapeDtypeStruct((4,), jnp.int32))
    fast = rewriter.optimize(function, target="tpu_v5e", implementation=FORCED)
    assert {s.kernel for s in fast.report(*specs).sites} == {"mosaic_tpu"}
    artifact = rewriter.export(fast, platforms=("cpu", "tpu"))(*specs)
    assert "tpu_custom_call" in artifact.manifest["custom_calls"]
    if ahead_of_time.can_compile(on_tpu.KINDS["v5e"]):
        on_tpu.compiled("v5e", fast, *specs)


@on_tpu.needs_compiler
def test_mapped_over_lhs() -> None:
    fast = rewriter.optimize(
        lambda *x: jax.lax.ragged_dot(*x), target="tpu_v5e", implementation=FORCED
    )
    specs = [
        jax.ShapeDtypeStruct(s, d)
        for s, d in (((2, 256, 128), "bfloat16"), ((4, 128, 128), "bfloat16"),
                     ((4,), "int32"))
    ]  # fmt: skip
    on_tpu.compiled("v5e", jax.vmap(fast, (0, None, None)), *specs)


@on_tpu.needs_compiler
def test_in_shard_map() -> None:
    """Rows split over chips, each with group sizes of its own."""
    chips = ahead_of_time.topology("v5e:2x2")
    mesh = jax.sharding.Mesh(np.array(chips), ("x",))
    rows, whole = jax.P("x"), jax.P()
    split = jax.shard_map(
        lambda *x: jax.lax.ragged_dot(*x), mesh=mesh, in_specs=(rows, whole, rows),
        out_specs=rows,
    )  # fmt: skip
    fast = rewriter.optimize(split, target="tpu_v5e", implementation=FORCED)
    given = ((1024, 128), "bfloat16", rows), ((4, 128, 128), "bfloat16", whole)
    specs = [
        jax.ShapeDtypeStruct(s, d, sharding=jax.sharding.NamedSharding(mesh, p))
        for s, d, p in (*given, ((16,), "int32", rows))
    ]
    program = fast.trace(*specs).lower(lowering_platforms=("tpu",)).compile()
    text = program.as_text()
    assert "tpu_custom_call" in text
    assert "all-gather" not in text


def test_patterns_of_empty_groups() -> None:
    """All of them, for five groups."""
    call = jax.jit(lambda x: tpu.forward(**x, config=Tiles(64, 128, 128, 128, 32)))
    with on_tpu.interpreted():
        for seed, pattern in enumerate(itertools.product((0, 1), repeat=5)):
            sizes = np.random.default_rng(seed).integers(1, 60, 5) * pattern
            given, _ = make(sizes.tolist(), 200, 64, 32, "forward", "float32", seed)
            close(call(given), exact(*given.values(), "forward"))
