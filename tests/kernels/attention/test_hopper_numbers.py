"""Attention on Hopper: its numbers on such a GPU, against float64."""

# ruff: noqa: E501  (one case per line reads best)

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.attention import hopper
from rewriter.kernels.attention.hopper import backward_config
from rewriter.kernels.attention.hopper.backward_config import BackwardTiles
from rewriter.kernels.attention.hopper.config import Tiles
from rewriter.kernels.attention.hopper.widths import filled
from rewriter.ops.kernel import spec_of
from rewriter.ops.registry import registry
from tests.kernels.attention.test_hopper import (
    CAUSAL,
    FORCED,
    H200,
    LIMITS,
    PROGRAMS,
    error,
    exact,
    exact_gradients,
    needs_hopper,
    operands,
    split,
)
from tests.support.kernels import bits
from tests.support.kernels.float64 import float64

Case = tuple[tuple[int, ...], dict[str, Any], tuple[int, ...] | None]
CASES: dict[str, Case] = {  # b, t, s, n, heads of k, h, e; params, operands; config
    "one tile": ((1, 128, 128, 1, 1, 128, 128), {}, None),
    "many": ((2, 512, 512, 4, 4, 128, 128), {}, None),
    "long": ((1, 2500, 2500, 2, 2, 128, 128), {}, None),
    "odd": ((1, 333, 301, 3, 3, 128, 128), {}, None),
    "causal": ((2, 512, 512, 4, 4, 128, 128), {"window": CAUSAL}, None),
    "causal odd": ((1, 333, 333, 3, 3, 128, 128), {"window": CAUSAL}, None),
    "causal long": ((2, 4096, 4096, 8, 8, 128, 128), {"window": CAUSAL}, None),
    "grouped": ((2, 257, 257, 8, 2, 64, 64), {"window": CAUSAL}, None),
    "one key head": ((2, 200, 500, 8, 1, 64, 64), {}, (128, 4, 2)),
    "prefix": (
        (3, 700, 700, 4, 2, 128, 128), {"window": CAUSAL, "prefix": (0, 300, 900)}, None,
    ),
    "prefix and lengths": (
        (3, 700, 700, 4, 4, 64, 64),
        {"window": CAUSAL, "prefix": (200, 300, 5), "kv_lengths": (700, 100, 300)}, None,
    ),
    "blocks of 192": ((2, 300, 700, 4, 4, 64, 64), {}, (192, 3, 2)),
    "no turns": ((2, 300, 700, 4, 4, 64, 64), {}, (128, 4, 3, 132, False)),
    "a block a tile": ((2, 700, 700, 4, 4, 128, 128), {"window": CAUSAL}, (128, 2, 2, 0)),
    "few programs": ((2, 900, 900, 4, 4, 64, 64), {"window": CAUSAL}, (64, 6, 3, 5)),
    "claimed": (
        (2, 900, 900, 4, 4, 128, 128), {"window": CAUSAL}, (128, 2, 2, 7, True, True),
    ),
    "claimed, three warpgroups": (
        (3, 900, 900, 4, 4, 64, 64), {"kv_lengths": (900, 1, 500)},
        (128, 4, 3, 5, False, True),
    ),
    "q shares memory": ((2, 900, 900, 2, 2, 128, 128), {}, (128, 3, 2)),
    "one row": ((3, 1, 200, 2, 2, 64, 64), {}, None),
    "one key": ((3, 200, 1, 2, 2, 64, 64), {}, None),
    "window": ((2, 500, 500, 2, 2, 128, 128), {"window": (100, 0)}, None),
    "two sides": ((2, 500, 400, 2, 2, 128, 128), {"window": (60, 33)}, None),
    "only left": ((1, 300, 300, 2, 2, 64, 64), {"window": (40, None)}, None),
    "itself": ((2, 300, 300, 2, 2, 64, 64), {"window": (0, 0)}, None),
    "bottom right": ((1, 130, 400, 2, 2, 128, 128), {"window": CAUSAL, "shift": 270}, None),
    "rows without keys, nan": (
        (1, 400, 130, 2, 2, 128, 128), {"window": CAUSAL, "shift": -270}, None,
    ),
    "rows without keys, zero": (
        (1, 400, 130, 2, 2, 128, 128),
        {"window": CAUSAL, "shift": -270, "empty_rows": "zero"}, None,
    ),
    "rows without keys, mean": (
        (1, 400, 130, 2, 2, 128, 128),
        {"window": CAUSAL, "shift": -270, "empty_rows": "mean"}, None,
    ),
    "lengths": (
        (4, 256, 300, 2, 2, 128, 128),
        {"empty_rows": "mean", "kv_lengths": (0, 1, 130, 300)}, None,
    ),
    "lengths, causal": (
        (4, 256, 300, 2, 2, 128, 128),
        {"window": CAUSAL, "kv_lengths": (0, 1, 130, 300)}, None,
    ),
    "offsets": (
        (3, 100, 300, 2, 2, 128, 128), {"window": CAUSAL, "offset": (0, 200, 57)}, None,
    ),
    "all at once": (
        (3, 300, 300, 4, 2, 64, 64),
        {"window": (70, 5), "empty_rows": "mean", "offset": (-100, 0, 260),
         "kv_lengths": (300, 200, 300), "softcap": 4.0}, None,
    ),
    "soft cap": ((2, 256, 256, 2, 2, 128, 128), {"softcap": 5.0, "times": 3}, None),
    "large scores": ((2, 256, 256, 2, 2, 128, 128), {"window": CAUSAL, "times": 30}, None),
    "width of 256": ((1, 300, 300, 2, 2, 256, 256), {"window": CAUSAL}, None),
    "width of 96": ((1, 300, 300, 2, 2, 96, 96), {}, None),
    "width of 80": ((1, 300, 300, 2, 2, 80, 80), {}, (96, 2, 2)),
    "width of 72": ((2, 300, 500, 4, 2, 72, 72), {"window": CAUSAL}, None),
    "width of 40": ((2, 300, 500, 4, 4, 40, 24), {}, None),
    "width of 16": ((1, 300, 300, 2, 2, 16, 16), {}, None),
    "other values": ((1, 300, 300, 2, 2, 192, 128), {"window": CAUSAL}, None),
}  # fmt: skip


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", CASES)
def test_numbers_against_float64(name: str, dtype: str) -> None:
    shape, given, tiles = CASES[name]
    q, k, v, _ = operands(shape, dtype, given.get("times", 1))
    numbers, params = split(given, shape[5])
    more = {} if tiles is None else {"config": Tiles(*tiles)}
    if tiles is None:
        named = {"q": q, "k": k, "v": v, **numbers}
        its = spec_of(registry().op("attention"), named, params)
        assert hopper.supports(its).ok
        more = {"config": hopper.default(its, H200)}

    @jax.jit
    def run(q, k, v, numbers):
        call = lambda **x: hopper.forward(q=q, k=k, v=v, **numbers, **params, **x)
        return call(residuals=True, **more), call(**more)

    ((out, (lse,)), alone) = run(q, k, v, numbers)
    want = exact(q, k, v, **numbers, **params)
    assert out.dtype == q.dtype
    assert error(out, want) <= LIMITS[dtype]
    for _ in range(3):  # a race would show as a change
        again = run(q, k, v, numbers)[1]
        bits.assert_same(again, alone)
    bits.assert_same(out, alone)
    ones = exact(q, k, jnp.ones_like(v), **numbers, **{**params, "empty_rows": "zero"})
    empty = ones[..., 0].transpose(0, 2, 1) == 0
    np.testing.assert_array_equal(np.asarray(lse) == -np.inf, empty)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    "at", [("k", 290, np.nan), ("q", 29, np.inf), ("v", 5, np.nan)]
)
def test_what_is_not_finite_stays_so(at: tuple[str, int, float]) -> None:
    """Rows that see it are NaN as in the reference, rows that do not are not."""
    named = dict(
        zip("qkv", operands((1, 300, 300, 2, 2, 128, 128), "bfloat16")[:3], strict=True)
    )
    name, row, value = at
    named[name] = named[name].at[0, row, 0, 0].set(value)
    params = {"window": CAUSAL, "scale": 0.1}
    got = jax.jit(lambda x: hopper.forward(**x, **params))(named)
    want = exact(**named, **params)
    if name == "v":  # 0 · NaN counts where a key is hidden, which is not read here
        assert np.isnan(np.asarray(got, np.float32))[0, 5:, 0, 0].all()
        return
    assert error(got, want) <= LIMITS["bfloat16"]


