"""Attention on Hopper with more operands: its code, simulated by threads."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rewriter.kernels.attention.hopper import (
    backward_config,
    backward_kernel,
    forward_kernel,
)
from rewriter.kernels.attention.hopper.backward_config import BackwardTiles
from rewriter.kernels.attention.hopper.config import Tiles
from rewriter.kernels.attention.reference import reference, usual, visible
from tests.kernels.attention.test_hopper import (
    CAUSAL,
    LIMITS,
    error,
    operands,
)
from tests.kernels.attention.test_hopper_extra_operands import LOWEST, Array
from tests.slow import first
from tests.support.kernels import simulator
from tests.support.kernels.float64 import float64

pytestmark = pytest.mark.once


Case = tuple[tuple[int, ...], dict[str, Any], Tiles | None, BackwardTiles]
CASES: dict[str, Case] = {  # b, t, s, n, heads of k, h, e; drawn and given; configs
    "segments": (
        (2, 300, 200, 2, 1, 32, 32), {"segments": "packed", "window": CAUSAL},
        Tiles(64, 2, 2, 3), BackwardTiles(64, 64, 2, 2, 3),
    ),
    "pair": (
        (2, 130, 140, 2, 2, 32, 32),
        {"bias": ((1, 2, 130, 140), "float32"), "mask": (2, 1, 1, 140)},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "slopes and sinks": (
        (2, 200, 150, 4, 2, 32, 32),
        {"alibi": (4,), "sinks": (4,), "window": (70, 3), "offset": (-90, 10)},
        Tiles(64, 3, 2, 3, False), BackwardTiles(64, 64, 2, 2, 3),
    ),
    "table of masks": (
        (1, 130, 140, 4, 2, 32, 32),
        {"mask": (1, 4, 130, 140), "hidden": 7, "empty_rows": "mean"},
        Tiles(64, 2, 3, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "blocks of masks": (
        (1, 130, 540, 4, 2, 32, 32), {"near": (1, 4, 130, 540), "empty_rows": "zero"},
        Tiles(32, 3, 2, 3), BackwardTiles(64, 64, 2, 2, 3),
    ),
    "lowest": (
        (2, 100, 140, 2, 1, 32, 32),
        {"bias": ((2, 1, 1, 140), "float32"), "lowest": True},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "keys that pad": (
        (2, 130, 540, 2, 1, 32, 32),
        {"bias": ((1, 1, 1, 540), "float32"), "near": (2, 1, 1, 540),
         "window": (400, 400), "alibi": (2,)},
        Tiles(32, 2, 2, 3), BackwardTiles(64, 64, 2, 2, 3),
    ),
    "segments in no order": (
        (2, 200, 260, 2, 1, 32, 32),
        {"segments": "shuffled", "window": (50, 20), "empty_rows": "mean"},
        Tiles(64, 2, 3, 3), BackwardTiles(64, 64, 2, 3, 3),
    ),
    "window of data": (
        (2, 200, 260, 2, 1, 32, 32), {"positions": (60, 5)},
        Tiles(64, 2, 3, 3), BackwardTiles(64, 64, 2, 2, 3),
    ),
    "positions that restart": (
        (2, 150, 260, 2, 2, 32, 32),
        {"positions": (40, 0), "period": 90, "segments": "packed",
         "empty_rows": "zero", "softcap": 3.0},
        Tiles(32, 2, 2, 3), BackwardTiles(64, 64, 2, 2, 3),
    ),
    "last positions alone": (
        (1, 130, 150, 2, 1, 32, 32),
        {"positions": (None, 0), "bias": ((1, 2, 130, 150), "float32"),
         "empty_rows": "mean", "kv_lengths": (120,)},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "segments of their own": (
        (1, 150, 260, 2, 2, 32, 32), {"segments": "apart", "empty_rows": "zero"},
        Tiles(32, 2, 2, 3), BackwardTiles(64, 64, 2, 2, 3),
    ),
    "warpgroups without rows": (
        (2, 300, 140, 2, 2, 32, 32),
        {"bias": ((1, 2, 300, 140), "float32"), "mask": (2, 1, 1, 140)},
        Tiles(64, 2, 3, 2), BackwardTiles(64, 64, 2, 3, 2),
    ),
    "soft cap": (
        (1, 130, 140, 4, 2, 32, 32),
        {"bias": ((1, 4, 130, 140), "float32"), "mask": (1, 4, 130, 140),
         "sinks": (4,), "softcap": 2.0},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "soft cap and segments": (
        (2, 150, 140, 2, 2, 32, 32),
        {"segments": "packed", "softcap": 1.0, "alibi": (2,), "sinks": (2,)},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "wide": (
        (1, 130, 140, 4, 2, 192, 128),
        {"bias": ((1, 4, 130, 140), "bfloat16"), "mask": (1, 1, 130, 140),
         "alibi": (4,), "sinks": (4,), "softcap": 2.0, "empty_rows": "zero"},
        Tiles(32, 2, 2, 2), BackwardTiles(64, 32, 2, 2, 2, divided=True, v_stages=1),
    ),
    "wide and segments": (
        (2, 150, 140, 2, 1, 64, 128),
        {"segments": "packed", "bias": ((2, 1, 150, 1), "float32"), "window": CAUSAL},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2, divided=True),
    ),
    "rows without keys, nan": (
        (1, 130, 140, 2, 2, 32, 32), {"mask": (1, 2, 130, 140), "hidden": 7},
        Tiles(128, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "rows without keys, sinks": (
        (1, 130, 140, 2, 2, 32, 32),
        {"mask": (1, 1, 130, 140), "hidden": 7, "sinks": (2,)},
        Tiles(128, 2, 2, 2), BackwardTiles(64, 128, 2, 2, 2),
    ),
    "thin ones": (
        (2, 130, 140, 2, 2, 32, 32),
        {"bias": ((2, 1, 130, 1), "bfloat16"), "mask": (1, 2, 1, 140),
         "empty_rows": "zero", "hidden": 140},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "all at once": (
        (2, 203, 150, 4, 2, 64, 32),
        {"bias": ((1, 4, 203, 150), "bfloat16"), "mask": (2, 1, 203, 150),
         "segments": "packed", "alibi": (4,), "sinks": (4,), "window": (100, None),
         "shift": -30, "kv_lengths": (150, 77)},
        Tiles(32, 2, 2, 3), BackwardTiles(64, 64, 2, 2, 3),
    ),
}  # fmt: skip


def drawn(case: dict[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """The other operands and parameters of a case, as numpy arrays."""
    random = np.random.default_rng(1)
    b, t, s, _, _, h, _ = shape
    case = dict(case)
    made: dict[str, Any] = {"scale": h**-0.5}
    if "bias" in case:
        form, dtype = case.pop("bias")
        made["bias"] = np.asarray(random.normal(size=form), jnp.dtype(dtype))
        if case.pop("lowest", False):  # of all keys of the first batch entry
            hidden = random.random(form) < 0.3
            hidden[0] = True
            made["bias"] = np.where(hidden, np.float32(LOWEST), made["bias"])
    if "mask" in case:
        made["mask"] = random.random(case.pop("mask")) < 0.5
        made["mask"][..., : case.pop("hidden", 0), :] = False
        made["mask"][..., case.pop("keys", None) or shape[2] :] = False
    if "near" in case:  # blocks that are hidden, whole and in between
        form = case.pop("near")
        n, rows, keys = np.ogrid[: form[1], : form[2], : form[3]]
        near = (keys - rows * 2 + 50 * n < 260) & (keys >= 70)
        made["mask"] = np.broadcast_to(near, form)
    if "segments" in case:
        made |= segments(case.pop("segments"), random, (b, t), (b, s))
    if "positions" in case:
        made |= positions(random, t, s, *case.pop("positions"), case.pop("period", 999))
    for name in sorted({"alibi", "sinks"} & case.keys()):
        made[name] = random.uniform(0.1, 1.0, case.pop(name)).astype(np.float32)
    for name in sorted({"kv_lengths", "offset"} & case.keys()):
        made[name] = np.asarray(case.pop(name), np.int32)
    return made | case


def segments(
    kind: str, random: np.random.Generator, *forms: tuple[int, int]
) -> dict[str, Array]:
    """Four packed documents; segments in no order; some that have nothing in common."""
    q, k = (random.integers(0, 4, form).astype(np.int32) for form in forms)
    if kind == "packed":
        q, k = np.sort(q, 1), np.sort(k, 1)
    return {"q_segments": q + 9 * (kind == "apart"), "kv_segments": k}


def positions(
    random: np.random.Generator, t: int, s: int, left: Any, right: int, period: int
) -> dict[str, Array]:
    """A window around each query, among keys of some slots in turned order."""
    keys = (np.roll(np.arange(s), random.integers(0, s))[None] % period).astype("int32")
    at = (np.arange(t)[None] + s - t - 3).astype("int32") % period
    ends = {"last_position": at + right}
    if left is not None:
        ends["first_position"] = at - random.integers(left // 2, left, (1, t)).astype(
            "int32"
        )
    return {"kv_positions": keys, **ends}


def wanted(q: Any, k: Any, v: Any, up: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The result and gradients in float64."""
    moving = {"q": q, "k": k, "v": v}
    moving |= {n: given[n] for n in ("bias", "alibi", "sinks") if n in given}
    rest = {n: x for n, x in given.items() if n not in moving}
    with float64():
        wide = {n: np.asarray(x, np.float64) for n, x in moving.items()}

        @jax.jit
        def both(wide: Any, up: Any) -> Any:
            out, back = jax.vjp(lambda x: reference(**x, **rest), wide)
            return {"out": out, **back(up)[0]}

        return both(wide, np.asarray(up, np.float64))


