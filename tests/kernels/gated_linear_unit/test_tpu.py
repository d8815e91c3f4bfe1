"""The gated linear unit on TPUs, without one: numbers, memory, and what compiles."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.hardware import ahead_of_time
from rewriter.kernels.gated_linear_unit import KERNELS, OP, tpu
from rewriter.kernels.gated_linear_unit.tpu.config import Tiles
from rewriter.ops import device
from rewriter.ops.activations import ACTIVATIONS
from rewriter.ops.kernel import spec_of, worth_measuring
from tests import slow
from tests.kernels.gated_linear_unit.test_gated_linear_unit import with_nan
from tests.support.kernels import tpu as on_tpu

KERNEL = next(k for k in KERNELS if k.name == "mosaic_tpu")
BIASES = ("b_gate", "b_up")


def structs(
    shape: Any, f: int, biases: Any = (), dtype: Any = "bfloat16"
) -> dict[str, Any]:
    sizes = {"x": shape, "w_gate": (shape[-1], f), "w_up": (shape[-1], f)}
    sizes |= dict.fromkeys(biases, (f,))
    return {n: jax.ShapeDtypeStruct(s, dtype) for n, s in sizes.items()}


def make(given: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    r = np.random.default_rng(0)
    spread = {"w_gate": 0.1, "w_up": 0.1}
    made = {
        n: (r.standard_normal(s.shape) * spread.get(n, 1.0)).astype(s.dtype)
        for n, s in given.items()
    }
    up = r.standard_normal((*given["x"].shape[:-1], given["w_up"].shape[1]))
    return made, up.astype(given["x"].dtype)


def both(given: Any, up: Any, tiles: Any = None, second: Any = None, **params: Any):
    @jax.jit
    def run(given: Any, up: Any) -> Any:
        out, residuals = tpu.forward(**given, **params, config=tiles, residuals=True)
        grads = tpu.backward(
            **given, **params, config=second or tiles, out=None, residuals=residuals,
            cotangent=up,
        )  # fmt: skip
        return {"out": out, **grads}

    return run(given, up)


TOLERANCE = {"float32": 1e-5, "bfloat16": 1.6e-2}


def check(given: Any, up: Any, made: Any, **params: Any) -> None:
    with jax.enable_x64(True):
        wide = {n: jnp.asarray(np.asarray(y, np.float64)) for n, y in given.items()}

        @jax.jit  # as one program: every operation alone takes longer to compile
        def exact(operands: Any, up: Any) -> Any:
            out, back = jax.vjp(lambda o: OP.reference(**o, **params), operands)
            return {"out": out, **back(up)[0]}

        want = exact(wide, jnp.asarray(np.asarray(up, np.float64)))
        want = {n: np.asarray(y) for n, y in want.items()}
    assert set(made) == set(want)
    for name, got in made.items():
        assert got.dtype == given.get(name, given["x"]).dtype
        assert got.shape == want[name].shape
        error = np.abs(np.asarray(got, np.float64) - want[name]).max()
        size = max(1.0, np.abs(want[name]).max())
        assert error <= TOLERANCE[str(got.dtype)] * size, name


CASES = {
    "one of all": ((1, 1), 1, BIASES, None, {}),
    "columns left over": ((70, 200), 330, BIASES, Tiles(32, 128, 128, 128), {}),
    "pieces of a block": ((3, 50, 384), 130, ("b_up",), Tiles(64, 512, 128, 128),
                          {"clip_gate": (None, 2.0), "up_shift": 1.0}),
    "rows left over": ((40, 256), 128, BIASES, Tiles(32, 256, 128, 256),
                       {"activation": "gelu_erf"}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_numbers(case: str) -> None:
    shape, f, biases, tiles, params = CASES[case]
    given, up = make(structs(shape, f, biases, "float32"))
    params = {**params, "precision": "highest"}
    with on_tpu.interpreted():
        made = both(given, up, tiles, **params)
    check(given, up, made, **params)


@pytest.mark.parametrize("activation", slow.first(6, ACTIVATIONS))
def test_activations(activation: str) -> None:
    given, up = make(structs((24, 64), 64, (), "float32"))
    params = {"activation": activation, "beta": 0.5, "precision": "highest"}
    with on_tpu.interpreted():
        made = both(given, up, **params)
    check(given, up, made, **params)


def test_slopes() -> None:
    given, up = make(structs((24, 64), 64, (), "float32"))
    given["x"][3], given["w_gate"][:, 5] = 0, 0
    params = {"activation": "relu", "slopes": ((0.0, 0.5),), "precision": "highest"}
    with on_tpu.interpreted():
        made = both(given, up, **params)
    assert made["w_gate"][:, 5].any()
    check(given, up, made, **params)


@pytest.mark.parametrize("activation", slow.first(1, ["relu", "gelu_erf"]))
def test_what_is_no_number_stays_none(activation: str) -> None:
    """In blocks of which some reach over the last row, or the last column."""
    given, up = make(structs((70, 200), 330, (), "float32"))
    params = {"activation": activation, "precision": "highest"}
    run = lambda x: both(x, up, Tiles(32, 128, 128, 128), **params)
    for operands, want in with_nan(given):
        with on_tpu.interpreted():
            made = run(operands)
        np.testing.assert_array_equal(np.isnan(made["out"]), want)
        _, back = jax.vjp(lambda o: OP.reference(**o, **params), operands)
        for name, g in back(jnp.asarray(up))[0].items():
            assert np.isfinite(np.asarray(made[name])[np.isfinite(g)]).all(), name


def test_numbers_in_bfloat16() -> None:
    given, up = make(structs((70, 200), 260, BIASES, jnp.bfloat16))
    with on_tpu.interpreted():
        check(given, up, both(given, up, Tiles(32, 128, 128, 128)))


def test_memory(capfd: pytest.CaptureFixture[str]) -> None:
    """Two cores, edges on every axis, NaN in memory that was not written."""
    given, up = make(structs((40, 200), 150, BIASES, "float32"))
    params = {"precision": "highest"}
    with on_tpu.simulated(capfd, cores=2):
        made = both(given, up, Tiles(16, 128, 128, 128), **params)
        made = {n: np.asarray(y) for n, y in made.items()}
    check(given, up, made, **params)


def test_supports() -> None:
    def of(*given: Any, **params: Any) -> Any:
        return tpu.supports(spec_of(OP, structs(*given), params))

    assert of((7, 9), 11).ok
    assert of((2, 8, 8192), 28672, BIASES, "float32", precision="high").ok
    for verdict, why in (
        (of((8, 8), 8, (), "float16"), "x is float16"),
        (of((0, 8), 8), "size 0"),
        (of((8, 8), 8, out_dtype="float16"), "the result is float16"),
        (of((8, 8), 8, precision="tf32"), "no choice of the compiler"),
        (of((8, 8), 8, activation="sine"), "sine is not one of"),
        (of((8, 8), 8, activation="selu"), "selu needs expm1"),
    ):
        assert not verdict.ok
        assert why in "; ".join(r.text for r in verdict.reasons)
    more = structs((8, 8), 8) | {"rows_up": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
    assert not tpu.supports(spec_of(OP, more, {})).ok


@pytest.mark.parametrize("kind", [*on_tpu.KINDS.values(), device.Device("", "tpu")])
def test_defaults_fit(kind: device.Device) -> None:
    for given in (structs((8192, 4096), 14336), structs((5, 300), 7000, (), "float32")):
        use = spec_of(OP, given, {})
        for space in (KERNEL.space, KERNEL.backward_space):
            assert space is not None
            assert space.fits(space.default(use, kind), use, kind).ok
            assert worth_measuring(space, use, kind, 8)[0]
        assert not tpu.fits(Tiles(block_n=100), use, kind).ok
    large = spec_of(OP, structs((8192, 8192), 8192), {})
    assert not tpu.fits(Tiles(8192, 8192, 8192, 512), large, kind).ok


COMPILED = [((1024, 1024), 1536, (), "bfloat16"), ((100, 330), 200, BIASES, "float32")]


@on_tpu.needs_compiler
@pytest.mark.parametrize(
    ("generation", "case"), on_tpu.each_generation(COMPILED), ids=str
)
def test_compiles(generation: str, case: Any) -> None:
    shape, f, biases, dtype = case
    given, here = structs(shape, f, biases, dtype), on_tpu.KINDS[generation]
    use = spec_of(OP, given, {})
    tiles = tpu.default(use, here), tpu.default_backward(use, here)
    params = {} if dtype == "bfloat16" else {"precision": "highest"}
    up = jax.ShapeDtypeStruct((shape[0], f), dtype)
    text = on_tpu.compiled(
        generation, lambda x, u: both(x, u, *tiles, **params), given, up
    )
    assert text.count('custom_call_target="tpu_custom_call"') == 2


@on_tpu.needs_compiler
@pytest.mark.parametrize("activation", sorted({*ACTIVATIONS} - {*tpu.WITHOUT}))
def test_activations_compile(activation: str) -> None:
    given = structs((128, 128), 128)
    on_tpu.compiled(
        "v5e", lambda x, u: both(x, u, activation=activation, beta=0.5), given,
        given["x"],
    )  # fmt: skip


def unit(x: Any, gate: Any, up: Any) -> Any:
    return jax.nn.silu(x @ gate) * (x @ up)


@on_tpu.needs_compiler
def test_programs_for_tpus_hold_it() -> None:
    """Where it is asked for: XLA is as good by the compiler's own estimate."""
    specs = [jax.ShapeDtypeStruct(s, jnp.bfloat16)
             for s in ((4, 512, 256), (256, 384), (256, 384))]  # fmt: skip
    (site,) = rewriter.explain(unit, target="tpu_v5e")(*specs).sites
    assert site.kernel == "xla"
    assert "XLA" in dict(site.not_chosen)["mosaic_tpu"]
    loss = lambda *x: jnp.sum(jax.vmap(unit, (0, None, None))(*x).astype(jnp.float32))
    forced = {"gated_linear_unit": "mosaic_tpu"}
    fast = rewriter.optimize(
        jax.grad(loss, (0, 1, 2)), target="tpu_v5e", implementation=forced
    )
    assert {s.kernel for s in fast.report(*specs).sites} == {"mosaic_tpu"}
    artifact = rewriter.export(fast, platforms=("cpu", "tpu"))(*specs)
    assert "tpu_custom_call" in artifact.manifest["custom_calls"]
    if ahead_of_time.can_compile(on_tpu.KINDS["v5e"]):
        on_tpu.compiled("v5e", fast, *specs)