@pytest.mark.gpu
@needs_hopper
def test_the_log_sum_exp_against_float64() -> None:
    shape = (2, 300, 200, 4, 2, 64, 64)
    q, k, v, _ = operands(shape, "bfloat16")
    params = {"window": CAUSAL, "scale": 0.3, "softcap": 5.0}
    _, (lse,) = jax.jit(
        lambda q, k, v: hopper.forward(q=q, k=k, v=v, residuals=True, **params)
    )(q, k, v)
    wide = [np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k)]
    scores = np.einsum("btnh,bsnh->bnts", wide[0], np.repeat(wide[1], 2, 2)) * 0.3
    scores = 5 * np.tanh(scores / 5)
    scores = np.where(np.tril(np.ones((300, 200), bool)), scores, -np.inf)
    want = np.logaddexp.reduce(scores, -1)
    np.testing.assert_allclose(np.asarray(lse), want, atol=2e-5, rtol=2e-5)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_run_on_it(name: str) -> None:
    given = operands((2, 384, 384, 4, 4, 64, 64), "bfloat16")[:3]
    fast = rewriter.optimize(PROGRAMS[name], implementation=FORCED)
    assert "mosaic_gpu" in fast.lower(*given).as_text()
    with float64():
        wide = [np.asarray(x.astype(jnp.float32), np.float64) for x in given]
        want = jax.tree.leaves(PROGRAMS[name](*wide))
    for got, right in zip(jax.tree.leaves(fast(*given)), want, strict=True):
        assert error(got, np.asarray(right)) <= 1e-2


