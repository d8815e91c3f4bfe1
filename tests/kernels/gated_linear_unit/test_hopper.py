"""Gated linear units on Hopper, of experts and dense: what they take, and numbers."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.ragged.dot.hopper import by_rows
from rewriter.kernels.ragged.dot.hopper.config import Tiles
from rewriter.kernels.shared.activations_hopper import ON_HOPPER, WITHOUT
from rewriter.kernels.shared.gated_tiles import SEPARATE
from rewriter.ops import device
from rewriter.ops.activations import ACTIVATIONS
from rewriter.ops.kernel import spec_of, worth_measuring
from rewriter.ops.registry import registry
from tests import slow
from tests.kernels.gated_linear_unit.test_gated_linear_unit import with_nan
from tests.kernels.gated_linear_unit.test_tpu import structs
from tests.kernels.ragged.test_hopper_dot import HARDEST, SIZES, on_hopper
from tests.kernels.ragged.test_tpu_gated_linear_unit import (
    HALVES,
    exact,
    make,
    operands,
)
from tests.support.kernels import bits, simulator
from tests.support.kernels.float64 import float64
from tests.support.kernels.simulated_gpu import products

pytestmark = pytest.mark.once

EXPERTS, DENSE = "ragged_gated_linear_unit", "gated_linear_unit"
UNIT, UNITS = (registry().kernel(op, "hopper") for op in (DENSE, EXPERTS))
PARTS = registry().kernel(EXPERTS, "by_parts_hopper")
BIASES = ("b_gate", "b_up")
TILES = [
    Tiles(), Tiles(64, 256), Tiles(256, 128, behind=False), SEPARATE, Tiles(64, 512, 2),
    Tiles(64, 256, apart=True), Tiles(behind=False),
]  # fmt: skip
TOLERANCE = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-5}
"""Of the largest entry."""
OF_GRADIENTS = 2e-2
"""The same where branches, or their cotangents, were rounded to 16 bits before."""


def close(got: Any, want: Any, tolerance: float | None = None) -> None:
    tolerance = tolerance or TOLERANCE[str(got.dtype)]
    got = np.asarray(got, np.float64)
    assert got.shape == want.shape
    error = np.abs(got - want).max(initial=0.0)
    assert error <= tolerance * max(1.0, np.abs(want).max(initial=0.0))


# ----------------------------------------------------------------- what they take
def experts(halves: str | None = None, **more: Any) -> Any:
    named = ("activation", "out_dtype")
    params = {n: more.pop(n) for n in named if n in more}
    given = operands(halves=halves, **more)
    return spec_of(registry().op(EXPERTS), given, {**params, "halves": halves})


def dense(
    shape: Any = (3, 100, 128), f: int = 192, added: Any = (), dtype: Any = "bfloat16",
    **params: Any,
) -> Any:  # fmt: skip
    given = structs(shape, f, added, dtype)
    return spec_of(registry().op(DENSE), given, params)


def reasons(verdict: Any) -> str:
    return "; ".join(r.text for r in verdict.reasons)


@pytest.mark.parametrize("halves", HALVES)
def test_supports_experts(halves: str | None) -> None:
    assert UNITS.supports(experts(halves)).ok
    assert UNITS.supports(experts(halves, m=1, dtype="float16")).ok
    for given, why in (
        (experts(halves, k=100), "k is 100"),
        (experts(halves, dtype="float32"), "float32"),
        (experts(halves, out_dtype="float32"), "the result is float32"),
        (experts(halves, m=0), "size 0"),
        (experts(halves, activation="mish"), "mish needs log1p"),
        (experts("gate_up", f=96), "half of 192 columns"),
    ):
        verdict = UNITS.supports(given)
        assert not verdict.ok
        assert why in reasons(verdict)
    assert PARTS.supports(experts("gate_up", f=96, activation="mish")).ok


def test_supports_dense() -> None:
    rows = {"rows_gate": jax.ShapeDtypeStruct((3, 100, 192), "bfloat16")}
    with_rows = spec_of(
        registry().op(DENSE), {**structs((3, 100, 128), 192), **rows}, {}
    )
    assert UNIT.supports(dense()).ok
    assert UNIT.supports(dense((128,), 64, BIASES, "float16", up_shift=1.0)).ok
    assert UNIT.supports(dense(out_dtype="float32", clip_gate=(None, 7.0))).ok
    for given, why in (
        (dense((5, 100)), "k is 100"),
        (dense(f=96), "n is 96"),
        (dense(dtype="float32"), "float32"),
        (dense(out_dtype="float16"), "the result is float16"),
        (dense((0, 128)), "size 0"),
        (dense(activation="elu"), "elu needs expm1"),
        (with_rows, "addends for each row"),
    ):
        verdict = UNIT.supports(given)
        assert not verdict.ok
        assert why in reasons(verdict)


def test_every_activation_is_computed_or_refused() -> None:
    assert set(ACTIVATIONS) == {*ON_HOPPER, *WITHOUT}
    assert not set(ON_HOPPER) & set(WITHOUT)


def test_configs_are_pruned() -> None:
    here = device.named("h200")
    for kernel, given in (
        (UNIT, dense((8192, 4096), 14336)), (UNIT, dense((16, 4096), 14336)),
        (UNITS, experts(m=256, g=128)), (PARTS, experts(m=8192, g=8)),
    ):  # fmt: skip
        found, pruned = worth_measuring(kernel.space, given, here, 24)
        assert len(found) >= 4
        assert not pruned
    for bad, code in (
        (Tiles(stages=5), "shared_memory"),
        (Tiles(256, 256), "registers"),
        (Tiles(128, 192), "block_n"),
        (Tiles(64, 128), "block_n"),
    ):
        codes = [r.code for r in UNIT.space.fits(bad, dense(), here).reasons]
        assert code in codes


def test_few_rows_have_small_tiles() -> None:
    here = device.named("h200")
    assert UNITS.space.default(experts(m=256, g=128), here).block_m == 64
    assert UNITS.space.default(experts(m=8192, g=8), here) == Tiles()
    assert UNIT.space.default(dense((16, 128)), here).block_m == 64


def written(x: Any, w_gate: Any, w_up: Any) -> Any:
    return jax.nn.silu(x @ w_gate) * (x @ w_up)


def test_it_is_not_chosen_unless_measured() -> None:
    given = structs((8192, 4096), 14336).values()
    report = rewriter.explain(written, target="h200", tune="off")(*given)
    (site,) = report.sites
    assert site.kernel != "hopper"
    assert "measured" in dict(site.not_chosen)["hopper"]
    forced = {DENSE: "hopper"}
    report = rewriter.explain(written, target="h200", implementation=forced)(*given)
    assert [s.kernel for s in report.sites] == ["hopper"]


def of_experts(x: Any, w: Any, w_up: Any, group_sizes: Any) -> Any:
    gate, up = (jax.lax.ragged_dot(x, y, group_sizes) for y in (w, w_up))
    return jax.nn.silu(gate) * up


def test_experts_are_taken_whole_on_hopper_gpus() -> None:
    given = operands(8192, 2048, 2048, 64).values()
    for target, ops in (("h200", [EXPERTS]), ("a100", ["ragged_dot"] * 2)):
        report = rewriter.explain(of_experts, target=target, tune="off")(*given)
        assert [s.op for s in report.sites] == ops
    assert report.counts()["ragged_dot"] == 2
    differentiated = jax.grad(lambda *x: of_experts(*x).sum())
    report = rewriter.explain(differentiated, target="h200", tune="off")(*given)
    assert {s.op for s in report.sites} == {"ragged_dot"}  # branches are needed
    for kernel, ops in (("hopper", [EXPERTS]), ("by_parts_hopper", ["ragged_dot"] * 2)):
        forced = {EXPERTS: kernel}
        explained = rewriter.explain(of_experts, target="h200", implementation=forced)
        assert [s.op for s in explained(*given).sites] == ops


# ---------------------------------------------------------------------- lowering
def both(kernel: Any, given: Any, up: Any, tiles: Any, **params: Any) -> Any:
    out, kept = kernel.forward(**given, **params, config=tiles, residuals=True)
    rest = {"out": None, "residuals": kept, "cotangent": up}
    return {"out": out, **kernel.backward(**given, **rest, **params)}


@pytest.mark.parametrize("tiles", slow.first(2, TILES), ids=str)
def test_lowers_on_a_cpu(tiles: Tiles) -> None:
    halves = HALVES[TILES.index(tiles) % 3]
    given, params = operands(halves=halves, k=128), {"halves": halves}
    wide = structs((3, 100, 128), 192, BIASES, "float16")
    more = {"activation": "gelu_erf", "clip_gate": (None, 7.0), "up_shift": 1.0}

    def call(given: Any, up: Any, wide: Any) -> Any:
        first = both(UNITS, given, up, None, **params)
        out = UNITS.forward(**given, **params, config=tiles)
        return first, out, UNIT.forward(**wide, **more, config=tiles)

    up = jax.ShapeDtypeStruct((700, 384), "bfloat16")
    exported = jax.export.export(jax.jit(call), platforms=["cuda"])(given, up, wide)
    dots = 2 if halves else 4
    assert exported.mlir_module().count("mosaic_gpu_v2") >= 3 + dots
    assert [x.shape for x in exported.out_avals[-2:]] == [(700, 384), (3, 100, 192)]


@pytest.mark.parametrize("activation", slow.first(2, ON_HOPPER))
def test_activations_lower(activation: str) -> None:
    call = functools.partial(UNIT.forward, activation=activation, beta=0.5)
    given = structs((64, 64), 128)
    run = jax.jit(lambda x: call(**x, config=Tiles(64, 256)))
    text = jax.export.export(run, platforms=["cuda"])(given).mlir_module()
    assert "mosaic_gpu_v2" in text


def test_no_matrix_is_copied() -> None:
    """Halves are read where they are."""
    given = operands(300, 128, 192, 5, "up_gate")
    run = jax.jit(lambda x: UNITS.forward(**x, halves="up_gate"))
    text = jax.export.export(run, platforms=["cuda"])(given).mlir_module()
    (call,) = (x for x in text.splitlines() if "mosaic_gpu_v2" in x)
    assert call.count("tensor<5x128x384xbf16>") == 2
    assert "stablehlo.slice %arg1" not in text


# ----------------------------------------------------------------------- numbers
def make_dense(
    shape: Any, f: int, added: Any = (), dtype: Any = "bfloat16", seed: int = 0
) -> tuple[dict[str, Any], Any]:
    r = np.random.default_rng(seed)
    normal = lambda shape: r.standard_normal(shape)
    given = {
        n: (normal(s.shape) * (s.shape[0] ** -0.5 if n[0] == "w" else 1.0))
        for n, s in structs(shape, f, added).items()
    }
    up = normal((*shape[:-1], f)).astype(dtype)
    return {n: x.astype(dtype) for n, x in given.items()}, up


def exact_dense(given: Any, up: Any, **params: Any) -> dict[str, Any]:
    """The result and its gradients in float64."""
    with float64():
        wide = {n: jnp.asarray(np.asarray(y, np.float64)) for n, y in given.items()}
        plain = lambda o: registry().op(DENSE).reference(**o, **params)
        out, back = jax.vjp(plain, wide)
        grads = back(jnp.asarray(np.asarray(up, np.float64)))[0]
        return {n: np.asarray(y) for n, y in {"out": out, **grads}.items()}


SIMULATED = {  # m, k, f, group sizes
    "several tiles": (230, 128, 320, [70, 0, 130, 20]),
    "rows left over": (200, 64, 64, [3, 0, 90]),
    "many steps": (140, 448, 128, [1, 139]),
}
PAIRS = [(c, t) for c in SIMULATED for t in (TILES if c[0] == "s" else TILES[:4:3])]


@pytest.mark.parametrize(("case", "tiles"), PAIRS, ids=str)
def test_experts_simulated(case: str, tiles: Tiles) -> None:
    """The kernel's own code, a Python thread per warpgroup, few blocks: many turns."""
    m, k, f, sizes = SIMULATED[case]
    halves = HALVES[TILES.index(tiles) % 3]
    few = dataclasses.replace(tiles, programs=2)
    given, up = make(sizes, m, k, f, halves, "bfloat16")
    want, _ = exact(given, up, halves, "silu")
    used, empty = sum(sizes), [i for i, n in enumerate(sizes) if n == 0]
    given["x"][used:] = np.nan
    for name in ("w", "w_up"):
        if name in given:
            given[name][empty] = np.nan
    with simulator.simulated_ragged_dot():
        got = UNITS.forward(**given, halves=halves, config=few)
        again, kept = UNITS.forward(**given, halves=halves, config=few, residuals=True)
    close(got, want)
    np.testing.assert_array_equal(got, again)
    gate, up = (np.asarray(x, np.float64) for x in kept)
    close(gate / (1 + np.exp(-gate)) * up, want, OF_GRADIENTS)