TABLES: dict[str, Case] = {  # whose biases have cotangents by the kernel
    "for each": (
        (2, 130, 140, 2, 1, 32, 32), {"bias": ((2, 2, 130, 140), "bfloat16")},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, programs=3),
    ),
    "for a head": (
        (3, 200, 150, 2, 2, 32, 64),
        {"bias": ((1, 2, 200, 150), "float32"), "window": CAUSAL,
         "empty_rows": "zero"},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, programs=2),
    ),
    "for a batch entry": (
        (2, 70, 270, 4, 2, 32, 32),
        {"bias": ((2, 1, 70, 270), "bfloat16"), "window": (100, 30), "alibi": (4,),
         "offset": (-9, 150), "kv_lengths": (200, 270)},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, programs=0),
    ),
    "for all": (
        (3, 260, 70, 4, 2, 32, 32),
        {"bias": ((1, 1, 260, 70), "bfloat16"), "mask": (3, 1, 260, 70),
         "segments": "packed", "softcap": 2.0, "empty_rows": "zero"},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, warpgroups=3, programs=4),
    ),
    "for all, large": (
        (41, 130, 64, 1, 1, 32, 32),
        {"bias": ((1, 1, 130, 64), "float16")},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, programs=4),
    ),
}  # fmt: skip


