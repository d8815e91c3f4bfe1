"""Norms on Hopper GPUs: what is taken, what it lowers to, numbers on a simulator."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.norms import hopper_config, hopper_team
from rewriter.kernels.norms.hopper_config import (
    Norm,
    Teams,
    programs_of,
    rows_of,
    shared_memory,
    vector_of,
)
from rewriter.kernels.norms.hopper_kernel import normalized
from rewriter.kernels.shared import hopper, pallas_gpu_rows
from rewriter.ops import device
from rewriter.ops.kernel import spec_of, worth_measuring
from rewriter.ops.registry import registry
from tests.kernels.norms.test_tpu import ALL, OPS, exact, layer, loss, make, names, rms
from tests.slow import first
from tests.support.kernels import addends, bits, extreme_rows, simulator
from tests.support.kernels.simulated_gpu import stand_ins

H200 = device.named("h200")
EPS = 1e-3


def kernel(op: str) -> Any:
    return registry().kernel(op, "hopper")


# ------------------------------------------------------------------ what it takes
def spec(
    op: str, shape: Any, wanted: Any = ALL, dtype: str = "bfloat16", **params: Any
) -> Any:
    given = {"x": jax.ShapeDtypeStruct(shape, dtype)}
    for name in names(op, wanted):
        width = () if name == "epsilon" else shape[-1:]
        given[name] = jax.ShapeDtypeStruct(width, dtype)
    return spec_of(registry().op(op), given, params)


@pytest.mark.parametrize("op", OPS)
def test_supports(op: str) -> None:
    its = kernel(op)
    for given in (spec(op, (1, 128)), spec(op, (384,)), spec(op, (3, 5, 16384)),
                  spec(op, (7, 1152), dtype="float16"), spec(op, (9, 32768), ()),
                  spec(op, (64, 4096), dtype="float32"), spec(op, (7, 96)),
                  spec(op, (7, 16), dtype="float32"), spec(op, (8, 2880)),
                  spec(op, (8, 288), ("scale",), "float32")):  # fmt: skip
        assert its.supports(given).ok
    for given, why in (
        (spec(op, (8, 128), dtype="float64"), "x is float64"),
        (spec(op, (8, 128), dtype="int32"), "x is int32"),
        (spec(op, (8, 128), out_dtype="float64"), "the result is float64"),
        (spec(op, (0, 128)), "holds no numbers"),
        (spec(op, (8, 1000)), "rows of 1000: not a multiple of 128 columns, nor of"),
        (spec(op, (8, 72)), "rows of 72: not a multiple of 128 columns, nor of"),
        (spec(op, (8, 1 << 17)), "KiB of shared memory"),
        (spec(op, (1 << 20, 1 << 11)), "2^31"),
    ):
        verdict = its.supports(given)
        assert why in "; ".join(r.text for r in verdict.reasons)
        assert not verdict.ok


def test_configs_are_pruned() -> None:
    shapes = [(16384, 4096), (8192, 8192), (65536, 1024), (4096, 16384)]
    for op, shape in itertools.product(OPS, shapes):
        for space in (kernel(op).space, kernel(op).backward_space):
            found, pruned = worth_measuring(space, spec(op, shape), H200, 24)
            assert 1 <= len(found) <= 12
            assert not pruned
            assert found[0].warpgroups * found[0].teams == 4
    space, given = kernel("layer_norm").backward_space, spec("layer_norm", (64, 8192))
    for bad, code in (
        (Teams(1, 1, 4, 2), "registers"),
        (Teams(1, 2, 2, 6), "shared_memory"),
        (Teams(1, 4, 4), "warpgroups"),
        (Teams(1, 3, 1), "lanes"),
        (Teams(stages=1), "numbers"),
        (Teams(32, 4, 1), "rows"),
        (Teams(1, 4, 1, 33), "stages"),
    ):
        assert code in [r.code for r in space.fits(bad, given, H200).reasons]


def test_sizes() -> None:
    assert [rows_of(m, Teams(rows=8)) for m in (1, 6, 12, 64)] == [1, 4, 8, 8]
    assert [rows_of(m, Teams(rows=8), True) for m in (1, 12, 64)] == [1, 4, 8]
    for steps, teams in itertools.product((1, 5, 131, 132, 133, 4096, 4097), (1, 3, 8)):
        config = Teams(teams=teams)
        programs = programs_of(steps, config)
        turns = -(-steps // (132 * teams))
        assert 1 <= programs <= 132
        assert programs * teams * turns >= steps
        assert (programs - 1) * teams < steps
    norm = Norm(True, 0.0, 64, 4096, "bfloat16", "float32", (("scale", "bfloat16"),))
    assert vector_of(norm, Teams()) == 4
    least = 12 * 4096 * 6 + 2 * 4096
    assert 0 < shared_memory(norm, Teams(), True) - least < 4096


@pytest.mark.parametrize("norm", [rms, layer])
def test_it_is_chosen_for_gradients_on_hopper_gpus(norm: Any) -> None:
    given = (
        jax.ShapeDtypeStruct((8192, 1024), jnp.bfloat16),
        jax.ShapeDtypeStruct((1024,), jnp.float32),
    )
    both = jax.grad(loss(norm), (0, 1))
    (site,) = rewriter.explain(both, target="h200", tune="off")(*given).sites
    assert (site.kernel, site.origin, site.backward) == ("hopper", "estimated", True)
    (site,) = rewriter.explain(norm, target="h200", tune="off")(*given).sites
    assert site.kernel == "hopper"
    for rows, kernel in ((4096, "hopper"), (1024, "hopper"), (512, "xla")):
        fewer = jax.ShapeDtypeStruct((rows, 1024), jnp.bfloat16), given[1]
        (site,) = rewriter.explain(both, target="h200", tune="off")(*fewer).sites
        assert site.kernel == kernel
    assert "measured for rows of 1024" in dict(site.not_chosen)["hopper"]
    small = (
        jax.ShapeDtypeStruct((4096, 512), jnp.bfloat16),
        jax.ShapeDtypeStruct((512,), jnp.float32),
    )
    (site,) = rewriter.explain(both, target="h100", tune="off")(*small).sites
    assert site.kernel == "hopper"
    narrow = (
        jax.ShapeDtypeStruct((18464, 768), jnp.bfloat16),
        jax.ShapeDtypeStruct((768,), jnp.float32),
    )
    (site,) = rewriter.explain(both, target="h100", tune="off")(*narrow).sites
    assert site.kernel == "hopper"
    (site,) = rewriter.explain(norm, target="h200", tune="off")(*narrow).sites
    assert site.kernel == "hopper"
    fewer = jax.ShapeDtypeStruct((4096, 768), jnp.bfloat16), narrow[1]
    (site,) = rewriter.explain(norm, target="h100", tune="off")(*fewer).sites
    assert site.kernel == "xla"
    heads = (
        jax.ShapeDtypeStruct((262144, 128), jnp.bfloat16),
        given[1].update(shape=(128,)),
    )
    (site,) = rewriter.explain(both, target="h200", tune="off")(*heads).sites
    assert site.kernel == "hopper"
    (site,) = rewriter.explain(both, target="a100", tune="off")(*given).sites
    assert "not a Hopper GPU" in dict(site.not_chosen)["hopper"]
    forced = {op: ["hopper", "xla"] for op in OPS}
    artifact = rewriter.export(both, platforms=("cuda",), implementation=forced)(*given)
    assert "mosaic_gpu_v2" in artifact.manifest["custom_calls"]


# ---------------------------------------------------------------------- lowering
def both(op: str, given: Any, up: Any, out: Any = None, **more: Any) -> dict[str, Any]:
    its, params = kernel(op), {"eps": EPS, "out_dtype": out}
    result, residuals = its.forward(**given, **params, residuals=True, **more)
    grads = its.backward(
        **given, **params, out=None, residuals=residuals, cotangent=up, **more
    )
    return {"out": result, **grads}


def with_addends(
    op: str, given: Any, up: Any, added: Any, **more: Any
) -> dict[str, Any]:
    """As `both`, of a sum, which is a result too."""
    return addends.both(kernel(op), given, up, added, eps=EPS, **more)


def check_addends(op: str, given: Any, up: Any, added: Any, made: Any) -> None:
    """The sum has the bits of one by itself; the rest is compared with float64."""
    total = np.asarray(jax.jit(jnp.add)(given["x"], added["x"]))
    np.testing.assert_array_equal(np.asarray(made["sum"]), total)
    wanted = exact(op, {**given, "x": total}, up, EPS)
    wanted["x"] = wanted["x"] + np.asarray(added["cotangent"], np.float64)
    compare(given, up, {n: y for n, y in made.items() if n != "sum"}, wanted)


LOWERED = [
    ((256, 4096), "bfloat16", ALL, None),
    ((7, 1152), "float32", ("epsilon",), None),
    ((64, 16384), "float16", ("scale", "bias"), None),
    ((4, 16, 512), "bfloat16", ("bias",), Teams(4, 2, 2, 4)),
    ((130, 128), "bfloat16", (), Teams(2, 1, 8, 2)),
    ((64, 2880), "bfloat16", ("scale", "bias"), None),
]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("shape", "dtype", "wanted", "config"), LOWERED)
def test_lowers_on_a_cpu(
    shape: Any, dtype: str, wanted: Any, config: Any, op: str
) -> None:
    given, up = jax.eval_shape(lambda: make(op, shape, wanted, dtype))
    call = jax.jit(lambda x, up: both(op, x, up, config=config))
    exported = jax.export.export(call, platforms=["cuda"])(given, up)
    assert exported.mlir_module().count("mosaic_gpu_v2") == 2
    added = jax.eval_shape(lambda: addends.beside(make(op, shape, wanted, dtype)[0]))
    call = jax.jit(lambda x, up, added: with_addends(op, x, up, added, config=config))
    text = jax.export.export(call, platforms=["cuda"])(given, up, added).mlir_module()
    assert text.count("mosaic_gpu_v2") == 2
    assert "= stablehlo.add" not in text


@pytest.mark.parametrize("op", OPS)
def test_gradients_of_rows_too_wide_are_left_to_xla(op: str) -> None:
    """Sums over rows do not fit into registers, and rows and scale not into memory."""
    given, up = make(op, (3, 24576), ("scale", "bias"))
    grads = kernel(op).backward(
        **given, eps=EPS, out=None, residuals=(), cotangent=up, config=None
    )
    wanted = exact(op, given, up, EPS)
    for name in given:
        np.testing.assert_allclose(grads[name], wanted[name], 1e-4, 1e-4)


# ----------------------------------------------------------------------- numbers
TOLERANCE = {"float32": 2e-5, "bfloat16": 8e-3, "float16": 1e-3}


def check(op: str, given: Any, up: Any, made: Any) -> None:
    compare(given, up, made, exact(op, given, up, EPS))


def compare(given: Any, up: Any, made: Any, wanted: Any) -> None:
    assert set(made) == set(wanted)
    for name, want in wanted.items():
        got = made[name]
        assert got.dtype == (up if name == "out" else given[name]).dtype
        assert got.shape == want.shape
        error = np.abs(np.asarray(got, np.float64) - want).max(initial=0.0)
        size = max(1.0, np.abs(want).max(initial=0.0))
        assert error <= TOLERANCE[str(got.dtype)] * size, name


CASES = {
    "one row": ((1, 128), ALL, Teams()),
    "a vector": ((256,), ("scale",), Teams(2, 2, 1, 2)),
    "fewer rows than teams": ((5, 256), ALL, Teams(1, 2, 4, 3, 2)),
    "one team more than rows": ((3, 5, 384), ("bias",), Teams(1, 1, 4, 2, 4)),
    "many turns": ((77, 512), ALL, Teams(1, 2, 2, 2, 1)),
    "many rows a step": ((96, 256), ("scale", "bias"), Teams(8, 2, 2, 3, 2)),
    "rows that divide by 2": ((46, 256), ALL, Teams(4, 1, 3, 2, 2)),
    "odd rows, four a step": ((47, 384), ("scale", "bias"), Teams(4, 1, 2, 2, 3)),
    "fewer rows than a step has": ((3, 256), ALL, Teams(4, 1, 2, 2)),
    "no operands": ((50, 640), (), Teams(1, 1, 2, 4, 2)),
    "one team": ((21, 1024), ALL, Teams(1, 8, 1, 2, 2)),
    "usual": ((19, 1536), ("scale", "bias"), None),
    "chunks that overlap": ((21, 416), ALL, None),
    "in each of two warpgroups": ((13, 576), ALL, Teams(1, 2, 2, 2, 2)),
    "one overlapping chunk": ((40, 160), ("scale", "bias"), Teams(2, 1, 2, 2, 2)),
}
OVERLAPPING = (
    "chunks that overlap", "odd rows, four a step", "in each of two warpgroups",
)  # fmt: skip
"""Whose last chunk or last step begins earlier."""


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", [*first(5, CASES), *OVERLAPPING[:2]])
def test_simulated(case: str, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' own code, a Python thread per warpgroup."""
    shape, wanted, config = CASES[case]
    given, up = make(op, shape, wanted)
    if case == "fewer rows than teams":
        monkeypatch.setattr(stand_ins, "LATE_S", 0.002)
    with simulator.simulated_norms():
        check(op, given, up, both(op, given, up, config=config))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", first(5, CASES))
