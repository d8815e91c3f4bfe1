"""Norms on TPUs, without one: numbers, memory, and what compiles."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.hardware import ahead_of_time
from rewriter.kernels.norms.tpu import Rows, chunk_of, rows_of, vmem, with_addend
from rewriter.kernels.shared import pallas_tpu
from rewriter.ops import device, tpu
from rewriter.ops.kernel import spec_of, worth_measuring
from rewriter.ops.registry import registry
from tests import slow
from tests.support.kernels import addends, extreme_rows
from tests.support.kernels import tpu as on_tpu

pytestmark = pytest.mark.once

OPS = ("rms_norm", "layer_norm")
GENERATIONS = tuple(on_tpu.KINDS)
ALL = ("scale", "bias", "epsilon")


def kernel(op: str) -> Any:
    return next(k for k in registry().kernels(op) if k.name == "mosaic_tpu")


def names(op: str, wanted: Any) -> list[str]:
    return [n for n in wanted if n != "bias" or op == "layer_norm"]


def make(op: str, shape: Any, wanted: Any, dtype: str = "float32") -> Any:
    """Operands with means far from 0, and a cotangent."""
    r = np.random.default_rng(0)
    given = {"x": r.standard_normal(shape) + 3}
    for name in names(op, wanted):
        width = () if name == "epsilon" else shape[-1:]
        given[name] = np.abs(r.standard_normal(width))
    made = {n: np.asarray(y, jnp.dtype(dtype)) for n, y in given.items()}
    return made, np.asarray(r.standard_normal(shape), jnp.dtype(dtype))


def exact(op: str, given: dict[str, Any], up: Any, eps: float) -> dict[str, Any]:
    """The result as "out", and the cotangents, in float64."""
    wide = {n: np.asarray(y, np.float64) for n, y in given.items()}
    x, up, d = wide["x"], np.asarray(up, np.float64), given["x"].shape[-1]
    centred = op == "layer_norm"
    y = x - x.mean(-1, keepdims=True) if centred else x
    square = (y * y).mean(-1, keepdims=True) + eps + wide.get("epsilon", 0.0)
    r = square**-0.5
    n, g = y * r, up * wide.get("scale", 1.0)
    along = (g * n).mean(-1, keepdims=True)
    level = g.mean(-1, keepdims=True) if centred else 0.0
    rows = tuple(range(x.ndim - 1))
    made = {
        "out": n * wide.get("scale", 1.0) + wide.get("bias", 0.0),
        "x": r * (g - level - n * along),
        "scale": (up * n).sum(rows),
        "bias": up.sum(rows),
        "epsilon": np.sum(-0.5 * d * along * r * r),
    }
    return {n: made[n] for n in ("out", *given)}


TOLERANCE = {"float32": 2e-5, "bfloat16": 8e-3}


def both(op: str, given: Any, up: Any, **more: Any) -> dict[str, Any]:
    its, eps = kernel(op), {"eps": 1e-3}

    @jax.jit  # as one program: every operation alone takes longer to compile
    def run(given: Any, up: Any) -> Any:
        out, residuals = its.forward(**given, **eps, residuals=True, **more)
        grads = its.backward(
            **given, **eps, out=None, residuals=residuals, cotangent=up, **more
        )
        return {"out": out, **grads}

    return run(given, up)


def with_addends(
    op: str, given: Any, up: Any, added: Any, **more: Any
) -> dict[str, Any]:
    """As `both`, of a sum, which is a result too."""
    run = functools.partial(addends.both, kernel(op), eps=1e-3, **more)
    return jax.jit(run)(given, up, added)


def check_addends(op: str, given: Any, up: Any, added: Any, made: Any) -> None:
    """The sum has the bits of one by itself; the rest is compared with float64."""
    total = np.asarray(jax.jit(jnp.add)(given["x"], added["x"]))
    np.testing.assert_array_equal(np.asarray(made["sum"]), total)
    wanted = exact(op, {**given, "x": total}, up, 1e-3)
    wanted["x"] = wanted["x"] + np.asarray(added["cotangent"], np.float64)
    compare(given, {n: y for n, y in made.items() if n != "sum"}, wanted)


def check(op: str, given: Any, up: Any, made: Any) -> None:
    compare(given, made, exact(op, given, up, 1e-3))


def compare(given: Any, made: Any, wanted: Any) -> None:
    assert set(made) == set(wanted)
    for name, want in wanted.items():
        got = made[name]
        assert got.dtype == given.get(name, given["x"]).dtype
        assert got.shape == want.shape
        error = np.abs(np.asarray(got, np.float64) - want).max(initial=0.0)
        size = max(1.0, np.abs(want).max(initial=0.0))
        assert error <= TOLERANCE[str(got.dtype)] * size, name


CASES = {
    "one column": ((5, 1), ALL, Rows()),
    "few rows": ((3, 5, 7), ALL, Rows(64)),
    "no rows beside": ((9,), ("scale",), None),
    "registers and more": ((150, 200), ("scale", "bias"), Rows(64, 2)),
    "parts that differ": ((330, 130), ("bias", "epsilon"), Rows(64, 4)),
    "more parts than blocks": ((100, 128), ALL, Rows(64, 8)),
    "columns left over": ((133, 1100), ALL, Rows(64, 2)),
    "whole columns": ((2, 64, 512), ALL, Rows(64)),
    "many columns": ((17, 9000), (), Rows(64)),
    "wide rows": ((19, 33000), ("scale",), None),
}


@pytest.mark.parametrize("op", OPS)
def test_extreme_rows_are_as_exact_as_the_formula(op: str) -> None:
    its = kernel(op)

    @functools.partial(jax.jit, static_argnums=2)
    def run(given: Any, up: Any, eps: float) -> Any:
        out, kept = its.forward(**given, eps=eps, residuals=True)
        return {"out": out} | its.backward(
            **given, eps=eps, out=None, residuals=kept, cotangent=up
        )

    with on_tpu.interpreted():
        extreme_rows.check(op, 300, run)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", slow.first(6, CASES))
def test_numbers(case: str, op: str) -> None:
    shape, wanted, config = CASES[case]
    given, up = make(op, shape, wanted)
    with on_tpu.interpreted():
        check(op, given, up, both(op, given, up, config=config))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", slow.first(6, CASES))
def test_numbers_of_addends(case: str, op: str) -> None:
    shape, wanted, config = CASES[case]
    given, up = make(op, shape, wanted)
    added = addends.beside(given)
    with on_tpu.interpreted():
        made = with_addends(op, given, up, added, config=config)
    check_addends(op, given, up, added, made)


@pytest.mark.parametrize("op", OPS)
def test_addends_that_do_not_fit_are_added_outside(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, up = make(op, (130, 256), ("scale",))
    added, before = addends.beside(given), pallas_tpu.call
    sizes: list[int] = []

    def counted(*args: Any, **more: Any) -> Any:
        sizes.append(len(args[3]))
        return before(*args, **more)

    monkeypatch.setattr(pallas_tpu, "call", counted)
    for room, inputs in ((1 << 24, [3, 4]), (1 << 10, [2, 3])):
        few = dataclasses.replace(tpu.UNKNOWN, vmem=room)
        monkeypatch.setattr(tpu, "UNKNOWN", few)
        sizes.clear()
        with on_tpu.interpreted():
            made = with_addends(op, given, up, added, config=Rows(64))
        check_addends(op, given, up, added, made)
        assert sizes == inputs


def test_blocks_with_addends_take_no_more_memory() -> None:
    for width, rows in ((4096, 512), (4096, 64), (512, 1024), (30000, 64)):
        found = with_addend(8192, width, Rows(rows, 2), 4, 4)
        without = vmem(width, rows_of(8192, width, Rows(rows)), 4)
        assert found is not None
        assert found.parts == 2
        size = vmem(width, rows_of(8192, width, found), 8)
        assert size <= max(without, tpu.UNKNOWN.vmem)
    assert with_addend(8192, 120000, Rows(8), 4, 4) is None


@pytest.mark.parametrize("op", OPS)
def test_numbers_in_bfloat16(op: str) -> None:
    given, up = make(op, (70, 600), ALL, "bfloat16")
    with on_tpu.interpreted():
        check(op, given, up, both(op, given, up, config=Rows(64)))
        wide = kernel(op).forward(**given, out_dtype="float32")
        added = addends.beside(given)
        made = with_addends(op, given, up, added, config=Rows(64))
    assert wide.dtype == jnp.float32
    check_addends(op, given, up, added, made)


@pytest.mark.parametrize("op", OPS)
def test_memory(op: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Two cores, rows and columns left over, NaN in memory that was not written."""
    given, up = make(op, (150, 200), ALL)
    with on_tpu.simulated(capfd, cores=2):
        made = both(op, given, up, config=Rows(64, 2))
        made = {n: np.asarray(y) for n, y in made.items()}
        added = addends.beside(given)
        summed = with_addends(op, given, up, added, config=Rows(64, 2))
        summed = {n: np.asarray(y) for n, y in summed.items()}
    check(op, given, up, made)
    check_addends(op, given, up, added, summed)


