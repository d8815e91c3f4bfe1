"""The gated linear unit of experts on TPUs, without one: numbers, memory, compilers."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rewriter.hardware import ahead_of_time
from rewriter.kernels.ragged.gated_linear_unit import KERNELS, OP, tpu
from rewriter.kernels.ragged.gated_linear_unit.estimate import estimate
from rewriter.kernels.ragged.gated_linear_unit.tpu import config
from rewriter.kernels.ragged.gated_linear_unit.tpu.config import Tiles
from rewriter.kernels.shared.activations_tpu import WITHOUT
from rewriter.ops import device
from rewriter.ops.activations import ACTIVATIONS
from rewriter.ops.kernel import Spec, spec_of, worth_measuring
from tests import slow
from tests.kernels.ragged.test_hopper_dot import SIZES, ranges
from tests.support.kernels import tpu as on_tpu
from tests.support.kernels.float64 import float64

pytestmark = pytest.mark.once

KERNEL = next(k for k in KERNELS if k.name == "mosaic_tpu")
PARTS = next(k for k in KERNELS if k.name == "by_parts")
GENERATIONS = tuple(on_tpu.KINDS)
COMPUTED = [name for name in ACTIVATIONS if name not in WITHOUT]
HALVES = (None, "gate_up", "up_gate")


# ------------------------------------------------------------------ what it takes
def operands(
    m: int = 700, k: int = 256, f: int = 384, g: int = 4, halves: str | None = None,
    dtype: Any = "bfloat16",
) -> dict[str, Any]:  # fmt: skip
    made = {"x": jax.ShapeDtypeStruct((m, k), dtype)}
    width = 2 * f if halves else f
    made["w"] = jax.ShapeDtypeStruct((g, k, width), dtype)
    if halves is None:
        made["w_up"] = made["w"]
    return {**made, "group_sizes": jax.ShapeDtypeStruct((g,), jnp.int32)}


def spec(halves: str | None = None, **more: Any) -> Spec:
    named = ("activation", "out_dtype", "precision")
    params = {n: more.pop(n) for n in named if n in more}
    given = operands(halves=halves, **more)
    return spec_of(OP, given, {**params, "halves": halves})


@pytest.mark.parametrize("halves", HALVES)
def test_supports(halves: str | None) -> None:
    for given in (
        spec(halves), spec(halves, m=1, k=1, f=128, g=1), spec(halves, dtype="float32"),
        spec(halves, out_dtype="float32"), spec(halves, k=7000, f=1408),
        spec(halves, precision="highest", activation="gelu_erf"),
    ):  # fmt: skip
        assert tpu.supports(given).ok
    for given, why in (
        (spec(halves, dtype="float16"), "lhs is float16"),
        (spec(halves, out_dtype="float16"), "the result is float16"),
        (spec(halves, precision="bf16_bf16_f32_x3"), "no choice of the compiler"),
        (spec(halves, m=0), "size 0"),
        (spec(halves, m=1 << 24), "SMEM"),
        (spec(halves, activation="elu"), "needs expm1"),
    ):
        verdict = tpu.supports(given)
        assert why in "; ".join(r.text for r in verdict.reasons)
        assert not verdict.ok


def test_halves_are_whole_registers() -> None:
    assert tpu.supports(spec(f=100)).ok
    verdict = tpu.supports(spec("gate_up", f=100))
    assert [r.code for r in verdict.reasons] == ["halves"]


@pytest.mark.parametrize("kind", [*on_tpu.KINDS.values(), device.Device("", "tpu")])
def test_defaults_fit(kind: device.Device) -> None:
    for given in (
        spec(m=8192, k=4096, f=14336, g=8), spec("gate_up", m=8192, k=7168, f=2048),
        spec(m=9, k=7000, f=30), spec(m=32768, k=2048, f=768, g=128, dtype="float32"),
        spec(m=1 << 18, g=256, out_dtype="float32"), spec("up_gate", k=2048, f=1408),
    ):  # fmt: skip
        for space in (KERNEL.space, KERNEL.backward_space, PARTS.space):
            assert space is not None
            assert space.fits(space.default(given, kind), given, kind).ok
            found, _ = worth_measuring(space, given, kind, 24)
            assert found


def test_what_does_not_fit() -> None:
    here, given = on_tpu.KINDS["v5p"], spec(m=8192, k=8192, f=8192, g=8)
    for bad, code in (
        (Tiles(1024, 8192, 2048), "vmem"), (Tiles(100), "block_m"),
        (Tiles(block_k=100), "block_k"), (Tiles(chunk=8), "chunk"),
    ):  # fmt: skip
        codes = [r.code for r in config.fits(bad, given, here).reasons]
        assert code in codes
    many = spec(m=1 << 20, g=512)
    assert not config.fits(Tiles(16, chunk=16), many, here).ok


@pytest.mark.parametrize("most", [128, 512, 1000, 2048])
def test_blocks_divide_halves(most: int) -> None:
    for f in (128, 640, 1408, 2048, 14336):
        b = config.blocks(config.unit_of(spec("gate_up", f=f)), Tiles(block_n=most))
        assert f % b.n == 0
        assert b.n % 128 == 0


# ------------------------------------------------------------------------ choice
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("passes", ["forward", "vjp", "forward_and_vjp"])
def test_estimates(generation: str, passes: str) -> None:
    """Whole it is never estimated to take longer than XLA; gradients are the parts'."""
    here = device.named(f"tpu_{generation}")
    for halves in HALVES:
        given = spec(halves, m=8192, k=2048, f=1408, g=8)
        found = estimate(given, here, passes)
        on_tpus = {k.name for k in KERNELS if "tpu" in k.platforms}
        assert set(found) == {"xla", *on_tpus}
        assert found["by_parts"] <= found["xla"]
        if passes == "vjp":
            assert found["mosaic_tpu"] == found["by_parts"]
        else:
            assert found["mosaic_tpu"] < found["xla"]