BACKWARD: dict[str, tuple[tuple[int, ...], dict[str, Any], BackwardTiles]] = {
    "one tile": ((1, 128, 128, 1, 1, 128, 128), {}, BackwardTiles()),
    "many": ((2, 512, 512, 4, 4, 128, 128), {}, BackwardTiles(64, 128)),
    "causal": ((2, 512, 512, 4, 4, 128, 128), {"window": CAUSAL}, BackwardTiles()),
    "causal odd": ((1, 333, 333, 3, 3, 128, 128), {"window": CAUSAL}, BackwardTiles()),
    "odd": ((1, 333, 301, 3, 3, 128, 128), {}, BackwardTiles()),
    "grouped": ((2, 257, 257, 8, 2, 64, 64), {"window": CAUSAL}, BackwardTiles(64, 128)),
    "three warpgroups": ((2, 257, 400, 8, 2, 64, 64), {}, BackwardTiles(64, 64, 3, 3)),
    "128 queries": (
        (2, 700, 700, 4, 4, 64, 64), {"window": CAUSAL}, BackwardTiles(128, 128),
    ),
    "window": ((2, 500, 500, 2, 2, 128, 128), {"window": (100, 0)}, BackwardTiles()),
    "prefix": (
        (3, 700, 700, 4, 2, 128, 128), {"window": CAUSAL, "prefix": (0, 300, 900)},
        BackwardTiles(64, 128),
    ),
    "prefix, 64 wide": (
        (2, 700, 700, 4, 4, 64, 64), {"window": CAUSAL, "prefix": (150, 300)},
        BackwardTiles(64, 128, 3),
    ),
    "width of 72": ((2, 300, 500, 4, 2, 72, 40), {}, BackwardTiles()),
    "width of 96": ((2, 300, 500, 4, 2, 96, 96), {"window": CAUSAL}, BackwardTiles()),
    "two sides": (
        (2, 500, 400, 2, 2, 64, 64),
        {"window": (60, 33), "shift": 7, "empty_rows": "zero"}, BackwardTiles(),
    ),
    "lengths": (
        (4, 256, 300, 2, 2, 128, 128),
        {"empty_rows": "mean", "kv_lengths": (0, 1, 130, 300)}, BackwardTiles(),
    ),
    "lengths, causal": (
        (4, 256, 300, 4, 2, 64, 64),
        {"window": CAUSAL, "empty_rows": "zero", "kv_lengths": (0, 1, 130, 300)},
        BackwardTiles(),
    ),
    "offsets": (
        (3, 100, 300, 2, 2, 128, 128), {"window": CAUSAL, "offset": (0, 200, 57)},
        BackwardTiles(),
    ),
    "one row": ((3, 1, 200, 2, 2, 64, 64), {}, BackwardTiles()),
    "claimed": (
        (2, 700, 700, 4, 2, 128, 128), {"window": CAUSAL},
        BackwardTiles(64, 128, programs=7, claimed=True),
    ),
    "claimed, lengths": (
        (3, 700, 700, 4, 4, 64, 64), {"kv_lengths": (700, 1, 300), "window": (90, 20)},
        BackwardTiles(64, 64, 3, 3, programs=5, claimed=True),
    ),
    "claimed, divided": (
        (1, 700, 700, 4, 4, 192, 192), {"window": CAUSAL},
        BackwardTiles(64, 64, divided=True, v_stages=1, programs=5, claimed=True),
    ),
    "large scores": (
        (2, 256, 256, 2, 2, 128, 128), {"window": CAUSAL, "times": 30}, BackwardTiles(),
    ),
    "a block a tile": (
        (2, 700, 700, 4, 4, 128, 128), {"window": CAUSAL}, BackwardTiles(programs=0),
    ),
    "other values": ((1, 300, 300, 2, 2, 128, 64), {"window": CAUSAL}, BackwardTiles()),
    "long": ((1, 4096, 4096, 8, 4, 64, 64), {"window": CAUSAL}, BackwardTiles()),
    "width of 256": (
        (2, 333, 301, 4, 2, 256, 256), {},
        BackwardTiles(64, 64, divided=True, v_stages=1),
    ),
    "width of 256, causal": (
        (2, 700, 700, 4, 2, 256, 256), {"window": CAUSAL},
        BackwardTiles(64, 64, divided=True, v_stages=1),
    ),
    "width of 256, soft cap": (
        (2, 500, 500, 8, 4, 256, 256),
        {"window": (300, 0), "softcap": 5.0, "times": 3},
        BackwardTiles(64, 64, divided=True, v_stages=1),
    ),
    "width of 256, lengths": (
        (4, 256, 300, 2, 2, 256, 256),
        {"empty_rows": "mean", "kv_lengths": (0, 1, 130, 300)},
        BackwardTiles(64, 64, divided=True, v_stages=1),
    ),
    "width of 256, blocks of 32": (
        (2, 333, 301, 4, 2, 256, 256), {"window": CAUSAL, "shift": 17},
        BackwardTiles(32, 32, divided=True),
    ),
    "width of 192": (
        (2, 400, 333, 3, 3, 192, 192), {"window": CAUSAL, "empty_rows": "zero"},
        BackwardTiles(64, 64, divided=True),
    ),
    "width of 192, values of 128": (
        (2, 700, 700, 4, 4, 192, 128), {"window": CAUSAL},
        BackwardTiles(64, 64, 3, divided=True),
    ),
    "width of 192, values of 128, offsets": (
        (3, 100, 300, 4, 2, 192, 128), {"window": CAUSAL, "offset": (0, 200, 57)},
        BackwardTiles(64, 64, 3, divided=True),
    ),
    "width of 192, values of 128, blocks of 32": (
        (2, 500, 500, 4, 2, 192, 128), {"window": CAUSAL}, BackwardTiles(32, 64, 3),
    ),
    "long and wide": (
        (1, 4096, 4096, 8, 4, 256, 256), {"window": CAUSAL},
        BackwardTiles(64, 64, divided=True, v_stages=1),
    ),
    "divided, width of 128": (
        (2, 600, 600, 4, 4, 128, 128), {}, BackwardTiles(64, 64, 3, divided=True),
    ),
    "soft cap": (
        (2, 333, 301, 4, 2, 128, 128), {"softcap": 5.0, "times": 3},
        BackwardTiles(64, 128),
    ),
    "soft cap, window": (
        (2, 500, 500, 4, 4, 64, 64), {"softcap": 2.0, "window": (200, 0), "times": 3},
        BackwardTiles(64, 128, 3),
    ),
    "soft cap, three warpgroups": (
        (2, 500, 300, 4, 4, 64, 64),
        {"softcap": 2.0, "times": 3, "empty_rows": "mean", "kv_lengths": (0, 130)},
        BackwardTiles(64, 64, 3, 3),
    ),
}  # fmt: skip


