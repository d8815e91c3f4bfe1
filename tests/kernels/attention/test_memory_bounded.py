"""Attention kernels against a float64 calculation in numpy, gradients included."""

# ruff: noqa: E501  (one case per line reads best)
from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from rewriter.kernels.attention import KERNELS, OP, xla
from rewriter.kernels.attention.positions import as_mask, with_positions
from rewriter.kernels.attention.reference import sample, visible
from rewriter.kernels.attention.xla import Blocks, problem
from rewriter.ops.kernel import spec_of
from tests import slow

pytestmark = pytest.mark.once

KERNEL = next(k for k in KERNELS if k.name == "memory_bounded")

NONE = (None, None)
CAUSAL = (None, 0)
# Relative to the largest entry: reductions of at most 100 terms in float32, and
# for 16 bits the rounding of inputs to the result's dtype.
TOLERANCE = {"float64": 1e-11, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "DEFAULT", Blocks(rows=16, keys=16, tile=2048))


def between(x: dict[str, Any], t: int) -> Any:
    """Returns which keys are at positions that queries see, of any rank up to 4."""
    if "kv_positions" not in x:
        return np.ones((1, 1, 1, 1), bool)
    first = x.get("first_position", np.full((1, t), -np.inf))
    last = x.get("last_position", np.full((1, t), np.inf))
    at = x["kv_positions"][:, None]
    return ((first[:, :, None] <= at) & (at <= last[:, :, None]))[:, None]


def exact(arrays: dict[str, Any], up: Any, params: dict[str, Any]) -> Any:
    """Returns attention and its cotangents in float64, by the formula's own rules."""
    x = {n: np.asarray(a, np.float64) for n, a in arrays.items()}
    up = np.asarray(up, np.float64)
    (b, t, n, _), (_, s, heads, _) = x["q"].shape, x["k"].shape
    group = n // heads
    k, v = (np.repeat(x[i], group, axis=2) for i in "kv")
    scale = params.get("scale", 1.0) * x.get("scale_factor", 1.0)
    raw = np.einsum("btnh,bsnh->bnts", x["q"], k)
    scores, cap = raw * scale, params.get("softcap")
    bent = np.tanh(scores / cap) if cap else 0
    scores = cap * bent if cap else scores
    offset = x.get("offset", np.zeros(1)) + params.get("shift", 0)
    at = np.arange(t)[None, :, None] + offset[:, None, None]
    keys = np.arange(s)[None, None, :]
    if "bias" in x:
        scores = scores + x["bias"]
    relative = np.broadcast_to((keys - at)[:, None], (b, 1, t, s))
    if "alibi" in x:
        scores = scores + x["alibi"][:, None, None] * relative
    keep = np.ones((b, n, t, s), bool)
    if "mask" in arrays:
        keep &= np.asarray(arrays["mask"])
    if "q_segments" in x:
        keep &= (x["q_segments"][:, :, None] == x["kv_segments"][:, None])[:, None]
    keep &= between(x, t)
    if "kv_lengths" in x:
        keep &= (keys < x["kv_lengths"][:, None, None])[:, None]
    left, right = params.get("window", NONE)
    window = np.ones((1, t, s), bool)
    window = window & (keys >= at - left) if left is not None else window
    window = window & (keys <= at + right) if right is not None else window
    if "prefix" in x:
        window = window | (keys < x["prefix"][:, None, None])
    keep &= window[:, None]
    scores = np.where(keep, scores, -np.inf)
    top = np.max(scores, -1, keepdims=True)
    sink = x["sinks"][:, None, None] if "sinks" in x else -np.inf
    top = np.maximum(top, sink)
    top = np.where(np.isfinite(top), top, 0)
    p = np.exp(scores - top)
    total = p.sum(-1, keepdims=True) + np.exp(sink - top)
    empty = total == 0
    behaviour = params.get("empty_rows", "nan")
    given = {"nan": np.nan, "nan_passing": np.nan, "zero": 0.0, "zero_nan_passing": 0.0}
    rows = given.get(behaviour, 1 / s)
    p = np.where(empty, rows, p / np.where(empty, 1, total))
    drop = np.broadcast_to(x.get("dropout", 1.0), p.shape)
    out = np.einsum("bnts,bsne->btne", p * drop, v)
    dp = np.einsum("btne,bsne->bnts", up, v)
    share = np.where(empty & (not behaviour.endswith("passing")), 0, p)
    share = np.where(empty & behaviour.endswith("nan_passing"), np.nan, share)
    delta = (share * drop * dp).sum(-1, keepdims=True)
    ds = share * (drop * dp - delta)
    draw = ds * (1 - bent**2)
    grads = {
        "q": np.einsum("bnts,bsnh->btnh", draw, k) * scale,
        "k": np.einsum("bnts,btnh->bsnh", draw, x["q"]) * scale,
        "v": np.einsum("bnts,btne->bsne", p * drop, up),
        "bias": ds,
        "dropout": np.where(empty & (rows == 0), 0, p) * dp,
        "alibi": (ds * relative).sum((0, 2, 3)),
        "sinks": -(np.exp(sink - top) / np.where(empty, 1, total) * delta).sum(
            (0, 2, 3)
        ),
        "scale_factor": (draw * raw).sum() * params.get("scale", 1.0),
    }
    for name in "kv":
        split = grads[name].reshape(b, s, heads, group, -1)
        grads[name] = split.sum(3)
    for name in ("bias", "dropout"):
        if name in x:
            over = tuple(i for i in range(4) if x[name].shape[i] == 1)
            grads[name] = grads[name].sum(over, keepdims=True)
    return out, {i: g for i, g in grads.items() if i in x}