def test_addends_simulated(case: str, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, wanted, config = CASES[case]
    given, up = make(op, shape, wanted)
    added = addends.beside(given)
    if case == "fewer rows than teams":
        monkeypatch.setattr(stand_ins, "LATE_S", 0.002)
    with simulator.simulated_norms():
        made = with_addends(op, given, up, added, config=config)
    check_addends(op, given, up, added, made)


@pytest.mark.parametrize("op", OPS)
def test_addends_simulated_in_other_dtypes(op: str) -> None:
    for dtype in ("bfloat16", "float16"):
        given, up = make(op, (37, 768), ALL, dtype)
        added = addends.beside(given)
        with simulator.simulated_norms():
            made = with_addends(op, given, up, added, config=Teams(1, 2, 2, 3, 2))
        check_addends(op, given, up, added, made)


@pytest.mark.parametrize("op", OPS)
def test_addends_that_do_not_fit_are_added_outside(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, up = make(op, (24, 256), ("scale",))
    added = addends.beside(given)
    room = shared_memory(Norm(True, EPS, 24, 256, "float32", "float32", ()),
                         Teams(1, 1, 1, 2), True) + 2048  # fmt: skip
    monkeypatch.setattr(hopper_config, "SHARED_MEMORY", room)
    with simulator.simulated_norms():
        made = with_addends(op, given, up, added)
    check_addends(op, given, up, added, made)


@pytest.mark.parametrize("op", OPS)
def test_simulated_in_other_dtypes(op: str) -> None:
    for dtype in ("bfloat16", "float16"):
        given, up = make(op, (37, 768), ALL, dtype)
        with simulator.simulated_norms():
            check(op, given, up, both(op, given, up, config=Teams(1, 2, 2, 3, 2)))
            wide = both(op, given, up.astype("float32"), "float32")
        check(op, given, up.astype("float32"), wide)


@pytest.mark.parametrize("op", OPS)
def test_extreme_rows_are_as_exact_as_the_formula(op: str) -> None:
    its, config = kernel(op), Teams(1, 2, 2, 2, 2)

    def run(given: Any, up: Any, eps: float) -> Any:
        with simulator.simulated_norms():
            out, kept = its.forward(**given, eps=eps, residuals=True, config=config)
            return {"out": out} | its.backward(
                **given, eps=eps, out=None, residuals=kept, cotangent=up, config=config
            )

    extreme_rows.check(op, 384, run)


@pytest.mark.parametrize("op", OPS)
def test_a_row_of_nan_stays_one(op: str) -> None:
    given, up = make(op, (12, 256), ("scale",))
    wanted = exact(op, given, up, EPS)
    given["x"][5] = np.nan
    with simulator.simulated_norms():
        made = both(op, given, up, config=Teams(2, 2, 2, 2, 2))
    for name in ("out", "x"):
        assert np.isnan(made[name][5]).all()
        rest = [np.delete(y[name], 5, 0) for y in (made, wanted)]
        np.testing.assert_allclose(*rest, 1e-4, 1e-4)


def wrong(op: str, config: Teams) -> bool:
    """Whether the simulator finds the kernel at fault."""
    given, up = make(op, (40, 256), ("scale",))
    with simulator.simulated_norms():
        try:
            check(op, given, up, both(op, given, up, config=config))
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("op", OPS)
def test_the_simulator_sees_faults(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    team, config = hopper_team.Team, Teams(1, 2, 2, 2, 1)
    means, refill = team.means, team.refill
    monkeypatch.setattr(stand_ins, "LATE_S", 0.002)
    assert not wrong(op, config)
    # Sums go where a slower warp still reads the last ones.
    monkeypatch.setattr(team, "means", lambda self, terms, _: means(self, terms, 0))
    assert wrong(op, config)
    monkeypatch.setattr(team, "means", means)
    # Rows are overwritten that are still read.
    monkeypatch.setattr(team, "refill", lambda self, turn: refill(self, turn + 1))
    assert wrong(op, config)


@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 8, 32])
def test_sums_over_a_warp(
    count: int, warpgroups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lanes exchange, with an array of all lanes for each of their numbers."""
    threads = np.arange(512)
    shared = np.full((4 // warpgroups, count, 4 * warpgroups), np.nan)

    def store(value: Any, _: Any, place: Any) -> None:
        team = threads // (128 * warpgroups)
        shared[(team, *place)] = value  # one of those to the same place wins
        np.testing.assert_array_equal(shared[(team, *place)], value)

    compared = SimpleNamespace(ne=np.not_equal)
    arith = SimpleNamespace(
        andi=np.bitwise_and, shrui=np.right_shift, remui=np.remainder, addi=np.add,
        addf=np.add, select=np.where, CmpIPredicate=compared,
        cmpi=lambda compare, a, b: compare(a, b), extui=lambda _, x: x.astype(int),
        index_cast=lambda _, x: x,
    )  # fmt: skip
    types = SimpleNamespace(
        IntegerType=SimpleNamespace(get_signless=lambda _: None),
        IndexType=SimpleNamespace(get=lambda: None),
    )
    monkeypatch.setattr(pallas_gpu_rows, "ir", types)
    monkeypatch.setattr(pallas_gpu_rows, "arith", arith)
    monkeypatch.setattr(pallas_gpu_rows, "memory", SimpleNamespace(store=store))
    monkeypatch.setattr(pallas_gpu_rows, "_integer", np.int64)
    monkeypatch.setattr(pallas_gpu_rows, "_thread", lambda: threads)
    exchanged = lambda value, distance: value[threads ^ distance]
    monkeypatch.setattr(pallas_gpu_rows, "_exchanged", exchanged)
    values = np.random.default_rng(0).integers(0, 1000, (count, 512)).astype(float)
    pallas_gpu_rows._share(list(values), None, warpgroups, np.add)
    teams = values.reshape(count, -1, 4 * warpgroups, 32).sum(3)
    np.testing.assert_array_equal(shared, teams.transpose(1, 0, 2))


# ---------------------------------------------------------------------- on a GPU
on_hopper = pytest.mark.skipif(
    jax.default_backend() != "gpu" or not hopper.runs_on(device.attached()).ok,
    reason="needs a Hopper GPU",
)
LARGE = {
    "narrow": ((1000, 128), ALL, None),
    "narrow, many rows a step": ((4096, 1024), ALL, Teams(2, 1, 8, 3)),
    "odd rows": ((4099, 4096), ALL, None),
    "two warpgroups a row": ((1021, 8192), ("scale", "bias"), None),
    "four": ((515, 16384), ALL, None),
    "wide": ((300, 32768), (), None),
    "columns left over": ((777, 1152), ALL, None),
    "chunks that overlap": ((777, 2880), ALL, None),
    "few columns that overlap": ((1026, 576), ALL, None),
    "in each of four warpgroups": ((515, 14400), ("scale",), None),
    "a few programs": ((600, 2560), ALL, Teams(1, 2, 3, 3, 7)),
}


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", [*CASES, *LARGE])
def test_numbers(case: str, op: str) -> None:
    shape, wanted, config = {**CASES, **LARGE}[case]
    given, up = make(op, shape, wanted, "bfloat16")
    made = jax.jit(lambda x, up: both(op, x, up, config=config))(given, up)
    check(op, given, up, made)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", [*CASES, *LARGE])
def test_numbers_of_addends(case: str, dtype: str, op: str) -> None:
    shape, wanted, config = {**CASES, **LARGE}[case]
    if not kernel(op).supports(spec(op, shape, wanted, dtype)).ok:
        pytest.skip("rows too wide for shared memory")
    given, up = make(op, shape, wanted, dtype)
    added = addends.beside(given)
    call = jax.jit(lambda *args: with_addends(op, *args, config=config))
    check_addends(op, given, up, added, call(given, up, added))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(1000, 128), (4099, 1152), (1021, 8192)])
def test_numbers_in_float32(shape: Any, op: str) -> None:
    given, up = make(op, shape, ALL)
    check(op, given, up, jax.jit(lambda x, up: both(op, x, up))(given, up))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("op", OPS)
def test_numbers_in_other_dtypes(op: str) -> None:
    given, up = make(op, (370, 1536), ALL, "float16")
    check(op, given, up, jax.jit(lambda x, up: both(op, x, up))(given, up))
    up = up.astype("float32")
    made = jax.jit(lambda x, up: both(op, x, up, "float32"))(given, up)
    check(op, given, up, made)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "config",
    [Teams(1, 1, 4, 3, 16), Teams(2, 1, 2, 3, 16), Teams(1, 2, 2, 4, 16),
     Teams(1, 4, 2, 2, 16)],
)  # fmt: skip
def test_many_rows_are_the_same_each_time(config: Teams, op: str) -> None:
    """Turns and stages enough that a missing wait would show."""
    given, up = make(op, (2048, 4096), ALL, "bfloat16")
    call = jax.jit(lambda x, up: both(op, x, up, config=config))
    first = jax.tree.map(np.asarray, call(given, up))
    check(op, given, up, first)
    for _ in range(20):
        again = jax.tree.map(np.asarray, call(given, up))
        bits.assert_same(first, again)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("columns", [1024, 4096, 8192, 16384])
def test_many_addends_are_the_same_each_time(columns: int, op: str) -> None:
    given, up = make(op, (2048, columns), ALL, "bfloat16")
    added = addends.beside(given)
    call = jax.jit(lambda *args: with_addends(op, *args))
    first = jax.tree.map(np.asarray, call(given, up, added))
    check_addends(op, given, up, added, first)
    for _ in range(20):
        again = jax.tree.map(np.asarray, call(given, up, added))
        bits.assert_same(first, again)


@pytest.mark.parametrize("columns", [1152, 1408, 1600, 2944])
def test_shared_memory_is_counted_whole(columns: int) -> None:
    """Each array begins at a multiple of 1024 bytes, and the kernel lowers."""
    given = (("scale", "float32"), ("bias", "float32"))
    shape = jax.ShapeDtypeStruct((777, columns), "float32")
    vector = jax.ShapeDtypeStruct((columns,), "float32")
    norm = Norm(True, 1e-6, *shape.shape, "float32", "float32", given, addend=True)
    config = hopper_config.usual(norm, backward=False)

    def call(x, scale, bias, addend):
        given = {"scale": scale, "bias": bias}
        return normalized(norm, x, given, config, addend)

    traced = jax.jit(call).trace(shape, vector, vector, shape)
    assert traced.lower(lowering_platforms=("cuda",)) is not None
