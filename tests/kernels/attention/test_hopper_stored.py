"""Attention of few queries to keys and values of 8 bits on Hopper GPUs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rewriter.kernels.attention import STORED, hopper_stored
from rewriter.kernels.attention.hopper_stored import KERNEL
from rewriter.kernels.attention.hopper_stored.config import Tiles
from rewriter.ops import device
from rewriter.ops.kernel import spec_of, worth_measuring
from rewriter.ops.stored import numbers_of
from tests import slow
from tests.kernels.ragged.test_hopper_dot import on_hopper
from tests.support.kernels import simulator

HERE = device.named("h100")
BEHIND = "float32 *scale"
NARROW = "bfloat16 *scale"
ONCE = "float32 *scale bfloat16"


def make(
    b: int = 2, t: int = 1, n: int = 8, heads: int = 2, h: int = 128, s: int = 512,
    stored: str = "int8", scale: str = "float32", of: str = "tokens and heads",
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    r = np.random.default_rng(0)
    shape = {"tokens and heads": (b, s, heads, 1), "heads": (1, 1, heads, 1),
             "tokens": (b, s, 1, 1)}[of]  # fmt: skip
    given: dict[str, Any] = {"q": r.standard_normal((b, t, n, h)).astype("bfloat16")}
    for name in "kv":
        x = jnp.asarray(r.standard_normal((b, s, heads, h)))
        given[name] = np.asarray(numbers_of(x, jnp.dtype(stored)))
    for name in ("k_scale", "v_scale"):
        size = 0.025 if "int" in stored else 1.0
        given[name] = (r.uniform(0.5, 1.5, shape) * size).astype(scale)
    return {**given, **more}


def spec(widen: str = BEHIND, params: Any = None, **given: Any) -> Any:
    params = {"widen_k": widen, "widen_v": widen, **(params or {})}
    return spec_of(STORED, make(**given), params)


@pytest.mark.once
def test_supports() -> None:
    for widen in (BEHIND, NARROW, ONCE):
        for stored in hopper_stored.TAKEN:
            assert hopper_stored.supports(spec(widen, stored=stored)).ok
    assert hopper_stored.supports(spec(h=64, t=4)).ok
    for given, why in (
        (spec(t=32, n=8), "128 queries"),
        (spec(h=96), "96 wide"),
        (spec(s=100), "100 keys"),
        (spec("float32 /scale"), "does not compute the steps"),
        (spec(stored="int16"), "k is int16"),
        (spec(params={"softcap": 30.0}), "softcap"),
        (spec(params={"weights": "default"}), "weights"),
        (spec(params={"empty_rows": "mean_passing"}), "gradients pass"),
    ):
        verdict = hopper_stored.supports(given)
        assert why in "; ".join(r.text for r in verdict.reasons)


def of_sequences(b: int, stored: str = "int8") -> Any:
    """One token of each of some sequences of 4096 tokens."""
    shapes = {"q": (b, 1, 32, 128), "k": (b, 4096, 8, 128), "v": (b, 4096, 8, 128)}
    kinds = {"q": "bfloat16", "k": stored, "v": stored}
    given = {n: jax.ShapeDtypeStruct(x, kinds[n]) for n, x in shapes.items()}
    return spec_of(STORED, given, {"widen_k": "bfloat16", "widen_v": "bfloat16"})


@pytest.mark.once
@pytest.mark.parametrize(
    ("b", "stored", "stages", "turns"),
    [
        (16, "int8", 4, 2), (64, "int8", 2, 1), (64, "float8_e4m3fn", 2, 1),
        (64, "int4", 4, 2),
    ],
)  # fmt: skip
def test_one_warpgroup_computes_if_blocks_are_many(
    b: int, stored: str, stages: int, turns: int
) -> None:
    use = of_sequences(b, stored)
    config = hopper_stored.default(use, HERE)
    assert config == Tiles(stages, turns, 1, 1, 128)
    assert hopper_stored.fits(config, use, HERE).ok


@pytest.mark.once
@pytest.mark.parametrize("b", [1, 16, 64])
def test_configs(b: int) -> None:
    use = of_sequences(b)
    found, _ = worth_measuring(KERNEL.space, use, HERE, 24)
    assert hopper_stored.default(use, HERE) in found
    assert not hopper_stored.fits(Tiles(stages=3), use, HERE).ok


@pytest.mark.parametrize(
    ("widen", "t", "stored"),
    slow.first(1, [(NARROW, 2, "int4"), (BEHIND, 1, "int8")], several=True),
)
def test_lowers_on_a_cpu(widen: str, t: int, stored: str) -> None:
    scale = "bfloat16" if widen == NARROW else "float32"
    given = make(t=t, scale=scale, stored=stored)
    config = Tiles(4, 2, 2, 1, 128, t == 1)
    how = {"widen_k": widen, "widen_v": widen, "config": config}
    call = jax.jit(lambda x: KERNEL.forward(**x, **how))
    exported = jax.export.export(call, platforms=["cuda"])(given)
    text = exported.mlir_module()
    assert text.count("mosaic_gpu_v2") == 1
    assert t > 1 or "stablehlo.minimum" not in text  # lengths are the kernel's
    assert [x.shape for x in exported.out_avals] == [(2, t, 8, 128)]


@pytest.mark.once
@pytest.mark.parametrize("scale", ["float32", "bfloat16", "float16"])
def test_lines_of_scales_lower_on_a_cpu(scale: str) -> None:
    given = make(n=16, heads=8, scale=scale)
    how = {"widen_k": BEHIND, "widen_v": BEHIND}
    text = {}
    for lines in (True, False):
        config = Tiles(4, 2, 1, 1, 128, lines=lines)
        call = jax.jit(functools.partial(KERNEL.forward, **how, config=config))
        text[lines] = jax.export.export(call, platforms=["cuda"])(**given).mlir_module()
    kind = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[scale]
    line = f"tensor<2x16x256x{kind}>"
    assert line in text[True]
    assert line not in text[False]


# ------------------------------------------------------------------------- on a GPU
CONFIGS = [
    None, Tiles(2, 2), Tiles(6, 2, 3), Tiles(4, 2, 2, 3), Tiles(4, 2, 1, 2, keys=128),
    Tiles(4, 2, 1, 2, 128, True), Tiles(4, 2, 1, 2, 128, lines=True),
    Tiles(4, 2, 2, 1, lines=True),
]  # fmt: skip
LENGTHS = np.array([300, 77], "int32")
USES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all keys": ({}, {}),
    "one block": ({"s": 40}, {}),
    "lengths": ({"kv_lengths": LENGTHS}, {}),
    "a length of 0": (
        {"kv_lengths": np.array([0, 512], "int32")}, {"empty_rows": "mean"}
    ),
    "zero without keys": (
        {"kv_lengths": np.array([0, 9], "int32")}, {"empty_rows": "zero"}
    ),
    "causal": (
        {"t": 3, "offset": np.array([200, 7], "int32")}, {"window": (None, 0)}
    ),
    "a window": (
        {"t": 2, "offset": np.array([400, 100], "int32")}, {"window": (90, 0)}
    ),
    "many queries": ({"t": 4, "n": 32, "h": 64}, {}),
    "heads of 64": ({"h": 64, "n": 4}, {}),
    "scales of heads": ({"of": "heads"}, {}),
    "scales of tokens": ({"of": "tokens"}, {}),
    "fp8": ({"stored": "float8_e4m3fn"}, {}),
    "uint8": ({"stored": "uint8"}, {}),
    "int4": ({"stored": "int4"}, {}),
    "uint4": ({"stored": "uint4"}, {}),
    "int4 and heads of 64": ({"stored": "int4", "h": 64}, {}),
    "a wider result": ({}, {"out_dtype": "float32"}),
    "a scale of scores": ({}, {"scale": 0.088}),
    "scales of eight heads": ({"n": 16, "heads": 8}, {}),
    "scales of 16 bits": (
        {"n": 16, "heads": 8, "kv_lengths": np.array([200, 3], "uint8")}, {}
    ),
}  # fmt: skip


def wanted(given: dict[str, Any], params: dict[str, Any]) -> np.ndarray:
    """The result in float32, of the stored numbers."""
    wide = {n: jnp.asarray(x) for n, x in given.items()}
    wide["q"] = wide["q"].astype("float32")
    with jax.default_matmul_precision("highest"):
        return np.asarray(STORED.reference(**wide, **params), np.float64)


SIMULATED = [
    ("lengths", BEHIND, Tiles(4, 2, keys=128)), ("uint4", NARROW, Tiles(4, 2, 2, 3)),
    *[(name, widen, Tiles(4, 2, 1, 2, keys=128)) for name in USES
      for widen in (BEHIND, ONCE)],
    ("scales of eight heads", BEHIND, Tiles(2, 2)),
    *[(name, BEHIND, Tiles(4, 2, 2, 1, 64 * keys, lines=True)) for keys in (1, 2)
      for name in ("scales of eight heads", "scales of 16 bits", "lengths")],
    *[(name, BEHIND, Tiles(4, 2, 1, 2, 128, True)) for name in
      ("lengths", "int4", "heads of 64", "scales of eight heads", "causal")],
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "widen", "config"), slow.first(2, SIMULATED, several=True), ids=str
)
def test_simulated(name: str, widen: str, config: Tiles) -> None:
    """The kernel's turns: a Python thread per warpgroup, one block after the other."""
    sizes, params = USES[name]
    short = widen == NARROW or name == "scales of 16 bits"
    given = make(**sizes, scale="bfloat16" if short else "float32")
    params = {"scale": 0.1, **params, "widen_k": widen, "widen_v": widen}
    with simulator.simulated_stored_attention():
        got = KERNEL.forward(**given, **params, config=config)
    want = wanted(given, params)
    limit = 2**-7 * np.abs(want).max()
    np.testing.assert_allclose(np.asarray(got, "f8"), want, rtol=0, atol=limit)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("widen", [BEHIND, NARROW, ONCE])
