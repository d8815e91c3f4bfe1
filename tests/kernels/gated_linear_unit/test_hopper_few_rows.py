"""Units of few rows and stored matrices on Hopper: what is taken, and numbers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.gated_linear_unit import STORED as OP
from rewriter.kernels.gated_linear_unit.hopper_few_rows import (
    ACTIVATIONS,
    KERNEL,
    supports,
)
from rewriter.kernels.quantized_dot.few_rows.config import Tiles
from rewriter.ops import device
from rewriter.ops.kernel import spec_of, worth_measuring
from tests import slow
from tests.kernels.gated_linear_unit.test_hopper_stored import (
    BEHIND,
    HALVES,
    WITHIN,
    close,
    make,
    wanted,
)
from tests.kernels.ragged.test_hopper_dot import on_hopper
from tests.support.kernels import simulator

HERE = device.named("h200")
TILES = [
    None, Tiles(256, 128, 4, 1, 2), Tiles(256, 64, 6, 2, 2), Tiles(256, 64, 2, 1, 2, 2),
]  # fmt: skip
STORED = ("int8", "uint8", "int4", "uint4", "float8_e4m3fn", "float8_e5m2")


def spec(halves: str | None = None, m: int = 16, k: int = 512, **given: Any) -> Any:
    names = ("widen", "activation", "clip_up", "out_dtype")
    params = {n: given.pop(n) for n in names if n in given}
    made = make(m, k, 256, halves, **given)
    return spec_of(OP, made, {"widen": WITHIN, **params, "halves": halves})


@pytest.mark.once
@pytest.mark.parametrize("halves", HALVES)
def test_supports(halves: str | None) -> None:
    for given in ({}, {"groups": 4}, {"widen": BEHIND}, {"bias": True}, {"m": 64}):
        assert supports(spec(halves, **given)).ok, given
    for stored in STORED:
        assert supports(spec(halves, stored=stored)).ok
    for m in (1, 16, 64):
        found, _ = worth_measuring(KERNEL.space, spec(halves, m=m), HERE, 9)
        assert found
    for given, why in (
        ({"activation": "gelu_erf"}, "does not compute gelu_erf"),
        ({"m": 65}, "65 rows"),
        ({"k": 500}, "k is 500"),
        ({"clip_up": (None, 7.0)}, "clip_up"),
        ({"groups": 4, "widen": BEHIND}, "does not compute"),
        ({"out_dtype": "float16"}, "a result of float16"),
    ):
        verdict = supports(spec(halves, **given))
        assert why in "; ".join(r.text for r in verdict.reasons), given
        assert not verdict.ok
    tiles = Tiles(128, 128, 4, 2, 1)
    assert not KERNEL.space.fits(tiles, spec(halves), HERE).ok


USES = [
    (halves, widen, groups, tiles, m)
    for halves in HALVES
    for widen, groups in ((WITHIN, 1), (WITHIN, 4), (BEHIND, 1))
    for tiles in TILES
    for m in (3, 16, 60)
    if m <= 16 or tiles is None or tiles.turns == 1
]


def config_of(tiles: Tiles | None, given: Any, params: Any) -> Tiles:
    """Tiles if they fit, and else those by default."""
    use = spec_of(OP, given, params)
    if tiles is not None and KERNEL.space.fits(tiles, use, HERE).ok:
        return tiles
    return KERNEL.space.default(use, HERE)


@pytest.mark.parametrize(
    ("halves", "widen", "groups", "tiles", "m"), slow.first(3, USES[::7], several=True),
    ids=str,
)  # fmt: skip
def test_simulated(halves: Any, widen: str, groups: int, tiles: Any, m: int) -> None:
    """The kernel's turns: a Python thread per warpgroup, one block after the other."""
    given = make(m, 512, 256, halves, groups=groups, bias=m == 16)
    params = {"widen": widen, "halves": halves}
    config = config_of(tiles, given, params)
    with simulator.simulated_few_rows():
        got = KERNEL.forward(**given, **{**OP.defaults, **params}, config=config)
    close(got, wanted(given, **params))


@pytest.mark.once
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_lowers_on_a_cpu(activation: str) -> None:
    given = make(16, 256, 256, None, "int8", 2, bias=True)
    params = {**OP.defaults, "widen": WITHIN, "activation": activation}
    call = jax.jit(functools.partial(KERNEL.forward, **params, config=TILES[1]))
    exported = jax.export.export(call, platforms=["cuda"])(**given)
    assert exported.mlir_module().count("mosaic_gpu_v2") == 1
    assert [x.shape for x in exported.out_avals] == [(16, 256)]


def unit(x: Any, a: Any, s: Any, b: Any, t: Any) -> Any:
    return jax.nn.silu(x @ (a.astype(x.dtype) * s)) * (x @ (b.astype(x.dtype) * t))


@pytest.mark.once
@pytest.mark.parametrize(("m", "chosen"), [(16, True), (64, True), (256, False)])
@pytest.mark.parametrize("stored", ["int8", "int4"])
def test_the_choice(stored: str, m: int, chosen: bool) -> None:
    struct = jax.ShapeDtypeStruct
    w, s = struct((4096, 14336), stored), struct((14336,), "bfloat16")
    args = struct((m, 4096), "bfloat16"), w, s, w, s
    sites = rewriter.explain(unit, target="h200")(*args).sites
    forms = [(x.form, x.kernel) for x in sites if x.kernel != "xla"]
    assert ((OP.name, "hopper_few_rows") in forms) == chosen
    assert not chosen or len(forms) == 1


# ------------------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(
    ("halves", "widen", "groups", "tiles", "m"), USES, ids=str
)  # fmt: skip
def test_numbers(
    halves: Any, widen: str, groups: int, tiles: Any, m: int, stored: str
) -> None:
    given = make(m, 1024, 384, halves, stored, groups, bias=m == 16)
    params = {"widen": widen, "halves": halves}
    config = config_of(tiles, given, params)
    every = {**OP.defaults, **params, "out_dtype": "float32"}
    got = jax.jit(functools.partial(KERNEL.forward, **every, config=config))(**given)
    close(got, wanted(given, **params), 1e-4)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_activations(activation: str) -> None:
    """Also far from 0, where exponentials overflow."""
    given = make(16, 1024, 384, None)
    given["w_gate_scale"] = (given["w_gate_scale"] * 40).astype("bfloat16")
    params = {"widen": WITHIN, "activation": activation, "beta": 1.5}
    every = {**OP.defaults, **params, "out_dtype": "float32"}
    config = config_of(None, given, params)
    got = jax.jit(functools.partial(KERNEL.forward, **every, config=config))(**given)
    assert np.isfinite(np.asarray(got)).all()
    close(got, wanted(given, **params), 1e-4)
    assert jnp.asarray(got).dtype == "float32"
