"""Attention of up to 64 queries and keys on Hopper, on the simulator and as chosen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import rewriter
from rewriter.kernels.attention import hopper
from rewriter.kernels.attention.hopper import short
from rewriter.kernels.attention.hopper.backward_config import BackwardTiles
from rewriter.kernels.attention.hopper.config import Tiles
from rewriter.kernels.attention.reference import reference
from rewriter.ops.kernel import Heads, Spec, spec_of
from rewriter.ops.registry import registry
from tests.kernels.attention.test_hopper import CAUSAL, H200, error, needs_hopper
from tests.support.kernels import simulator
from tests.support.kernels.float64 import float64

LIMIT = 4e-3

CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], tuple[int, int, int]]] = {
    "windows of Swin": ((5, 49, 49, 3, 32, 32), {"bias": 3}, (3, 2, 2)),
    "no bias, whole tiles": ((3, 64, 64, 2, 64, 64), {}, (2, 3, 1)),
    "a bias for all heads": ((7, 64, 64, 2, 64, 64), {"bias": 1}, (2, 2, 2)),
    "a bias of float32": ((3, 49, 49, 2, 16, 16), {"bias": 2, "wide": True}, (4, 2, 1)),
    "causal, with a shift": (
        (3, 33, 50, 2, 48, 16), {"window": CAUSAL, "shift": 17}, (4, 2, 2),
    ),
    "up to three keys ahead": (
        (2, 49, 49, 3, 40, 40), {"window": (None, 3), "bias": 3}, (3, 2, 2),
    ),
    "more warpgroups than heads": ((2, 20, 7, 3, 32, 64), {}, (4, 2, 5)),
    "one query": ((3, 1, 7, 2, 16, 64), {}, (3, 2, 2)),
    "float16": ((3, 30, 60, 2, 32, 32), {"bias": 2, "dtype": "float16"}, (3, 2, 2)),
    "one warpgroup": ((9, 49, 49, 6, 32, 32), {"bias": 6}, (1, 3, 7)),
}  # fmt: skip


def drawn(
    shape: tuple[int, ...], given: dict[str, Any]
) -> tuple[dict[str, Any], np.ndarray]:
    """Operands and parameters, and a cotangent."""
    b, t, s, n, h, e = shape
    given, draws = dict(given), np.random.default_rng(0)
    dtype = np.dtype(given.pop("dtype", ml_dtypes.bfloat16))
    normal = lambda *x: draws.standard_normal(x).astype(dtype)
    made = {"q": normal(b, t, n, h), "k": normal(b, s, n, h), "v": normal(b, s, n, e)}
    if heads := given.pop("bias", 0):
        bias = normal(1, heads, t, s)
        made["bias"] = bias.astype(np.float32) if given.pop("wide", False) else bias
    return {**made, "scale": h**-0.5, **given}, normal(b, t, n, e)


def simulated(
    given: dict[str, Any], up: np.ndarray, config: tuple[int, int, int] = (3, 2, 2),
    **more: Any,
) -> dict[str, np.ndarray]:  # fmt: skip
    """The result, log-sum-exps and gradients by name."""
    named = dict(zip(("warpgroups", "stages", "programs"), config, strict=True))
    swapped = {"swapped": more.pop("swapped")} if "swapped" in more else {}
    with simulator.simulated():
        out, (lse,) = hopper.forward(
            **given, **swapped, residuals=True, config=Tiles(short=True, **named),
            **{n: x for n, x in more.items() if n == "packed"},
        )  # fmt: skip
        grads = hopper.backward(
            **given, **more, out=out, residuals=(lse,), cotangent=up,
            config=BackwardTiles(short=True, **named),
        )  # fmt: skip
    return {"out": out, "lse": lse, **grads}


def exact(given: dict[str, Any], up: np.ndarray) -> dict[str, np.ndarray]:
    """The result and gradients in float64, by name."""
    names = [n for n in ("q", "k", "v", "bias") if n in given]
    params = {n: x for n, x in given.items() if n not in names}
    with float64():
        wide = [np.asarray(given[n], np.float64) for n in names]
        run = lambda *x: reference(**dict(zip(names, x, strict=True)), **params)
        out, back = jax.vjp(run, *wide)
        made = (out, *back(np.asarray(up, np.float64)))
        return dict(zip(("out", *names), map(np.asarray, made), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_its_code_run_by_threads(name: str) -> None:
    shape, more, config = CASES[name]
    given, up = drawn(shape, more)
    got, want = simulated(given, up, config), exact(given, up)
    for name, x in want.items():
        assert got[name].shape == x.shape
        assert error(got[name], x) <= LIMIT


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("name", CASES)
def test_numbers_on_a_gpu(name: str) -> None:
    """Against float64, with as many entries as blocks take in several turns."""
    (_, *shape), more, (warpgroups, stages, _) = CASES[name]
    given, up = drawn((300, *shape), more)
    arrays = {n: x for n, x in given.items() if isinstance(x, np.ndarray)}
    params = {n: x for n, x in given.items() if n not in arrays}
    use = spec_of(registry().op("attention"), arrays, params)

    def fitting(config: Any, backward: bool) -> Any:
        """The config with as many warpgroups and stages as there is memory for."""
        tried = (
            config(short=True, warpgroups=w, stages=n, programs=7)
            for w in range(warpgroups, 0, -1) for n in range(stages, 1, -1)
        )  # fmt: skip
        return next(x for x in tried if short.fits(use, x, backward).ok)

    tiles = fitting(Tiles, False), fitting(BackwardTiles, True)

    @jax.jit
    def both(arrays: dict[str, Any], up: Any) -> Any:
        given = {**arrays, **params}
        out, kept = hopper.forward(**given, residuals=True, config=tiles[0])
        grads = hopper.backward(
            **given, out=out, residuals=kept, cotangent=up, config=tiles[1]
        )
        return {"out": out, **grads}

    got, again = both(arrays, up), both(arrays, up)
    for name, x in exact(given, up).items():
        assert error(got[name], x) <= LIMIT
        np.testing.assert_array_equal(got[name], again[name])


def test_heads_are_read_and_written_in_one_array() -> None:
    shape, more, config = CASES["windows of Swin"]
    given, up = drawn(shape, more)
    places = {n: Heads(i, 3, 3, 9) for i, n in enumerate("qkv")}
    whole = np.full((5, 49, 9, 32), np.nan, ml_dtypes.bfloat16)
    for n, at in places.items():
        whole[:, :, at.indices] = given[n]
    unread = {n: np.full_like(given[n], np.nan) for n in "qkv"}
    packed = {n: (whole, at) for n, at in places.items()}
    apart = simulated(given, up, config)
    got = simulated({**given, **unread}, up, config, packed=packed, joined=places)
    got |= {n: got["joined"][:, :, at.indices] for n, at in places.items()}
    for n in ("out", *"qkv", "bias"):
        np.testing.assert_array_equal(got[n], apart[n])


def test_heads_before_positions_are_read_in_place() -> None:
    given, up = drawn((3, 49, 33, 2, 32, 32), {})
    plain = simulated(given, up)
    got = simulated(given, up, swapped=("q", "v"))
    np.testing.assert_array_equal(got["out"], plain["out"])


def test_gradients_take_the_sums_of_more_keys() -> None:
    """As where keys are split over devices: each part is given the sums of all."""
    given, up = drawn((3, 40, 80, 2, 32, 32), {"bias": 2})
    want = exact(given, up)
    scores = np.einsum("btnh,bsnh->bnts", *(np.float64(given[n]) for n in "qk"))
    scores = scores * given["scale"] + np.float64(given["bias"])
    lse = np.log(np.exp(scores).sum(-1)).astype(np.float32)
    halves = []
    for part in (slice(0, 40), slice(40, 80)):
        of_part = {"k": given["k"][:, part], "v": given["v"][:, part]}
        of_part["bias"] = given["bias"][..., part]
        out = want["out"].astype(ml_dtypes.bfloat16)
        with simulator.simulated():
            halves.append(
                hopper.backward(
                    **{**given, **of_part}, out=out, residuals=(lse,), cotangent=up,
                    config=BackwardTiles(short=True, warpgroups=3, programs=2),
                )
            )  # fmt: skip
    one, other = halves
    got = {"q": np.float32(one["q"]) + np.float32(other["q"])}
    for name, axis in (("k", 1), ("v", 1), ("bias", 3)):
        got[name] = np.concatenate([one[name], other[name]], axis)
    for name in ("q", "k", "v", "bias"):
        assert error(got[name], want[name]) <= LIMIT


@pytest.mark.parametrize("value", [-1e9, -np.inf])
@pytest.mark.parametrize("empty_rows", ["nan", "nan_passing"])
def test_biases_of_whole_rows(value: float, empty_rows: str) -> None:
    """-1e9 absorbs the digits of sums. After -inf, a row and what it reaches is NaN."""
    given, up = drawn((3, 49, 49, 2, 32, 32), {"bias": 2})
    given["bias"] = given["bias"].astype(np.float32)
    given["bias"][0, 1, 5] = value
    got = simulated(given | {"empty_rows": empty_rows}, up)
    given["bias"][0, 1, 5] = 1e11 * value  # float64 has more digits
    want = exact(given, up)
    if value == -1e9:
        for name, x in want.items():
            assert error(got[name], x) <= LIMIT
        return
    assert (np.isnan(got["out"]) == np.isnan(want["out"])).all()
    assert (got["lse"][:, 1, 5] == -np.inf).all()
    same = {"v", *(("q", "k", "bias") if empty_rows == "nan_passing" else ())}
    for name in ("q", "k", "v", "bias"):
        hidden = np.isnan(want[name])
        assert hidden.any()
        assert (np.isnan(got[name]) == (hidden & (name in same))).all()


# ---------------------------------------------------------------- what is short
def spec(b: int = 64, t: int = 49, s: int = 49, n: int = 6, k: int = 6, h: int = 32,
         dtype: str = "bfloat16", more: Any = (), **params: Any) -> Spec:  # fmt: skip
    """A use."""
    shapes = {"q": (b, t, n, h), "k": (b, s, k, h), "v": (b, s, k, h)}
    dtypes = dict.fromkeys(shapes, dtype)
    for name, shape, kind in more:
        shapes[name], dtypes[name] = shape, kind
    own = {"scale": 0.1, **params}
    return Spec("attention", *(tuple(x.items()) for x in (shapes, dtypes, own)))


SHORT = {
    "windows": spec(more=[("bias", (1, 6, 49, 49), "bfloat16")]),
    "one bias": spec(more=[("bias", (1, 1, 49, 49), "float32")]),
    "causal": spec(window=(None, 0)),
    "ahead": spec(window=(None, -2), shift=2),
    "wide": spec(t=64, s=64, h=64),
}
LONGER = {
    "keys": spec(s=65),
    "queries": spec(t=65),
    "fewer heads of keys": spec(k=3),
    "wide": spec(h=80),
    "float32": spec(dtype="float32"),
    "a window with a first key": spec(window=(5, 0)),
    "rows without keys": spec(window=(None, -1)),
    "zero for rows without keys": spec(empty_rows="zero"),
    "lengths": spec(more=[("kv_lengths", (64,), "int32")]),
    "a mask": spec(more=[("mask", (1, 1, 49, 49), "bool")]),
    "a bias of entries": spec(more=[("bias", (64, 6, 49, 49), "bfloat16")]),
    "a bias of keys": spec(more=[("bias", (1, 6, 1, 49), "bfloat16")]),
    "a soft cap": spec(softcap=30.0),
    "a result of float32": spec(out_dtype="float32"),
    "an offset": spec(more=[("offset", (64,), "int32")]),
}


@pytest.mark.parametrize("name", [*SHORT, *LONGER])
def test_which_uses_are_short(name: str) -> None:
    use = SHORT.get(name) or LONGER[name]
    wanted = name in SHORT
    assert short.takes(use).ok == wanted
    if hopper.supports(use).ok:
        assert hopper.default(use, H200).short == wanted
        assert hopper.backward_default(use, H200).short == wanted
    assert not (wanted and not hopper.supports(use).ok)


@pytest.mark.parametrize("name", SHORT)
def test_every_config_is_lowered(name: str) -> None:
    """One kernel for each pass; nothing as large as q is padded or copied."""
    use = SHORT[name]
    given = {n: jax.ShapeDtypeStruct(x, use.dtype(n)) for n, x in use.shapes}
    params, (b, t, n, _) = dict(use.params), use.shape("q")
    lse = jax.ShapeDtypeStruct((b, n, t), jnp.float32)

    def both(config: Any, given: Any, lse: Any) -> Any:
        tiles, back = config
        out, _ = hopper.forward(**given, **params, residuals=True, config=tiles)
        return hopper.backward(
            **given, **params, out=out, residuals=(lse,), cotangent=out, config=back
        )

    pairs = [
        (hopper.default(use, H200), x)
        for x in hopper.backward_configs(use, H200) if x.short
    ]  # fmt: skip
    assert pairs
    for pair in pairs[-1:]:
        run = jax.jit(lambda *x, pair=pair: both(pair, *x))
        text = jax.export.export(run, platforms=["cuda"])(given, lse).mlir_module()
        assert text.count("mosaic_gpu_v2") == 2
        assert "stablehlo.transpose" not in text


def test_programs_with_windows_take_it() -> None:
    def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
        x = jnp.einsum("btnh,bsnh->bnts", q, k) * 32**-0.5 + bias
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(x, -1), v)

    x = jax.ShapeDtypeStruct((4096, 49, 6, 32), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((6, 49, 49), jnp.bfloat16)
    loss = lambda *args: attend(*args).astype(jnp.float32).sum()
    step = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))
    (site,) = rewriter.explain(step, target="h200")(x, x, x, bias).sites
    assert (site.kernel, site.backward) == ("hopper", True)
    assert site.config.count("short=True") == 2