def spec(op: str, shape: Any, wanted: Any = ALL, dtype: str = "bfloat16") -> Any:
    given = {"x": jax.ShapeDtypeStruct(shape, dtype)}
    for name in names(op, wanted):
        width = () if name == "epsilon" else shape[-1:]
        given[name] = jax.ShapeDtypeStruct(width, "float32")
    return spec_of(registry().op(op), given, {})


@pytest.mark.parametrize("op", OPS)
def test_supports(op: str) -> None:
    its = kernel(op)
    for given in (spec(op, (1, 1)), spec(op, (7,)), spec(op, (64, 46000)),
                  spec(op, (4, 4, 300), dtype="float32")):  # fmt: skip
        assert its.supports(given).ok
    for given, why in (
        (spec(op, (8, 64), dtype="float16"), "x is float16"),
        (spec(op, (0, 64)), "holds no numbers"),
        (spec(op, (8, 1 << 20)), "rows of 1048576 take"),
    ):
        verdict = its.supports(given)
        assert why in "; ".join(r.text for r in verdict.reasons)
        assert not verdict.ok


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", [*on_tpu.KINDS.values(), device.Device("", "tpu")])
def test_defaults_fit(kind: device.Device, op: str) -> None:
    its = kernel(op)
    for given in (spec(op, (8192, 4096)), spec(op, (9, 36000), dtype="float32"),
                  spec(op, (65536, 128))):  # fmt: skip
        usual = its.space.default(given, kind)
        assert its.space.fits(usual, given, kind).ok
        found, _ = worth_measuring(its.space, given, kind, 8)
        assert len(found) >= 2
    assert not its.space.fits(Rows(24), given, kind).ok
    assert not its.space.fits(Rows(64, 0), given, kind).ok
    assert not its.space.fits(Rows(1 << 16), spec(op, (1 << 16, 4096)), kind).ok