COLUMNS: dict[str, Case] = {  # whose biases of keys, or slopes, have cotangents
    "of keys, for all": (
        (2, 130, 140, 4, 2, 32, 32),
        {"bias": ((1, 1, 1, 140), "float32"), "softcap": 2.0},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, programs=3),
    ),
    "of keys, for each": (
        (2, 150, 270, 4, 2, 32, 64),
        {"bias": ((2, 4, 1, 270), "bfloat16"), "window": (100, 30), "sinks": (4,),
         "offset": (-9, 150), "kv_lengths": (200, 270)},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, warpgroups=3, programs=2),
    ),
    "of keys, beside segments": (
        (2, 200, 150, 2, 1, 32, 32),
        {"bias": ((1, 2, 1, 150), "float32"), "segments": "packed",
         "window": CAUSAL, "empty_rows": "zero"},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, programs=2, claimed=True),
    ),
    "of keys, beside a mask": (
        (2, 540, 130, 2, 1, 32, 32),
        {"bias": ((2, 1, 1, 130), "float32"), "near": (2, 2, 540, 130),
         "empty_rows": "mean"},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, programs=2),
    ),
    "a number": (
        (2, 70, 70, 2, 2, 32, 32), {"bias": ((2, 1, 1, 1), "float32"), "sinks": (2,)},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, programs=2),
    ),
    "of queries and a sink": (
        (2, 130, 140, 4, 2, 32, 32),
        {"bias": ((2, 4, 130, 1), "float32"), "sinks": (4,), "window": (20, 0)},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, programs=2),
    ),
    "slopes of groups": (
        (2, 200, 260, 4, 2, 32, 32),
        {"alibi": (4,), "window": CAUSAL, "offset": (40, 60)},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, programs=3),
    ),
    "slopes, wide": (
        (1, 130, 140, 4, 2, 192, 128), {"alibi": (4,), "sinks": (4,)},
        Tiles(32, 2, 2, 2), BackwardTiles(64, 32, 2, 2, 2, divided=True, v_stages=1),
    ),
}  # fmt: skip