def test_steps_are_counted() -> None:
    """A step per piece that is summed, and those of the gradients' ragged dots."""
    tiles = Tiles(256, 256, 128, 128, 128)
    counted = tpu.steps(spec(m=1000, k=512, f=384, g=4), tiles, tiles, "forward")
    assert counted == {"ragged_gated_linear_unit": 7 * 3 * 4}
    parts = tpu.steps_of_parts(spec(m=1000, k=512, f=384), tiles, tiles, "forward")
    assert parts == {"ragged_dot": 7 * 3 * 4}
    both = tpu.steps(spec(m=1000), tiles, tiles, "forward_and_vjp")
    assert set(both) == {"ragged_gated_linear_unit", "ragged_dot_transposed",
                         "ragged_dot_of_groups"}  # fmt: skip


# ----------------------------------------------------------------------- numbers
def make(
    sizes: list[int], m: int, k: int, f: int, halves: str | None, dtype: Any,
    seed: int = 0,
) -> tuple[dict[str, Any], Any]:  # fmt: skip
    r = np.random.default_rng(seed)
    dtype, width = jnp.dtype(dtype), 2 * f if halves else f
    shapes = {"x": (m, k), "w": (len(sizes), k, width)}
    if halves is None:
        shapes["w_up"] = shapes["w"]
    made = {n: (r.standard_normal(s) * s[1] ** -0.5).astype(dtype)
            for n, s in shapes.items()}  # fmt: skip
    made["x"] = r.standard_normal((m, k)).astype(dtype)
    up = r.standard_normal((m, f)).astype(dtype)
    return {**made, "group_sizes": np.array(sizes, "int32")}, up


def exact(given: dict[str, Any], up: Any, halves: str | None, act: str) -> Any:
    """The result and its gradients in float64, group by group."""
    with float64():
        x, w = (jnp.asarray(given[n], jnp.float64) for n in ("x", "w"))
        names = ["x", "w", "w_up"] if halves is None else ["x", "w"]
        more = [] if halves else [jnp.asarray(given["w_up"], jnp.float64)]
        bounds = ranges(given["group_sizes"].tolist(), len(x))[:-1]

        def whole(x: Any, w: Any, w_up: Any = None) -> Any:
            out = jnp.zeros((len(x), up.shape[1]))
            for group, (start, end) in enumerate(bounds):
                if halves is None:
                    pair = w[group], w_up[group]
                else:
                    pair = jnp.split(w[group], 2, axis=1)
                    pair = pair if halves == "gate_up" else pair[::-1]
                rows = x[start:end]
                made = ACTIVATIONS[act](rows @ pair[0], 1.0) * (rows @ pair[1])
                out = out.at[start:end].set(made)
            return out

        out, back = jax.vjp(whole, x, w, *more)
        grads = back(jnp.asarray(up, jnp.float64))
        return np.asarray(out), dict(zip(names, map(np.asarray, grads), strict=True))


TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
close = functools.partial(on_tpu.close, tolerance=TOLERANCE)


def check(
    given: dict[str, Any], up: Any, halves: str | None, tiles: Tiles | None,
    act: str = "silu", **more: Any,
) -> None:  # fmt: skip
    """Value and gradients against float64, with NaN in rows of no group."""
    out, grads = exact(given, up, halves, act)
    used = min(len(given["x"]), int(np.maximum(given["group_sizes"], 0).sum()))
    given["x"][used:] = np.nan
    more = {"halves": halves, "activation": act, **more}

    @jax.jit
    def both(given: Any, up: Any) -> Any:
        plain = tpu.forward(**given, config=tiles, **more)
        first, residuals = tpu.forward(**given, config=tiles, residuals=True, **more)
        rest = {"out": None, "residuals": residuals, "cotangent": up}
        return plain, first, tpu.KERNEL.backward(**given, **rest, config=SMALL, **more)

    with on_tpu.interpreted():
        plain, first, made = both(given, up)
    close(plain, out)
    np.testing.assert_array_equal(plain, first)
    assert set(made) == set(grads)
    for name, want in grads.items():
        close(made[name], want)


SMALL = Tiles(256, 128, 128, 128, 128)
TILES = [SMALL, Tiles(128, 256, 384, 128, 64), Tiles(512, 512, 256, 256, 32)]


@pytest.mark.parametrize("case", slow.first(5, SIZES))
def test_numbers(case: str) -> None:
    m, sizes = SIZES[case]
    halves = HALVES[len(case) % 3]
    f = 256 if halves else 330
    given, up = make([max(n, 0) for n in sizes], m, 200, f, halves, "float32")
    check(given, up, halves, SMALL, precision="highest")


@pytest.mark.parametrize("tiles", slow.first(1, TILES), ids=str)
@pytest.mark.parametrize("halves", HALVES)
def test_numbers_in_bfloat16(halves: str | None, tiles: Tiles) -> None:
    given, up = make([70, 0, 300, 20], 430, 260, 384, halves, "bfloat16")
    check(given, up, halves, tiles)


@pytest.mark.parametrize("act", slow.first(4, COMPUTED))
def test_activations(act: str) -> None:
    given, up = make([70, 0, 50], 130, 64, 128, None, "float32")
    check(given, up, None, None, act, precision="highest")