Shape = tuple[int, int, int, int, int, int, int]


def make(
    shape: Shape, extra: dict[str, Any], dtype: str = "float32", seed: int = 0
) -> dict[str, Any]:
    """Returns operands as numpy arrays; `extra` holds shapes or values by name."""
    b, t, s, n, k, h, e = shape
    r = np.random.default_rng(seed)
    shapes = {"q": (b, t, n, h), "k": (b, s, k, h), "v": (b, s, k, e)}
    result = {i: r.standard_normal(x).astype(dtype) for i, x in shapes.items()}
    for name, given in extra.items():
        if not isinstance(given, tuple):
            result[name] = np.asarray(given)
            if np.issubdtype(result[name].dtype, np.floating):
                result[name] = result[name].astype(dtype)
        elif name == "mask":
            result[name] = r.random(given) < 0.6
        elif name == "dropout":
            result[name] = (r.random(given) < 0.7).astype(dtype) / dtype_of(dtype)(0.7)
        elif name.endswith("_position") or name == "kv_positions":
            result[name] = r.integers(0, s, given).astype("int32")
            result[name] -= 20 * (name == "first_position")
        elif name in ("q_segments", "kv_segments"):
            result[name] = np.sort(r.integers(0, 3, given), -1).astype("int32")
        else:
            result[name] = r.standard_normal(given).astype(dtype)
    return result


def dtype_of(name: str) -> Any:
    return jnp.dtype(name).type


def lengths(*x: int) -> np.ndarray:
    return np.array(x, "int32")


