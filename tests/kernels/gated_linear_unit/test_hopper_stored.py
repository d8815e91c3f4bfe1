"""Units of stored matrices on Hopper: what is taken, the numbers, the lowering."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.gated_linear_unit import STORED as OP
from rewriter.kernels.gated_linear_unit import hopper_stored as hopper
from rewriter.kernels.gated_linear_unit.hopper_stored import KERNEL
from rewriter.kernels.ragged.dot.hopper.stored import MANY, Tiles
from rewriter.kernels.shared.activations_hopper import ON_HOPPER
from rewriter.ops import device
from rewriter.ops.kernel import spec_of, worth_measuring
from rewriter.ops.stored import EIGHT_BITS, numbers_of
from tests import slow
from tests.kernels.ragged.test_hopper_dot import on_hopper
from tests.support.kernels import simulator

pytestmark = pytest.mark.once

HALVES = (None, "gate_up", "up_gate")
TILES = [Tiles(), Tiles(64, 128, apart=True), MANY]
WITHIN, BEHIND = "bfloat16 *scale", "float32 *scale"
HERE = device.named("h100")


def make(
    m: int, k: int, f: int, halves: str | None, stored: str = "int8", groups: int = 1,
    scale: str = "bfloat16", bias: bool = False,
) -> dict[str, Any]:  # fmt: skip
    r = np.random.default_rng(0)
    made = {"x": r.standard_normal((m, k)).astype("bfloat16")}
    for name in ("w_gate",) if halves else ("w_gate", "w_up"):
        n = 2 * f if halves else f
        numbers = jnp.asarray(r.standard_normal((k, n)), "float32")
        made[name] = np.asarray(numbers_of(numbers, stored))
        spread = k**-0.5 / (40 if stored == "int8" else 1)
        scales = r.uniform(0.5 * spread, 1.5 * spread, (groups, n))
        made[f"{name}_scale"] = scales.astype(scale)
    if bias:
        made["b_gate"], made["b_up"] = r.standard_normal((2, f)).astype("bfloat16")
    return made


def wanted(given: dict[str, Any], **params: Any) -> np.ndarray:
    with jax.default_matmul_precision("highest"):
        out = OP.reference(**given, **{**OP.defaults, **params, "out_dtype": "float32"})
    return np.asarray(out, np.float64)


def close(got: Any, want: np.ndarray, limit: float = 2**-7) -> None:
    got = np.asarray(got, np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=limit * np.abs(want).max())


def spec(halves: str | None = None, m: int = 16, **given: Any) -> Any:
    params = {n: given.pop(n) for n in ("widen", "activation") if n in given}
    made = make(m, 256, 256, halves, **given)
    return spec_of(OP, made, {"widen": WITHIN, **params, "halves": halves})


@pytest.mark.parametrize("halves", HALVES)
def test_supports(halves: str | None) -> None:
    for given in (
        {},
        {"groups": 4},
        {"widen": BEHIND},
        {"widen": f"bfloat16 {BEHIND}"},
    ):
        assert hopper.supports(spec(halves, **given)).ok, given
    for stored in EIGHT_BITS:
        assert hopper.supports(spec(halves, stored=stored)).ok
    found, pruned = worth_measuring(KERNEL.space, spec(halves), HERE, 9)
    assert len(found) >= 2
    assert not pruned
    for given, why in (
        ({"activation": "mish"}, "mish needs log1p"),
        ({"stored": "int4"}, "rhs is int4"),
        ({"groups": 8}, "groups of 32 numbers"),
        ({"groups": 4, "widen": BEHIND}, "does not compute the steps"),
        ({"widen": "float32 /scale"}, "does not compute the steps"),
    ):
        verdict = hopper.supports(spec(halves, **given))
        assert why in "; ".join(r.text for r in verdict.reasons)
        assert not verdict.ok


USES = [
    (halves, widen, groups, tiles)
    for halves in HALVES
    for widen, groups in ((WITHIN, 1), (WITHIN, 2), (BEHIND, 1))
    for tiles in TILES
]


@pytest.mark.parametrize(
    ("halves", "widen", "groups", "tiles"), slow.first(3, USES[::4], several=True),
    ids=str,
)  # fmt: skip
def test_simulated(halves: Any, widen: str, groups: int, tiles: Tiles) -> None:
    """The kernel's own code, a Python thread per warpgroup, few blocks: many turns."""
    given = make(70, 128, 256, halves, groups=groups, bias=True)
    params = {"widen": widen, "halves": halves}
    few = dataclasses.replace(tiles, programs=2)
    with simulator.simulated_ragged_dot(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(ON_HOPPER, "silu", lambda y, beta: y / (1 + np.exp(-y)))
        got = KERNEL.forward(**given, **{**OP.defaults, **params}, config=few)
    close(got, wanted(given, **params))


LOWERED = [
    (None, Tiles(), WITHIN, 2, "int8"),
    ("up_gate", MANY, WITHIN, 1, "float8_e5m2"),
    ("gate_up", Tiles(), BEHIND, 1, "float8_e4m3fn"),
]


@pytest.mark.parametrize(
    ("halves", "tiles", "widen", "groups", "stored"),
    slow.first(1, LOWERED, several=True),
)
def test_lowers_on_a_cpu(
    halves: Any, tiles: Tiles, widen: str, groups: int, stored: str
) -> None:
    given = make(16, 256, 256, halves, stored, groups)
    structs = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in given.items()}
    params = {**OP.defaults, "widen": widen, "halves": halves}
    call = jax.jit(lambda given: KERNEL.forward(**given, **params, config=tiles))
    exported = jax.export.export(call, platforms=["cuda"])(structs)
    assert exported.mlir_module().count("mosaic_gpu_v2") == 1
    assert [x.shape for x in exported.out_avals] == [(16, 256)]


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("stored", EIGHT_BITS)
@pytest.mark.parametrize("halves", HALVES)
@pytest.mark.parametrize(
    ("widen", "groups"), [(WITHIN, 1), (WITHIN, 4), (BEHIND, 1)], ids=str
)
def test_numbers(
    widen: str, groups: int, halves: Any, stored: str, tiles: Tiles
) -> None:
    for m in (1, 16, 200):
        given = make(m, 1024, 384, halves, stored, groups, bias=True)
        params = {"widen": widen, "halves": halves}
        every = {**OP.defaults, **params, "out_dtype": "float32"}
        got = jax.jit(functools.partial(KERNEL.forward, **every, config=tiles))(**given)
        close(got, wanted(given, **params), 1e-4)


@pytest.mark.gpu
@on_hopper
def test_a_whole_program() -> None:
    given = make(16, 4096, 14336, None)

    def written(x: Any, a: Any, s: Any, b: Any, t: Any) -> Any:
        return jax.nn.silu(x @ (a.astype(x.dtype) * s)) * (x @ (b.astype(x.dtype) * t))

    fast = rewriter.optimize(written, implementation={OP.name: "hopper"})
    args = list(given.values())
    forms = [(s.form, s.kernel) for s in fast.report(*args).sites if s.form]
    assert forms == [(OP.name, "hopper")]
    close(fast(*args), wanted(given, widen=WITHIN), 2**-6)