@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_dense_simulated(tiles: Tiles) -> None:
    few = dataclasses.replace(tiles, programs=3)
    added = BIASES[TILES.index(tiles) % 3 :]
    given, up = make_dense((5, 41, 192), 320, added, "float16")
    params = {"activation": "gelu_erf", "clip_gate": (-1.0, 1.5), "up_shift": 1.0}
    want = exact_dense(given, up, **params)["out"]
    with simulator.simulated_ragged_dot():
        out = UNIT.forward(**given, **params, config=few)
        wide = UNIT.forward(**given, **params, config=few, out_dtype="float32")
    close(out, want)
    close(wide, want)


@pytest.mark.parametrize("activation", slow.first(2, ["relu", "silu", "relu6"]))
def test_what_is_no_number_stays_none(activation: str) -> None:
    """In tiles of which some reach over the last row, or the last column."""
    few = dataclasses.replace(TILES[0], programs=3)
    given, _ = make_dense((205, 192), 320)
    for some, want in with_nan(given):
        arrays = {n: np.asarray(x) for n, x in some.items()}
        with simulator.simulated_ragged_dot():
            out = UNIT.forward(**arrays, activation=activation, config=few)
        np.testing.assert_array_equal(np.isnan(np.asarray(out, np.float32)), want)


@pytest.mark.parametrize("activation", ON_HOPPER)
def test_nan_stays_nan(activation: str) -> None:
    assert np.isnan(ON_HOPPER[activation](jnp.float32(jnp.nan), 0.7))