# name: (b, t, s, n, k, h, e), other operands, params
CASES: dict[str, tuple[Shape, dict[str, Any], dict[str, Any]]] = {
    "plain": ((2, 32, 32, 4, 4, 8, 8), {}, {}),
    "odd": ((2, 37, 41, 3, 3, 5, 7), {}, {}),
    "one block": ((1, 7, 9, 1, 1, 4, 4), {}, {}),
    "causal": ((1, 64, 64, 4, 4, 8, 8), {}, {"window": CAUSAL}),
    "strictly causal": ((1, 37, 37, 2, 2, 8, 8), {}, {"window": (None, -1), "empty_rows": "zero"}),
    "causal wide v": ((1, 40, 40, 2, 2, 8, 20), {}, {"window": CAUSAL}),
    "causal top left": ((1, 20, 50, 2, 2, 8, 8), {}, {"window": CAUSAL}),
    "causal bottom right": ((1, 20, 50, 2, 2, 8, 8), {}, {"window": CAUSAL, "shift": 30}),
    "causal more rows": ((1, 50, 20, 2, 2, 8, 8), {}, {"window": CAUSAL, "shift": -30, "empty_rows": "zero"}),
    "causal more rows mean": ((1, 50, 20, 2, 2, 8, 8), {}, {"window": CAUSAL, "shift": -30, "empty_rows": "mean"}),
    "far": ((1, 20, 20, 2, 2, 8, 8), {}, {"window": (2**31 - 1, 2**31 - 1)}),
    "gqa": ((2, 33, 35, 8, 2, 8, 8), {}, {"window": CAUSAL}),
    "mqa": ((2, 33, 35, 6, 1, 8, 8), {}, {}),
    "gqa 40": ((1, 40, 40, 40, 1, 4, 4), {}, {"window": CAUSAL}),
    "window": ((1, 70, 70, 2, 2, 8, 8), {}, {"window": (10, 0)}),
    "window both": ((1, 70, 70, 2, 2, 8, 8), {}, {"window": (13, 5)}),
    "window left": ((1, 40, 70, 2, 2, 8, 8), {}, {"window": (5, None)}),
    "window shift": ((1, 40, 70, 2, 2, 8, 8), {}, {"window": (17, 3), "shift": 30}),
    "window nothing": ((1, 40, 40, 2, 2, 8, 8), {}, {"window": (3, 0), "shift": 60, "empty_rows": "mean"}),
    "offset": ((3, 20, 50, 2, 2, 8, 8), {"offset": lengths(0, 30, 11)}, {"window": CAUSAL}),
    "offset window": ((3, 20, 70, 2, 2, 8, 8), {"offset": lengths(0, 50, 11)}, {"window": (7, 0), "shift": 2}),
    "offset one": ((2, 20, 50, 2, 2, 8, 8), {"offset": lengths(30)}, {"window": CAUSAL}),
    "offset far": ((2, 8, 50, 2, 2, 8, 8), {"offset": lengths(90, -70)}, {"window": (20, 0), "empty_rows": "zero"}),
    "prefix": ((3, 50, 50, 2, 2, 8, 8), {"prefix": lengths(0, 11, 40)}, {"window": CAUSAL}),
    "prefix one": ((2, 50, 50, 2, 2, 8, 8), {"prefix": lengths(23)}, {"window": (4, 0)}),
    "lengths": ((3, 20, 50, 2, 2, 8, 8), {"kv_lengths": lengths(1, 50, 17)}, {}),
    "lengths 0": ((3, 20, 50, 2, 2, 8, 8), {"kv_lengths": lengths(0, 50, 17)}, {"empty_rows": "mean"}),
    "lengths 0 nan": ((3, 20, 50, 2, 2, 8, 8), {"kv_lengths": lengths(0, 50, 17)}, {}),
    "lengths prefix": ((3, 50, 50, 2, 2, 8, 8), {"kv_lengths": lengths(3, 50, 17), "prefix": lengths(20, 5, 3)}, {"window": CAUSAL}),
    "segments": ((2, 50, 50, 2, 2, 8, 8), {"q_segments": (2, 50), "kv_segments": (2, 50)}, {"window": CAUSAL, "empty_rows": "zero"}),
    "segments one": ((2, 40, 50, 2, 2, 8, 8), {"q_segments": (1, 40), "kv_segments": (1, 50)}, {"empty_rows": "zero"}),
    "positions": ((2, 40, 50, 2, 2, 8, 8), {"kv_positions": (2, 50), "first_position": (2, 40), "last_position": (2, 40)}, {"empty_rows": "mean"}),
    "positions in order": ((2, 40, 70, 2, 2, 8, 8), {"kv_positions": np.arange(70)[None], "first_position": np.arange(25, 65)[None], "last_position": np.arange(30, 70)[None]}, {}),
    "positions ends": ((1, 20, 50, 2, 2, 8, 8), {"kv_positions": np.array([-2**31, 2**31 - 1] * 25, "int32")[None], "last_position": np.where(np.arange(20) % 2, -2**31, 2**31 - 1).astype("int32")[None]}, {}),
    "mask": ((2, 40, 41, 4, 2, 8, 8), {"mask": (2, 4, 40, 41)}, {}),
    "mask heads": ((2, 40, 41, 4, 2, 8, 8), {"mask": (1, 4, 40, 41)}, {"window": (None, 4), "empty_rows": "mean"}),
    "mask rows mean": ((2, 40, 41, 4, 4, 8, 8), {"mask": (2, 1, 40, 1)}, {"empty_rows": "mean"}),
    "mask rows zero": ((2, 40, 41, 4, 4, 8, 8), {"mask": (2, 1, 40, 1)}, {"empty_rows": "zero"}),
    "bias": ((2, 40, 41, 4, 2, 8, 8), {"bias": (2, 4, 40, 41)}, {"window": CAUSAL}),
    "bias heads": ((2, 40, 41, 4, 2, 8, 8), {"bias": (1, 4, 40, 41)}, {}),
    "bias keys": ((2, 40, 41, 4, 4, 8, 8), {"bias": (2, 1, 1, 41)}, {}),
    "bias fill": ((2, 21, 41, 2, 2, 8, 8), {"bias": np.full((1, 1, 1, 41), -3e38, "f")}, {}),
    "bias fill sinks": ((2, 21, 41, 2, 2, 8, 8), {"bias": np.full((2, 1, 21, 1), -3e38, "f"), "sinks": np.full(2, -3e38, "f")}, {"window": CAUSAL}),
    "alibi": ((2, 40, 41, 4, 2, 8, 8), {"alibi": (4,)}, {"window": CAUSAL}),
    "alibi offset sinks": ((2, 20, 41, 4, 4, 8, 8), {"alibi": (4,), "sinks": (4,), "offset": lengths(3, 20)}, {"shift": 1}),
    "sinks": ((2, 40, 41, 6, 2, 8, 8), {"sinks": (6,)}, {"window": (9, 0)}),
    "sinks empty": ((2, 40, 41, 4, 4, 8, 8), {"sinks": (4,), "mask": (2, 1, 40, 1)}, {"empty_rows": "nan"}),
    "softcap": ((2, 40, 41, 4, 2, 8, 8), {}, {"softcap": 3.0, "scale": 2.0}),
    "softcap bias": ((2, 40, 41, 4, 4, 8, 8), {"bias": (1, 1, 40, 41)}, {"softcap": 1.5, "window": CAUSAL}),
    "scale": ((2, 40, 41, 4, 4, 8, 8), {"scale_factor": np.float32(1.7)}, {"scale": 0.3}),
    "scale softcap": ((2, 40, 41, 4, 4, 8, 8), {"scale_factor": np.float32(1.7)}, {"scale": 0.3, "softcap": 1.0}),
    "scale 0": ((1, 20, 21, 2, 2, 8, 8), {}, {"scale": 0.0}),
    "dropout": ((2, 40, 41, 4, 2, 8, 8), {"dropout": (2, 4, 40, 41)}, {"window": CAUSAL}),
    "dropout heads": ((2, 40, 41, 4, 4, 8, 8), {"dropout": (1, 1, 40, 41)}, {}),
    "dropout mean": ((2, 40, 41, 4, 2, 8, 8), {"dropout": (2, 4, 40, 41), "mask": (2, 1, 40, 1)}, {"empty_rows": "mean"}),
    "dropout mean keys": ((2, 37, 41, 2, 2, 8, 8), {"dropout": (2, 1, 1, 41), "mask": (2, 1, 37, 1)}, {"empty_rows": "mean"}),
    "dropout zero": ((2, 40, 41, 4, 4, 8, 8), {"dropout": (2, 4, 40, 1), "mask": (2, 1, 40, 1)}, {"empty_rows": "zero"}),
    "passing lengths": ((3, 20, 50, 4, 2, 8, 6), {"kv_lengths": lengths(0, 50, 17)}, {"empty_rows": "mean_passing", "scale": 0.4}),
    "passing rows": ((2, 37, 41, 4, 2, 8, 8), {"mask": (2, 1, 37, 1)}, {"empty_rows": "mean_passing", "window": CAUSAL}),
    "passing heads": ((2, 37, 41, 4, 2, 8, 8), {"mask": (1, 4, 37, 1), "scale_factor": np.float32(1.7)}, {"empty_rows": "mean_passing"}),
    "passing bias": ((2, 37, 41, 4, 2, 8, 8), {"mask": (2, 1, 37, 1), "bias": (2, 4, 37, 41)}, {"empty_rows": "mean_passing"}),
    "passing bias one": ((2, 37, 41, 4, 2, 8, 8), {"mask": (2, 1, 37, 1), "bias": (1, 1, 37, 41), "alibi": (4,)}, {"empty_rows": "mean_passing"}),
    "passing bias heads": ((2, 37, 41, 4, 2, 8, 8), {"mask": (2, 1, 37, 1), "bias": (1, 4, 37, 41)}, {"empty_rows": "mean_passing"}),
    "passing bias keys": ((2, 37, 41, 4, 2, 8, 8), {"mask": (2, 1, 37, 1), "bias": (2, 1, 1, 41)}, {"empty_rows": "mean_passing"}),
    "passing bias rows": ((2, 37, 41, 4, 2, 8, 8), {"mask": (2, 1, 37, 1), "bias": (1, 4, 37, 1)}, {"empty_rows": "mean_passing"}),
    "passing nan": ((3, 20, 50, 4, 2, 8, 6), {"kv_lengths": lengths(0, 50, 17)}, {"empty_rows": "nan_passing", "scale": 0.4}),
    "passing nan, zero": ((3, 20, 50, 4, 2, 8, 6), {"kv_lengths": lengths(0, 50, 17)}, {"empty_rows": "zero_nan_passing", "scale": 0.4}),
    "passing nan heads": ((2, 37, 41, 4, 2, 8, 8), {"mask": (2, 4, 37, 1), "bias": (1, 4, 37, 41), "alibi": (4,), "scale_factor": np.float32(1.7)}, {"empty_rows": "nan_passing", "softcap": 3.0}),
    "passing sinks": ((2, 40, 41, 4, 4, 8, 8), {"sinks": (4,), "mask": (2, 1, 40, 1)}, {"empty_rows": "mean_passing"}),
    "passing softcap": ((2, 37, 41, 4, 2, 8, 8), {"mask": (2, 1, 37, 1), "bias": (1, 4, 37, 41), "alibi": (4,)}, {"empty_rows": "mean_passing", "softcap": 2.0, "scale": 0.7}),
    "passing dropout": ((2, 37, 41, 4, 2, 8, 8), {"mask": (2, 1, 37, 1), "dropout": (2, 4, 37, 41), "scale_factor": np.float32(1.7)}, {"empty_rows": "mean_passing", "scale": 0.7}),
    "decode": ((3, 1, 300, 4, 2, 8, 8), {"kv_lengths": lengths(1, 300, 77)}, {}),
    "decode 4": ((2, 4, 130, 4, 1, 8, 8), {"offset": lengths(126, 50)}, {"window": CAUSAL}),
    "one key": ((2, 40, 1, 4, 4, 8, 8), {}, {}),
    "everything": ((2, 40, 41, 4, 2, 8, 6), {"bias": (2, 4, 40, 41), "mask": (2, 1, 40, 41), "q_segments": (2, 40), "kv_segments": (2, 41), "kv_lengths": lengths(38, 20), "offset": lengths(3, 0), "prefix": lengths(4, 0), "alibi": (4,), "sinks": (4,), "dropout": (2, 4, 40, 41), "scale_factor": np.float32(1.3)}, {"scale": 0.5, "window": (20, 2), "shift": 1, "softcap": 4.0}),
}  # fmt: skip