@pytest.mark.parametrize("name", USES)
def test_numbers(name: str, widen: str, config: Tiles | None) -> None:
    sizes, params = USES[name]
    short = widen == NARROW or name == "scales of 16 bits"
    given = make(**sizes, scale="bfloat16" if short else "float32")
    params = {"scale": 0.1, **params, "widen_k": widen, "widen_v": widen}
    use = spec_of(STORED, given, params)
    assert hopper_stored.supports(use).ok, hopper_stored.supports(use)
    config = config or hopper_stored.default(use, HERE)
    got = jax.jit(functools.partial(KERNEL.forward, **params, config=config))(**given)
    want = wanted(given, params)
    assert got.shape == want.shape
    assert got.dtype == (params.get("out_dtype") or "bfloat16")
    got = np.asarray(got, np.float64)
    assert np.abs(got - want).max() <= 2**-7 * np.abs(want).max()


@pytest.mark.gpu
@on_hopper
def test_results_are_the_same_each_time() -> None:
    given = make(s=4096)
    how = {"widen_k": BEHIND, "widen_v": BEHIND, "config": Tiles(8, 4, 6)}
    call = jax.jit(functools.partial(KERNEL.forward, **how))
    first = np.asarray(call(**given))
    for _ in range(20):
        np.testing.assert_array_equal(first, np.asarray(call(**given)))