@pytest.mark.parametrize("activation", ON_HOPPER)
def test_activations(activation: str) -> None:
    """Next to zero too, where a sum with 1 has few digits."""
    y = np.linspace(-9, 9, 4001, dtype=np.float32)
    got = ON_HOPPER[activation](jnp.asarray(y), 0.7)
    with float64():
        want = ACTIVATIONS[activation](jnp.asarray(y, jnp.float64), 0.7)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)


def test_the_simulator_sees_parts_that_are_freed_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With two stages the next part would be where a product still reads."""
    given, up = make_dense((128, 640), 128)
    want = exact_dense(given, up)["out"]
    early = lambda left: products.wait_for_products(left and left + 1)
    with simulator.simulated_ragged_dot():
        call = functools.partial(UNIT.forward, **given)
        close(call(config=Tiles(stages=2, programs=1)), want)
        monkeypatch.setattr(by_rows.plgpu, "wgmma_wait", early)
        wrong = call(config=Tiles(stages=2, programs=1))
    with pytest.raises(AssertionError):
        close(wrong, want)


# ------------------------------------------------------------------------ on a GPU
def check_experts(
    sizes: list[int], m: int, k: int, f: int, halves: str | None, tiles: Tiles | None,
    dtype: str = "bfloat16", act: str = "silu",
) -> None:  # fmt: skip
    given, up = make([max(n, 0) for n in sizes], m, k, f, halves, dtype)
    out, grads = exact(given, up, halves, act)
    given["group_sizes"] = np.array(sizes, "int32")
    used = min(m, sum(max(n, 0) for n in sizes))
    given["x"][used:] = np.nan
    run = functools.partial(both, UNITS, halves=halves, activation=act)
    made = jax.jit(lambda given, up: run(given, up, tiles))(given, up)
    close(made.pop("out"), out)
    assert set(made) == set(grads)
    for name, want in grads.items():
        close(made[name], want, OF_GRADIENTS)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("case", "tiles"),
    [(c, t) for c in SIZES for t in (TILES if c in HARDEST[::3] else TILES[:1])],
    ids=str,
)
def test_experts(case: str, tiles: Tiles) -> None:
    m, sizes = SIZES[case]
    check_experts(sizes, m, 192, 320, HALVES[len(case) % 3], tiles)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("halves", HALVES)
def test_matrices_without_rows_do_not_leak(halves: str | None) -> None:
    m, sizes = SIZES["uneven"]
    given, up = make(sizes, m, 128, 192, halves, "float16")
    want, _ = exact(given, up, halves, "silu")
    given["w"][sizes.index(0)] = np.nan
    given["x"][: sizes[0]] = np.inf  # a whole group, which alone may see it
    got = UNITS.forward(**given, halves=halves)
    close(got[sizes[0] :], want[sizes[0] :])


DENSE_CASES = {  # shape, f, biases, params
    "one row": ((1, 64), 64, (), {}),
    "columns left over": ((3, 50, 192), 320, BIASES, {"activation": "gelu_tanh"}),
    "clipped": ((2, 77, 128), 192, BIASES[:1],
                {"clip_gate": (None, 1.0), "clip_up": (-1.0, 1.0), "up_shift": 1.0}),
    "many tiles": ((5000, 320), 704, BIASES[1:], {"activation": "gelu_erf"}),
}  # fmt: skip


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("case", "tiles"),
    [(c, t) for c in DENSE_CASES for t in (TILES if c[0] == "m" else TILES[:1])],
    ids=str,
)
def test_dense(case: str, tiles: Tiles) -> None:
    shape, f, added, params = DENSE_CASES[case]
    given, up = make_dense(shape, f, added)
    want = exact_dense(given, up, **params)
    run = lambda given, up: both(UNIT, given, up, tiles, **params)
    made = jax.jit(run)(given, up)
    assert set(made) == set(want)
    for name, x in want.items():
        close(made[name], x, None if name == "out" else OF_GRADIENTS)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("activation", ON_HOPPER)
def test_activations_on_a_gpu(activation: str) -> None:
    given, up = make_dense((200, 128), 128)
    params = {"activation": activation, "beta": 0.7}
    want = exact_dense(given, up, **params)["out"]
    wide = UNIT.forward(**given, **params, out_dtype="float32")
    # Fast tanh has 11 bits.
    close(wide, want, 1e-3 if activation == "tanh" else None)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_results_are_the_same_each_time(tiles: Tiles) -> None:
    """Tiles, stages and turns enough that a missing wait would show."""
    r = np.random.default_rng(0)
    sizes = r.multinomial(4096, r.dirichlet(np.full(16, 1.0))).tolist()
    given, up = make(sizes, 4096, 1024, 768, None, "bfloat16")
    call = jax.jit(lambda x: UNITS.forward(**x, config=tiles, residuals=True))
    first = jax.tree.map(np.asarray, call(given))
    close(first[0], exact(given, up, None, "silu")[0])
    for _ in range(20):
        again = jax.tree.map(np.asarray, call(given))
        bits.assert_same(first, again)