QUICK = {"xla_backend_optimization_level": 0}
"""Halves the time to compile; some cases are compiled as usual."""


def both(arrays: dict[str, Any], params: tuple[tuple[str, Any], ...], up: Any) -> Any:
    kernel = KERNEL
    out, residuals = kernel.forward(**arrays, **dict(params), residuals=True)
    assert kernel.backward is not None
    grads = kernel.backward(
        **arrays, **dict(params), out=out, residuals=residuals, cotangent=up
    )
    return out, grads


def plain(arrays: dict[str, Any], params: tuple[tuple[str, Any], ...], up: Any) -> Any:
    floats = {n: x for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    call = lambda given: OP.reference(**{**arrays, **given}, **dict(params))
    out, pull = jax.vjp(call, floats)
    return out, pull(up.astype(out.dtype))[0]


RUN = jax.jit(both, static_argnums=1, compiler_options=QUICK)
PLAIN = jax.jit(plain, static_argnums=1, compiler_options=QUICK)


def close(got: Any, want: Any, dtype: str, name: str) -> None:
    got = np.asarray(got, np.float64)
    assert got.shape == want.shape, name
    assert (np.isnan(got) == np.isnan(want)).all(), f"{name}: NaNs differ"
    there = ~np.isnan(want)
    size = np.max(np.abs(want), where=there, initial=1.0)
    error = np.max(np.abs(got - want), where=there, initial=0.0) / size
    assert error <= TOLERANCE[dtype], f"{name}: error {error:.1e} of {size:.1e}"


def check(
    function: Any, case: str, dtype: str, seed: int = 0, quick: bool = True
) -> None:
    options = QUICK if quick else None
    run = jax.jit(function, static_argnums=1, compiler_options=options)
    shape, extra, params = CASES[case]
    arrays = make(shape, extra, dtype, seed)
    up = make(shape, {"up": (*shape[:2], shape[3], shape[6])}, dtype, seed)["up"]
    xla_result = run(arrays, tuple(params.items()), up)
    want, grads = exact(arrays, up, params)
    out, got = jax.device_get(xla_result)
    assert out.dtype == dtype
    close(out, want, dtype, "out")
    assert got.keys() == grads.keys()
    for name, g in grads.items():
        if name == "alibi" and dtype == "bfloat16":
            continue  # sum of d * position: the rounding of out weighs too much
        assert got[name].dtype == arrays[name].dtype
        close(got[name], g, dtype, name)


PASSING = [case for case in CASES if case.startswith("passing")]


@pytest.mark.parametrize(
    "case", slow.first(30, [case for case in CASES if case not in PASSING])
)
def test_value_and_gradients(case: str) -> None:
    check(both, case, "float32")


@pytest.mark.parametrize(
    "case",
    slow.unless(lambda case: "heads" not in case and "rows" not in case, PASSING),
)
def test_rows_without_keys_pass_gradients(case: str) -> None:
    check(both, case, "float32")


MASKED = with_positions(xla.KERNEL)


def test_positions_as_a_mask() -> None:
    shape, extra, params = CASES["positions"]
    arrays = make(shape, {**extra, "mask": (1, 2, 1, 50)})
    assert MASKED.backward is not None
    want, grads = both(arrays, tuple(params.items()), arrays["q"])
    out, saved = MASKED.forward(**arrays, **params, residuals=True)
    given = {"out": out, "residuals": saved, "cotangent": arrays["q"]}
    got = MASKED.backward(**arrays, **params, **given)
    close(out, np.asarray(want), "float32", "out")
    for name, g in grads.items():
        close(got[name], np.asarray(g), "float32", name)
    spec = as_mask(spec_of(OP, arrays, params))
    assert spec.operands == ("q", "k", "v", "mask")
    assert spec.shape("mask") == (2, 2, 40, 50)


def test_rows_without_keys_are_as_where_a_number_is_added() -> None:
    """The fill takes all digits of scores in float32, in float64 it takes none."""
    shape, extra, params = CASES["passing lengths"]
    arrays = make(shape, extra)
    up = make(shape, {"up": (*shape[:2], shape[3], shape[6])})["up"]

    def written(q: Any, k: Any, v: Any) -> Any:
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * params["scale"]
        hidden = jnp.arange(50) >= arrays["kv_lengths"][:, None, None, None]
        scores = scores + jnp.where(hidden, np.finfo("f").min, 0)
        return jnp.einsum("bnts,bsne->btne", jax.nn.softmax(scores), v)

    want, pull = jax.vjp(written, *(arrays[n] for n in "qkv"))
    out, grads = RUN(arrays, tuple(params.items()), up)
    close(out, np.asarray(want, np.float64), "float32", "out")
    for name, g in zip("qkv", pull(up), strict=True):
        assert np.abs(g[0]).max() > 1e-3  # of the sequence without keys
        close(grads[name], np.asarray(g, np.float64), "float32", name)


HIDDEN = {
    "mask": ({"mask": (1, 1, 1, 48)}, {}),
    "mask of pairs": ({"mask": (1, 1, 40, 48), "bias": (1, 1, 40, 48)}, {}),
    "lengths": ({"kv_lengths": lengths(20)}, {"softcap": 3.0}),
    "window": ({"bias": (1, 1, 1, 48), "alibi": (2,)}, {"window": (None, -20)}),
    "segments": ({"q_segments": np.zeros((1, 40), int), "kv_segments": np.repeat([[0, 1]], 24, 1)}, {}),
    "prefix": ({"prefix": lengths(30)}, {"window": (None, -40)}),
    "sinks": ({"sinks": (2,), "kv_lengths": lengths(20)}, {}),
}  # fmt: skip


def hidden_keys(arrays: dict[str, Any], params: dict[str, Any]) -> np.ndarray:
    """Which keys no query sees, bool [b, s]."""
    names = ("mask", "q_segments", "kv_segments", "kv_lengths", "prefix")
    t, s = arrays["q"].shape[1], arrays["k"].shape[1]
    given = {n: arrays[n] for n in names if n in arrays}
    seen = visible(t, s, **given, window=params.get("window", NONE))
    return ~np.asarray(seen).any((1, 2))


@pytest.mark.parametrize("rows", ["nan", "mean_passing"])
@pytest.mark.parametrize("case", slow.first(4, HIDDEN))
def test_what_is_hidden_stays_hidden(case: str, rows: str) -> None:
    check_hidden(case, rows)


def check_hidden(case: str, rows: str) -> None:
    """Finite is what is finite by the formula, of which a choice hides scores."""
    extra, params = HIDDEN[case]
    params = {**params, "empty_rows": rows}
    arrays = make((1, 40, 48, 2, 1, 8, 8), extra)
    if case == "mask":
        arrays["mask"][..., 30:] = False
    if case == "mask of pairs":
        arrays["mask"][:, :, :, 30:] = arrays["mask"][:, :, :3] = False
    hidden = hidden_keys(arrays, params)
    assert hidden.any()
    up = make((1, 40, 48, 2, 1, 8, 8), {"up": (1, 40, 2, 8)})["up"]
    for name, bad in itertools.product(("k", "v", "up"), (np.nan, np.inf)):
        given, cotangent = {**arrays}, up.copy()
        if name == "up":
            cotangent[:, 3] = bad
        else:
            given[name] = np.where(hidden[..., None, None], bad, arrays[name])
        compare_finite(given, params, cotangent)


def compare_finite(arrays: dict[str, Any], params: dict[str, Any], up: Any) -> None:
    """Asserts that what is finite by the formula is, and is the same."""
    options = tuple(params.items())
    out, grads = RUN(arrays, options, up)
    want, want_grads = PLAIN(arrays, options, up)
    for name, g, w in [
        ("out", out, want), *((n, grads[n], want_grads[n]) for n in want_grads)
    ]:  # fmt: skip
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        finite = np.isfinite(w)
        assert np.isfinite(g[finite]).all(), name
        size = np.abs(w[finite]).max(initial=1.0)
        error = np.abs(g[finite] - w[finite]).max(initial=0.0)
        assert error <= 2e-5 * size, name


@pytest.mark.parametrize(
    ("case", "dtype"),
    slow.unless(
        lambda *of: (
            of[0] == "everything"
            or of in [("decode", "float64"), ("gqa", "float16"), ("odd", "bfloat16")]
        ),
        itertools.product(
            ["odd", "gqa", "everything", "decode"], ["float64", "float16", "bfloat16"]
        ),
        several=True,
    ),
)
def test_dtypes(case: str, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        check(both, case, dtype, quick=case != "odd")


REFERENCE = ["odd", "causal more rows", "gqa", "lengths 0 nan", "mask rows mean",
             "mask rows zero", "dropout mean", "sinks empty", "everything",
             "passing lengths", "passing softcap", "passing dropout", "passing sinks",
             "passing nan", "passing nan, zero", "passing nan heads"]  # fmt: skip


@pytest.mark.parametrize("case", REFERENCE)
def test_reference(case: str) -> None:
    check(plain, case, "float32")


BATCHED = {
    "all": {"q": 0, "k": 0, "v": 0},
    "queries": {"q": 0},
    "keys": {"k": 1, "v": 2},
    "offset": {"offset": 0},
    "lengths": {"kv_lengths": 0, "q": 0},
}


@pytest.mark.parametrize("name", BATCHED)
def test_vmap(name: str) -> None:
    extra = {"offset": lengths(0, 9), "kv_lengths": lengths(20, 11)}
    params = {"window": (12, 0), "scale": 0.4, "empty_rows": "zero"}
    one, two = (make((2, 20, 23, 4, 2, 8, 8), extra, seed=seed) for seed in (0, 1))
    two = {**two, "offset": lengths(4, 1), "kv_lengths": lengths(3, 23)}
    up = one["q"]
    axes = {n: BATCHED[name].get(n) for n in one}
    stacked = {
        n: x if (axis := axes[n]) is None else np.stack([x, two[n]], axis)
        for n, x in one.items()
    }
    call = jax.vmap(lambda x: both(x, tuple(params.items()), up), (axes,))
    out, grads = jax.jit(call, compiler_options=QUICK)(stacked)
    for i in range(2):
        mine = {n: (one, two)[0 if axes[n] is None else i][n] for n in one}
        want, want_grads = exact(mine, up, params)
        close(out[i], want, "float32", "out")
        for n, g in want_grads.items():
            close(grads[n][i], g, "float32", n)


@pytest.mark.parametrize(
    "case",
    slow.first(3, ["everything", "odd", "causal", "lengths prefix", "bias heads",
                   "dropout mean"]),
)  # fmt: skip
def test_inside_shard_map(case: str) -> None:
    shape, extra, params = CASES[case]
    arrays = make(shape, extra)
    up = make(shape, {"up": (*shape[:2], shape[3], shape[6])})["up"]
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    batch, every = PartitionSpec("x"), PartitionSpec()
    specs = {n: batch if n in "qkv" else every for n in arrays}

    def local(arrays: dict[str, Any], up: Any) -> Any:
        out, grads = both(arrays, tuple(params.items()), up)
        return out, {n: grads[n] for n in "qkv"}

    run = jax.shard_map(
        local, mesh=mesh, in_specs=(specs, batch), out_specs=(batch, batch)
    )
    out, grads = jax.jit(run, compiler_options=QUICK)(arrays, up)
    want, want_grads = exact(arrays, up, params)
    close(out, want, "float32", "out")
    for n, g in grads.items():
        close(g, want_grads[n], "float32", n)


@pytest.mark.parametrize("case", ["gqa", "everything"])
def test_lowers_for_every_platform(case: str) -> None:
    shape, extra, params = CASES[case]
    arrays = make(shape, extra)
    up = make(shape, {"up": (*shape[:2], shape[3], shape[6])})["up"]
    call = jax.jit(lambda x, up: both(x, tuple(params.items()), up))
    for platforms in (["cuda"], ["tpu"], ["cpu", "rocm"]):
        exported = jax.export.export(call, platforms=platforms)(arrays, up)
        assert list(exported.platforms) == platforms


def temporary_bytes(function: Any, t: int) -> int:
    array = jax.ShapeDtypeStruct((1, t, 2, 8), jnp.float32)
    compiled = jax.jit(function).lower(array, array, array).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def test_memory_grows_with_t() -> None:
    params = {"window": CAUSAL}
    run = lambda q, k, v: both({"q": q, "k": k, "v": v}, tuple(params.items()), q)
    small, large = temporary_bytes(run, 512), temporary_bytes(run, 4096)
    assert large < 9 * small
    assert large < 4096 * 4096 * 2 * 4 / 50


def test_nothing_is_read_past_the_last_block() -> None:
    arrays = make((1, 40, 200, 1, 1, 8, 8), {"kv_lengths": lengths(20)})
    arrays["k"][:, 64:] = arrays["v"][:, 64:] = np.nan
    run = jax.jit(lambda x: both(x, (), x["q"]), compiler_options=QUICK)
    out, grads = run(arrays)
    assert np.isfinite(out).all()
    assert all(np.isfinite(g).all() for g in grads.values())


def test_no_rank_two_positions_are_kept() -> None:
    args = [jax.ShapeDtypeStruct((1, 4096, 2, 8), jnp.bfloat16)] * 3
    kernel = KERNEL
    run = lambda q, k, v: kernel.forward(q=q, k=k, v=v, window=CAUSAL)
    text = str(jax.make_jaxpr(run)(*args))
    assert "4096,4096" not in text


@pytest.mark.parametrize(
    ("q", "s", "pays"),
    [
        ((1, 4096, 8, 64), 4096, True),
        ((1, 512, 8, 64), 512, True),
        ((1, 128, 8, 64), 128, False),
        ((4, 1, 8, 64), 512, False),
        ((4, 1, 8, 64), 32768, True),
    ],
)
def test_small_uses_stay_as_written(q: Any, s: int, pays: bool) -> None:
    kv = jax.ShapeDtypeStruct((q[0], s, *q[2:]), jnp.float32)
    operands = {"q": jax.ShapeDtypeStruct(q, jnp.float32), "k": kv, "v": kv}
    verdict = KERNEL.profitable(spec_of(OP, operands, {}), "cpu")
    assert verdict.ok == pays
    assert pays or "iB" in verdict.reasons[0].text


def test_supports_says_why_not() -> None:
    kernel = KERNEL
    array = lambda *shape, dtype="float32": jax.ShapeDtypeStruct(shape, dtype)
    fine = {n: array(1, 4, 2, 8) for n in "qkv"}
    assert kernel.supports(spec_of(OP, fine, {})).ok
    for name, bad, code in (
        ("q", array(1, 0, 2, 8), "empty"),
        ("k", array(1, 4, 2, 8, dtype="int8"), "dtype"),
    ):
        verdict = kernel.supports(spec_of(OP, {**fine, name: bad}, {}))
        assert [r.code for r in verdict.reasons] == [code]


def test_sample() -> None:
    shape, extra, params = CASES["everything"]
    arrays = make(shape, extra)
    operands = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in arrays.items()}
    made = jax.jit(lambda key: sample(key, operands, params))(jax.random.key(0))
    assert {n: (x.shape, x.dtype) for n, x in made.items()} == {
        n: (x.shape, x.dtype) for n, x in arrays.items()
    }
    assert all(np.isfinite(x).all() for x in made.values())