def errors_within_limits(
    got: dict[str, Any], want: dict[str, Any], given: dict[str, Any], up: Any
) -> None:
    """Every cotangent against float64; that of slopes is at least as good as XLA's.

    Args:
        got: The result and cotangents.
        want: The same in float64.
        given: Operands and parameters.
        up: The cotangent of the result.
    """
    for which, x in got.items():
        limit, exact = 3 * LIMITS["bfloat16"], np.asarray(want[which])
        if which == "alibi":  # a sum whose terms cancel
            arrays = {n: x for n, x in given.items() if hasattr(x, "shape")}
            params = {n: x for n, x in given.items() if n not in arrays}
            arrays = {n: jnp.asarray(x) for n, x in arrays.items()}
            limit = error(slopes_as_written(arrays, params, jnp.asarray(up)), exact)
        if np.linalg.norm(exact) < 1e-9:  # the only weight is 1, or a row moves none
            assert np.linalg.norm(x) <= limit * np.linalg.norm(up), which
            continue
        assert error(x, exact) <= limit, which


def simulated(name: str, fused: bool, tables: bool = False) -> None:
    shape, case, tiles, back = {**CASES, **TABLES, **COLUMNS, **PASSING}[name]
    back = dataclasses.replace(back, fused=fused, tables=tables)
    q, k, v, up = (np.asarray(x) for x in operands(shape, "bfloat16"))
    given = drawn(case, shape)
    want = wanted(q, k, v, up, given)
    with simulator.simulated():
        out, residuals = forward_kernel.forward(
            q, k, v, residuals=True, config=tiles, **given
        )
        got = backward_kernel.backward(
            q, k, v, out=out, residuals=residuals, cotangent=up, config=back, **given
        )
    by_xla = "bias" in given and 1 not in given["bias"].shape[2:] and not tables
    assert got.keys() == want.keys() - {"out"} - ({"bias"} if by_xla else set())
    assert error(out, np.asarray(want["out"])) <= LIMITS["bfloat16"]
    errors_within_limits(got, want, {"q": q, "k": k, "v": v, **given}, up)


@pytest.mark.parametrize("name", first(5, CASES))
def test_its_code_run_by_threads(name: str) -> None:
    """Numbers, memory that is handed on, and barriers, with no GPU."""
    simulated(name, fused=False)


@pytest.mark.parametrize("name", first(1, ["lowest", "segments", "pair"]))
def test_one_kernel_for_all_gradients_run_by_threads(name: str) -> None:
    """Rows past the last key have infinite weights for rows of low scores."""
    simulated(name, fused=True)


@pytest.mark.parametrize("name", first(3, TABLES))
def test_cotangents_of_biases_run_by_threads(name: str) -> None:
    """Sums over all that share a bias, each of them once."""
    simulated(name, fused=False, tables=True)


@pytest.mark.parametrize("name", first(4, COLUMNS))
def test_cotangents_of_keys_and_slopes_run_by_threads(name: str) -> None:
    """Sums over all queries that meet a key, of each head apart."""
    simulated(name, fused=False)


def test_what_is_hidden_may_be_anything() -> None:
    """NaN in keys that a mask or segments hide does not reach the result."""
    shape = (1, 130, 140, 2, 2, 32, 32)
    q, k, v, _ = (np.array(x) for x in operands(shape, "bfloat16"))
    k[:, 70:] = np.nan
    seen = np.arange(140) < 70
    ids = np.where(seen, 0, 1).astype(np.int32)[None]
    hiders = {
        "table": {"mask": np.broadcast_to(seen, (1, 2, 130, 140))},
        "keys": {
            "mask": seen[None, None, None],
            "bias": np.zeros((1, 1, 1, 140), np.float32),
        },
        "segments": {"q_segments": np.zeros((1, 130), np.int32), "kv_segments": ids},
    }
    want = wanted(q, k[:, :70], v[:, :70], q, {})["out"]
    tiles = Tiles(64, 2, 2, 2, turns=False)
    for name, given in hiders.items():
        with simulator.simulated():
            got = forward_kernel.forward(q, k, v, config=tiles, **given)
        assert error(got, np.asarray(want)) <= LIMITS["bfloat16"], name