def test_blocks_are_whole_chunks() -> None:
    for width in (512, 16000, 40000):
        for m in (1, 15, 16, 17, 100, 8192):
            rows, chunk = rows_of(m, width, Rows(256)), chunk_of(width)
            assert rows == m if m < chunk else rows % chunk == 0
            assert rows <= m


COMPILED = [
    ((2048, 4096), "bfloat16"),
    ((100, 300), "float32"),
    ((20, 46000), "bfloat16"),
]


@on_tpu.needs_compiler
@pytest.mark.parametrize(
    ("generation", "case"), on_tpu.each_generation(COMPILED), ids=str
)
@pytest.mark.parametrize("op", OPS)
def test_compiles(op: str, generation: str, case: Any) -> None:
    shape, dtype = case
    its, use = kernel(op), spec(op, shape, dtype=dtype)
    structs = {
        n: jax.ShapeDtypeStruct(use.shape(n), use.dtype(n)) for n in use.operands
    }
    config = its.space.default(use, on_tpu.KINDS[generation])
    text = on_tpu.compiled(
        generation, lambda given, up: both(op, given, up, config=config), structs,
        structs["x"],
    )  # fmt: skip
    assert text.count('custom_call_target="tpu_custom_call"') == 2
    added = {"x": structs["x"], "cotangent": structs["x"]}
    text = on_tpu.compiled(
        generation, lambda *args: with_addends(op, *args, config=config), structs,
        structs["x"], added,
    )  # fmt: skip
    assert text.count('custom_call_target="tpu_custom_call"') == 2
    # Of rows so wide that a sum beside them does not fit, it is made in front.
    assert (" add(" in text.split("ENTRY")[1]) == (shape[-1] > 30000)