def tiles_of(name: str, fused: bool) -> tuple[BackwardTiles, bool]:
    """A case's config, and whether it can run."""
    shape, _, tiles = BACKWARD[name]
    tiles = dataclasses.replace(tiles, fused=fused)
    sizes = (filled(x) for x in shape[5:])
    return tiles, backward_config.fits_backward_widths(tiles, *sizes).ok


def test_one_kernel_for_all_gradients_is_refused_where_it_cannot_run() -> None:
    """By what tiles there are and by memory, not by widths; all others can run."""
    assert all(tiles_of(name, False)[1] for name in BACKWARD)
    fused = {name for name in BACKWARD if tiles_of(name, True)[1]}
    if jax.__version_info__ < (0, 11):
        assert not fused
        return
    assert {"one tile", "lengths, causal", "width of 72", "width of 96"} <= fused
    assert not fused & {"three warpgroups", "128 queries", "width of 256"}


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    ("name", "fused"),
    [x for x in itertools.product(BACKWARD, [False, True]) if tiles_of(*x)[1]],
)
def test_gradients_against_float64(name: str, fused: bool) -> None:
    (shape, given, _), (tiles, _) = BACKWARD[name], tiles_of(name, fused)
    q, k, v, up = operands(shape, "bfloat16", given.get("times", 1))
    numbers, params = split(given, shape[5])

    @jax.jit
    def run(q, k, v, up, numbers):
        both = {"q": q, "k": k, "v": v, **numbers, **params}
        out, residuals = hopper.forward(**both, residuals=True)
        grads = hopper.backward(
            **both, out=out, residuals=residuals, cotangent=up, config=tiles
        )
        return out, *(grads[x] for x in "qkv")

    got = run(q, k, v, up, numbers)
    again = run(q, k, v, up, numbers)
    want = exact_gradients(q, k, v, up, **numbers, **params)
    for x, y, exact_ in zip(got, again, want, strict=True):
        assert error(x, exact_) <= 3 * LIMITS["bfloat16"]
        if not fused:
            bits.assert_same(x, y)
        assert error(y, np.asarray(x, np.float64)) <= LIMITS["bfloat16"]