PASSING: dict[str, Case] = {  # rows without keys of which scores have a gradient
    "of positions": (
        (3, 130, 150, 4, 2, 32, 32),
        {"kv_lengths": (0, 70, 150), "window": CAUSAL, "shift": 10},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "of a mask, biases of pairs": (
        (2, 130, 140, 4, 2, 32, 32),
        {"mask": (1, 1, 130, 140), "hidden": 7, "bias": ((1, 4, 130, 140), "float32")},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2, tables=True),
    ),
    "of a mask, biases of keys": (
        (2, 130, 140, 4, 2, 32, 32),
        {"mask": (2, 4, 130, 140), "hidden": 7, "bias": ((2, 1, 1, 140), "float32"),
         "alibi": (4,)},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "of rows that a mask hides": (
        (2, 130, 140, 2, 2, 32, 32),
        {"mask": (2, 1, 130, 1), "bias": ((1, 2, 130, 1), "float32")},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "of a soft cap": (
        (2, 130, 140, 4, 2, 32, 32),
        {"mask": (1, 1, 130, 140), "hidden": 7, "softcap": 2.0},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "beside sinks": (
        (1, 130, 140, 2, 2, 32, 32),
        {"mask": (1, 1, 130, 140), "hidden": 7, "sinks": (2,)},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "of all in one": (
        (3, 130, 150, 4, 2, 32, 32), {"kv_lengths": (0, 70, 150)},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2, fused=True),
    ),
}  # fmt: skip
for _shape, _case, *_ in PASSING.values():
    _case["empty_rows"] = "mean_passing"
EMPTY: dict[str, tuple[tuple[int, ...], dict[str, Any], BackwardTiles]] = {
    "padding on the left, by groups": (
        (2, 200, 200, 4, 2, 32, 32),
        {"mask": (2, 1, 1, 200), "padded": (0, 130), "window": CAUSAL},
        BackwardTiles(64, 64, 2, 2, 2),
    ),
    "a whole sequence, wide": (
        (2, 70, 140, 2, 1, 192, 128), {"kv_lengths": (0, 140)},
        BackwardTiles(64, 32, 2, divided=True, v_stages=1),
    ),
    "in one, of any length": (
        (2, 203, 101, 2, 1, 32, 32), {"kv_lengths": (101, 0)},
        BackwardTiles(64, 64, 2, 2, 2, fused=True),
    ),
    "blocks of 128": (
        (2, 260, 260, 2, 2, 32, 32),
        {"mask": (2, 1, 1, 260), "padded": (150, 0), "window": CAUSAL},
        BackwardTiles(128, 128, 2, 2, claimed=True),
    ),
}  # fmt: skip
"""Rows without keys in the first or the second sequence, in the middle of tiles."""


FILLS = (
    ("padding on the left, by groups", "mean_passing"),
    ("in one, of any length", "mean"),
    ("a whole sequence, wide", "nan_passing"),
    ("in one, of any length", "mean_passing"),
    ("padding on the left, by groups", "nan"),
    ("padding on the left, by groups", "zero"),
    ("a whole sequence, wide", "mean_passing"),
    ("blocks of 128", "zero_nan_passing"),
)


@pytest.mark.parametrize(("name", "fill"), first(3, FILLS, several=True))
def test_what_rows_without_keys_pass_back(name: str, fill: str) -> None:
    """Gradients of such rows and of their keys, beside those that see some."""
    shape, case, back = EMPTY[name]
    if back.fused and not backward_config.fits_backward_widths(back, 32, 32).ok:
        pytest.skip(f"jax {jax.__version__} cannot add up dq in memory")
    q, k, v, up = (np.asarray(x) for x in operands(shape, "bfloat16"))
    given = {n: x for n, x in case.items() if n != "padded"}
    if "mask" in given:
        places = np.arange(shape[2])
        given["mask"] = places >= np.asarray(case["padded"])[:, None, None, None]
    if "kv_lengths" in given:
        given["kv_lengths"] = np.asarray(given["kv_lengths"], np.int32)
    given["empty_rows"] = fill
    with simulator.simulated():
        out, residuals = forward_kernel.forward(q, k, v, residuals=True, **given)
        got = backward_kernel.backward(
            q, k, v, out=out, residuals=residuals, cotangent=up, config=back, **given
        )
    want = wanted(q, k, v, up, given)
    for which in "qkv":
        x, exact = np.asarray(got[which], np.float64), np.asarray(want[which])
        np.testing.assert_array_equal(np.isnan(x), np.isnan(exact), which)
        there = ~np.isnan(exact)
        assert error(x[there], exact[there]) <= 3 * LIMITS["bfloat16"], which


@pytest.mark.parametrize("name", first(3, PASSING))
def test_rows_without_keys_pass_gradients(name: str) -> None:
    back = PASSING[name][3]
    simulated(name, back.fused, back.tables)


HIDDEN: dict[str, Case] = {  # some keys are seen by no query
    "a table of masks and of biases": (
        (1, 130, 140, 2, 1, 32, 32),
        {"mask": (1, 1, 130, 140), "keys": 70, "hidden": 7,
         "bias": ((1, 2, 130, 140), "float32")},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2, tables=True),
    ),
    "pairs and a mask of keys": (
        (1, 130, 140, 2, 1, 32, 32),
        {"mask": (1, 1, 1, 140), "keys": 70, "bias": ((1, 2, 130, 140), "float32")},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2, tables=True),
    ),
    "a mask of keys": (
        (2, 130, 140, 2, 1, 32, 32),
        {"mask": (2, 1, 1, 140), "keys": 70, "bias": ((1, 1, 1, 140), "float32")},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "a mask of keys, wide": (
        (1, 130, 140, 2, 1, 32, 32), {"mask": (1, 1, 1, 140), "keys": 70},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2, divided=True),
    ),
    "a mask of keys, slopes": (
        (1, 130, 140, 2, 1, 32, 32),
        {"mask": (1, 1, 1, 140), "keys": 70, "bias": ((1, 1, 1, 140), "float32"),
         "alibi": (2,), "window": CAUSAL, "shift": -20},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "lengths, in one": (
        (2, 130, 150, 2, 1, 32, 32),
        {"kv_lengths": (0, 70), "empty_rows": "mean_passing"},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2, fused=True),
    ),
    "lengths": (
        (2, 130, 150, 2, 1, 32, 32), {"kv_lengths": (0, 70)},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
    "wide": (
        (1, 70, 150, 2, 1, 32, 32),
        {"kv_lengths": (70,), "window": (40, 0), "softcap": 2.0},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2, divided=True),
    ),
    "segments": (
        (1, 130, 260, 2, 1, 32, 32), {"segments": "apart", "empty_rows": "zero"},
        Tiles(64, 2, 2, 2), BackwardTiles(64, 64, 2, 2, 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", first(3, HIDDEN))
def test_gradients_of_what_is_hidden_are_finite(name: str) -> None:
    """Those that are by the formula, whatever hidden keys and other rows hold."""
    with simulator.simulated():
        check_hidden(name, forward_kernel.forward, backward_kernel.backward)


def check_hidden(name: str, forward: Any, backward: Any) -> None:
    shape, case, tiles, back = HIDDEN[name]
    *arrays, up = (np.asarray(x) for x in operands(shape, "bfloat16"))
    given = drawn(case, shape)
    hidden = ~seen_at_all(shape, given)
    for which, bad in (("k", np.nan), ("v", np.nan), ("v", np.inf), ("up", np.nan)):
        named = {**dict(zip("qkv", arrays, strict=True)), "up": up.copy()}
        if which == "up":
            named["up"][:, 3] = bad
        else:
            made = np.where(hidden[..., None, None], bad, named[which])
            named[which] = made.astype(up.dtype)
        want = wanted(**named, given=given)
        q, k, v, cotangent = named.values()
        out, residuals = forward(q=q, k=k, v=v, residuals=True, config=tiles, **given)
        got = backward(
            q=q, k=k, v=v, out=out, residuals=residuals, cotangent=cotangent,
            config=back, **given,
        )  # fmt: skip
        for part, x in {"out": out, **got}.items():
            exact, x = np.asarray(want[part]), np.asarray(x, np.float64)
            finite = np.isfinite(exact)
            assert np.isfinite(x[finite]).all(), (which, bad, part)
            exact, x = exact[finite], x[finite]
            limit = 4 * LIMITS["bfloat16"] * max(np.linalg.norm(exact), 1.0)
            assert np.linalg.norm(x - exact) <= limit, (which, bad, part)


def seen_at_all(shape: tuple[int, ...], given: dict[str, Any]) -> np.ndarray:
    """Which keys some query sees, bool [b, s]."""
    names = ("mask", "q_segments", "kv_segments", "kv_lengths", "window", "shift")
    part = {n: given[n] for n in names if n in given}
    seen = visible(shape[1], shape[2], **part)
    return np.broadcast_to(np.asarray(seen).any((1, 2)), (shape[0], shape[2]))


def slopes_as_written(arrays: Any, params: Any, up: Any) -> Any:
    """Returns the cotangent of slopes of the op as usually written, in 16 bits."""
    run = lambda slopes: usual(**{**arrays, "alibi": slopes}, **params)
    out, back = jax.vjp(run, arrays["alibi"])
    return back(up.astype(out.dtype))[0]
