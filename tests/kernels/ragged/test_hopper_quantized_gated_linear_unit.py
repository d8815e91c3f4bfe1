"""Units of experts of 8-bit matrices on Hopper: what is taken, numbers, the choice."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.ragged.dot.hopper.stored import MANY, Tiles
from rewriter.kernels.ragged.gated_linear_unit import OP as PLAIN
from rewriter.kernels.ragged.gated_linear_unit import STORED as OP
from rewriter.kernels.ragged.gated_linear_unit import hopper_stored as hopper
from rewriter.kernels.ragged.gated_linear_unit.hopper_stored import KERNEL
from rewriter.kernels.ragged.gated_linear_unit.reference import branches
from rewriter.kernels.shared.activations_hopper import ON_HOPPER
from rewriter.ops import device
from rewriter.ops.kernel import spec_of, worth_measuring
from rewriter.ops.stored import EIGHT_BITS as DTYPES
from rewriter.ops.stored import numbers_of as quantized
from rewriter.ops.stored import widened_operands
from tests import slow
from tests.kernels.ragged.test_dot import exact
from tests.kernels.ragged.test_hopper_dot import SIZES, close, on_hopper
from tests.support.kernels import simulator

pytestmark = pytest.mark.once

HALVES = (None, "gate_up", "up_gate")
TILES = [Tiles(), Tiles(behind=False), Tiles(64, 128, apart=True), MANY]


def make(
    sizes: list[int], m: int, k: int, f: int, halves: str | None, stored: str,
    rows: str = "bfloat16",
) -> dict[str, Any]:  # fmt: skip
    r = np.random.default_rng(0)
    g = len(sizes)
    made = {
        "x": r.standard_normal((m, k)).astype(rows),
        "group_sizes": np.array(sizes, "int32"),
    }
    for name in ("w",) if halves else ("w", "w_up"):
        columns = 2 * f if halves else f
        matrices = jnp.asarray(r.standard_normal((g, k, columns)), "float32")
        made[name] = np.asarray(quantized(matrices, stored))
        spread = k**-0.5 / (40 if stored == "int8" else 1)
        scale = r.uniform(0.5 * spread, 1.5 * spread, (g, columns))
        made[f"{name}_scale"] = scale.astype("float32")
    return made


def wanted(given: dict[str, Any], halves: str | None) -> Any:
    """The result in float64, by silu."""
    sizes = np.maximum(given["group_sizes"], 0)
    found = []
    for name in ("w", "w_up"):
        if name in given:
            matrices = given[name].astype(np.float32).astype(np.float64)
            matrices *= given[f"{name}_scale"].astype(np.float64)[:, None]
            x = given["x"].astype(np.float64)
            found.append(exact(x, matrices, sizes, "forward"))
    if halves:
        found = np.split(found[0], 2, -1)[:: 1 if halves == "gate_up" else -1]
    gate, up = found
    return gate / (1 + np.exp(-gate)) * up


def structs(given: dict[str, Any]) -> dict[str, Any]:
    return {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in given.items()}


def spec(halves: str | None, **params: Any) -> Any:
    given = make([8, 8], 16, 64, 128, halves, "int8")
    return spec_of(OP, given, {"halves": halves, **params})


@pytest.mark.parametrize("halves", HALVES)
def test_supports(halves: str | None) -> None:
    assert hopper.supports(spec(halves)).ok
    found, pruned = worth_measuring(KERNEL.space, spec(halves), device.named("h200"), 9)
    assert len(found) >= 2
    assert not pruned
    for given, why in (
        (spec(halves, activation="mish"), "mish needs log1p"),
        (spec(halves, out_dtype="float32"), "the result is float32"),
    ):
        verdict = hopper.supports(given)
        assert why in "; ".join(r.text for r in verdict.reasons)
        assert not verdict.ok


@pytest.mark.parametrize("halves", HALVES)
@pytest.mark.parametrize("stored", DTYPES)
def test_reference(stored: str, halves: str | None) -> None:
    given = make([5, 0, 9], 20, 32, 24, halves, stored, "float32")
    for call in (OP.reference, OP.general):
        close(call(**given, halves=halves), wanted(given, halves), "float32")


@pytest.mark.parametrize("halves", HALVES)
@pytest.mark.parametrize("tiles", slow.first(1, [*TILES[::3], TILES[2]]), ids=str)
def test_simulated(tiles: Tiles, halves: str | None) -> None:
    """The kernel's own code, a Python thread per warpgroup, few blocks: many turns."""
    sizes = [70, 0, 130, 20]
    given = make(sizes, 230, 192, 256, halves, "int8")
    want = wanted(given, halves)
    few = dataclasses.replace(tiles, programs=2)
    with simulator.simulated_ragged_dot(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(ON_HOPPER, "silu", lambda y, beta: y / (1 + np.exp(-y)))
        got = KERNEL.forward(**given, halves=halves, config=few)
    close(got, want, "bfloat16")


@pytest.mark.parametrize("halves", HALVES)
def test_shape_of_the_cotangent_of_rows(halves: str | None) -> None:
    given = make([20, 0, 12], 36, 64, 128, halves, "int8")
    up = np.random.default_rng(1).standard_normal((36, 128)).astype("bfloat16")
    rest = {n: x for n, x in given.items() if n != "x"}
    f = lambda x: OP.reference(x=x, **rest, halves=halves)
    (want,) = jax.vjp(f, jnp.asarray(given["x"]))[1](jnp.asarray(up))
    ordinary = widened_operands(PLAIN, given)
    kept = branches(
        ordinary["x"], ordinary["w"], ordinary["group_sizes"], ordinary.get("w_up"),
        halves, jax.lax.ragged_dot,
    )  # fmt: skip
    assert KERNEL.backward is not None
    shapes = jax.eval_shape(
        lambda x, kept, up: KERNEL.backward(
            **x, residuals=kept, cotangent=up, halves=halves
        ),
        given, kept, up,
    )  # fmt: skip
    assert shapes.keys() == {"x"}
    assert (shapes["x"].shape, shapes["x"].dtype) == (want.shape, want.dtype)


@pytest.mark.parametrize(
    ("halves", "tiles", "stored"),
    slow.first(1, [(None, Tiles(), "int8"), ("up_gate", MANY, "float8_e5m2")],
               several=True),
)  # fmt: skip
def test_lowers_on_a_cpu(halves: str | None, tiles: Tiles, stored: str) -> None:
    given = structs(make([9, 0, 5], 20, 128, 128, halves, stored))
    call = jax.jit(lambda x: KERNEL.forward(**x, halves=halves, config=tiles))
    exported = jax.export.export(call, platforms=["cuda"])(given)
    assert exported.mlir_module().count("mosaic_gpu_v2") == 1


# ---------------------------------------------------------------------- the choice
def apart(x: Any, w: Any, n: Any, s: Any, u: Any, t: Any) -> Any:
    def dot(matrices: Any, scale: Any) -> Any:
        wide = matrices.astype("float32") * scale[:, None]
        return jax.lax.ragged_dot(x, wide.astype(x.dtype), n)

    return jax.nn.silu(dot(w, s)) * dot(u, t)


def side_by_side(x: Any, w: Any, n: Any, s: Any) -> Any:
    wide = (w.astype("float32") * s[:, None]).astype(x.dtype)
    gate, up = jnp.split(jax.lax.ragged_dot(x, wide, n), 2, -1)
    return jax.nn.silu(gate) * up


def drawn(halves: str | None, stored: str, m: int = 256, g: int = 64) -> Any:
    """Arguments of a program, and operands of the op."""
    r = np.random.default_rng(0)
    sizes = r.multinomial(m, r.dirichlet(np.full(g, 2.0))).tolist()
    given = make(sizes, m, 2048, 768, halves, stored)
    order = ("x", "w", "group_sizes", "w_scale", "w_up", "w_up_scale")
    return [given[n] for n in order if n in given], given


@pytest.mark.parametrize(("f", "halves"), [(apart, None), (side_by_side, "gate_up")])
def test_it_is_chosen_where_few_rows_read_all_matrices(f: Any, halves: Any) -> None:
    args, _ = drawn(halves, "int8")
    report = rewriter.explain(f, target="h200")(*args)
    (site,) = report.sites
    assert (site.op, site.form) == ("ragged_gated_linear_unit", OP.name)
    assert (site.kernel, site.origin) == ("hopper", "estimated")
    assert f"w i8[64,2048,{1536 if halves else 768}] " in site.shapes
    assert report.counts()["ragged_dot"] == (1 if halves else 2)
    for target in ("a100", "cpu"):
        found = rewriter.explain(f, target=target)(*args).sites
        assert {(site.op, site.form) for site in found} == {("ragged_dot", "")}


def test_branches_of_different_types_are_two_ragged_dots() -> None:
    args, _ = drawn(None, "int8")
    args[4] = args[4].astype("float32").astype("float8_e4m3fn")
    found = rewriter.explain(apart, target="h200")(*args).sites
    forms = [(site.op, site.form) for site in found]
    assert forms == [("ragged_dot", "quantized_ragged_dot")] * 2


@pytest.mark.parametrize(("f", "halves"), [(apart, None), (side_by_side, "gate_up")])
def test_numbers_of_a_program(f: Any, halves: Any) -> None:
    args, given = drawn(halves, "int8", 24, 4)
    fast = rewriter.optimize(f, implementation={OP.name: "reference"})
    (site,) = fast.report(*args).sites
    assert (site.form, site.kernel) == (OP.name, "reference")
    close(fast(*args), wanted(given, halves), "bfloat16")


# ------------------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("halves", HALVES)
@pytest.mark.parametrize(
    ("case", "tiles", "stored"),
    [
        *(("uneven", tiles, "int8") for tiles in TILES),
        *(("uneven", TILES[0], stored) for stored in DTYPES[1:]),
        *((case, TILES[0], "int8") for case in ("too many", "all empty")),
    ],
    ids=str,
)
def test_numbers(case: str, tiles: Tiles, stored: str, halves: str | None) -> None:
    m, sizes = SIZES[case]
    given = make(sizes, m, 192, 384, halves, stored)
    want = wanted(given, halves)
    call = functools.partial(KERNEL.forward, halves=halves, config=tiles)
    got, kept = jax.jit(functools.partial(call, residuals=True))(**given)
    close(got, want, "bfloat16")
    gate, up = (np.asarray(y, np.float64) for y in kept)
    error = np.abs(gate / (1 + np.exp(-gate)) * up - want).max()
    assert error <= 2e-2 * max(1.0, np.abs(want).max())


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("f", "halves"), [(apart, None), (side_by_side, "gate_up")])
@pytest.mark.parametrize("stored", DTYPES)
def test_a_whole_program(stored: str, f: Any, halves: str | None) -> None:
    args, given = drawn(halves, stored)
    fast = rewriter.optimize(f)
    (site,) = fast.report(*args).sites
    assert (site.kernel, site.form) == ("hopper", OP.name)
    close(fast(*args), wanted(given, halves), "bfloat16")
    total = lambda f: lambda x, *rest: f(x, *rest).astype("float32").sum()
    got, want = (jax.jit(jax.grad(total(g)))(*args) for g in (fast, f))
    want = np.asarray(want, np.float64)
    error = np.abs(np.asarray(got, np.float64) - want).max()
    assert error <= 2e-2 * max(1.0, np.abs(want).max())