# ------------------------------------------------------------- the whole engine
def rms(x: Any, scale: Any) -> Any:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
    return (y * scale).astype(x.dtype)


def layer(x: Any, scale: Any) -> Any:
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, -1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
    return (y * scale).astype(x.dtype)


def loss(norm: Any) -> Any:
    return lambda x, s: jnp.sum(jnp.sin(norm(x, s).astype(jnp.float32)))


SPECS = (
    jax.ShapeDtypeStruct((4, 1024, 512), jnp.bfloat16),
    jax.ShapeDtypeStruct((512,), jnp.float32),
)


@pytest.mark.parametrize("norm", [rms, layer])
@pytest.mark.parametrize("target", [f"tpu_{g}" for g in GENERATIONS])
def test_it_is_chosen_for_gradients(target: str, norm: Any) -> None:
    (site,) = rewriter.explain(norm, target=target)(*SPECS).sites
    assert site.kernel == "xla"
    assert "estimated to" in dict(site.not_chosen)["mosaic_tpu"]
    (site,) = rewriter.explain(jax.grad(loss(norm), (0, 1)), target=target)(
        *SPECS
    ).sites
    assert site.kernel == "mosaic_tpu"
    small = [jax.ShapeDtypeStruct((8, 512), jnp.bfloat16), SPECS[1]]
    (site,) = rewriter.explain(jax.grad(loss(norm), (0, 1)), target=target)(
        *small
    ).sites
    assert site.kernel == "xla"


@on_tpu.needs_compiler
@pytest.mark.parametrize("norm", [rms, layer])
def test_programs_for_tpus_hold_it(norm: Any) -> None:
    """Under grad, vmap and scan."""

    def layers(x: Any, scales: Any) -> Any:
        step = lambda x, s: (jax.vmap(norm, (0, None))(x, s), None)
        return jnp.sum(jax.lax.scan(step, x, scales)[0].astype(jnp.float32))

    specs = SPECS[0], jax.ShapeDtypeStruct((3, 512), jnp.float32)
    fast = rewriter.optimize(jax.grad(layers, (0, 1)), target="tpu_v5e")
    assert {s.kernel for s in fast.report(*specs).sites} == {"mosaic_tpu"}
    artifact = rewriter.export(fast, platforms=("cpu", "tpu"))(*specs)
    assert "tpu_custom_call" in artifact.manifest["custom_calls"]
    on_tpu.compiled("v5e", fast, *specs)


@on_tpu.needs_compiler
def test_in_shard_map() -> None:
    mesh = jax.sharding.Mesh(np.array(ahead_of_time.topology("v5e:2x2")), ("x",))
    rows, whole = jax.P("x"), jax.P()
    split = jax.shard_map(
        lambda x, s: jax.grad(loss(layer))(x, s), mesh=mesh, in_specs=(rows, whole),
        out_specs=rows,
    )  # fmt: skip
    fast = rewriter.optimize(split, target="tpu_v5e")
    specs = [
        jax.ShapeDtypeStruct(
            s.shape, s.dtype, sharding=jax.sharding.NamedSharding(mesh, p)
        )
        for s, p in zip((jax.ShapeDtypeStruct((16, 1024, 512), jnp.bfloat16), SPECS[1]),
                        (rows, whole), strict=True)
    ]  # fmt: skip
    text = fast.trace(*specs).lower(lowering_platforms=("tpu",)).compile().as_text()
    assert "tpu_custom_call" in text
    assert "all-gather" not in text