@pytest.mark.parametrize("halves", HALVES)
def test_by_parts(halves: str | None) -> None:
    """The kernel that it is compared with keeps the same, and gives the same."""
    given, up = make([70, 0, 130, 20], 230, 64, 128, halves, "float32")
    out, grads = exact(given, up, halves, "silu")
    more = {"halves": halves, "precision": "highest"}
    with on_tpu.interpreted():
        made, kept = PARTS.forward(**given, residuals=True, **more)
        _, same = tpu.forward(**given, residuals=True, **more)
        rest = {"out": None, "residuals": kept, "cotangent": up}
        found = PARTS.backward(**given, **rest, **more)
    close(made, out)
    for a, b in zip(kept, same, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for name, want in grads.items():
        close(found[name], want)


def test_wide_results() -> None:
    given, up = make([70, 0, 130, 20], 230, 64, 130, None, "bfloat16")
    out, _ = exact(given, up, None, "silu")
    with on_tpu.interpreted():
        got = tpu.forward(**given, out_dtype="float32")
    assert got.dtype == jnp.float32
    close(got, out)  # as near as float32: branches are not rounded on the way


def test_matrices_without_rows_do_not_leak() -> None:
    given, _ = make([40, 0, 30], 90, 64, 64, None, "float32")
    given["w"][1] = given["w_up"][1] = np.nan
    with on_tpu.interpreted():
        out = tpu.forward(**given, config=SMALL)
    assert np.isfinite(out).all()
    assert not np.asarray(out)[70:].any()


@pytest.mark.slow
def test_patterns_of_empty_groups() -> None:
    """All of them, for five groups."""
    call = jax.jit(lambda x: tpu.forward(**x, config=Tiles(64, 128, 128, 128, 32)))
    with on_tpu.interpreted():
        for seed, pattern in enumerate(itertools.product((0, 1), repeat=5)):
            sizes = np.random.default_rng(seed).integers(1, 60, 5) * pattern
            given, up = make(sizes.tolist(), 200, 64, 32, None, "float32", seed)
            close(call(given), exact(given, up, None, "silu")[0])


# ------------------------------------------------------------------------ memory
@pytest.mark.parametrize(
    ("halves", "sizes", "shape"),
    [
        (None, [70, 0, 90, 20], (200, 300, 130)),
        ("up_gate", [0, 70, 0], (130, 128, 256)),
    ],
)
@pytest.mark.parametrize("residuals", [False, True])
def test_memory(
    halves: str | None, sizes: list[int], shape: Any, residuals: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Two cores, NaN in memory that was not written; columns that do not divide."""
    given, up = make(sizes, *shape, halves, "float32")
    want, _ = exact(given, up, halves, "silu")
    run = functools.partial(
        tpu.forward, config=Tiles(64, 256, 128, 128, 32), precision="highest"
    )
    with on_tpu.simulated(capfd, cores=2):
        made = run(**given, halves=halves, residuals=residuals)
        got = [np.asarray(x) for x in jax.tree.leaves(made)]
    close(got[0], want)
    for branch in got[1:]:
        assert not np.isnan(branch).any()
        assert not branch[sum(sizes) :].any()


# ----------------------------------------------------------------------- compiled
CORE = [
    ("gate_up", (256, 512, 768, 64), "bfloat16", None, "float32"),
    (None, (1024, 2048, 1408, 8), "bfloat16", None, None),
    (None, (300, 330, 200, 5), "float32", "highest", "bfloat16"),
]


@on_tpu.needs_compiler
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("case", slow.first(1, CORE), ids=str)
def test_compiles(generation: str, case: Any) -> None:
    """The forward, the forward that keeps both branches, and the gradients."""
    halves, shape, dtype, precision, out = case
    given = operands(*shape, halves, dtype)
    params = {"halves": halves, "precision": precision, "out_dtype": out}
    use, here = spec_of(OP, given, params), on_tpu.KINDS[generation]
    up = jax.eval_shape(lambda x: OP.reference(**x, **params), given)
    first, second = tpu.default(use, here), tpu.KERNEL.backward_space.default(use, here)

    def both(x: Any, up: Any) -> Any:
        alone = tpu.forward(**x, **params, config=first)
        _, kept = tpu.forward(**x, **params, config=first, residuals=True)
        rest = {"residuals": kept, "cotangent": up, "config": second}
        return alone, tpu.KERNEL.backward(**x, **params, **rest)

    text = on_tpu.compiled(generation, both, given, up)
    calls = text.count('custom_call_target="tpu_custom_call"')
    assert calls == 2 + (2 if halves else 4)


@on_tpu.needs_compiler
def test_every_activation_compiles() -> None:
    given = operands(256, 128, 128, 3)

    def all_of_them(x: Any) -> Any:
        return [tpu.forward(**x, activation=act) for act in COMPUTED]

    text = on_tpu.compiled("v5e", all_of_them, given)
    calls = text.count('custom_call_target="tpu_custom_call"')
    assert calls == len(COMPUTED)


@on_tpu.needs_compiler
def test_no_matrix_is_copied() -> None:
    """Halves are read where they are."""
    given = operands(512, 1024, 1024, 16, "gate_up")
    program = ahead_of_time.compiled(
        on_tpu.KINDS["v5e"], lambda x: tpu.forward(**x, halves="gate_up"), given
    )
    matrices = 16 * 1024 * 2048 * 2
    assert program.memory_analysis().temp_size_in_bytes < matrices / 16
