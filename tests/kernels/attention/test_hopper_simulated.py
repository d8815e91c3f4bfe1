"""Attention on Hopper: its code, run on a simulator of threads."""

# ruff: noqa: E501  (one case per line reads best)

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from rewriter.kernels.attention import hopper
from rewriter.kernels.attention.hopper import (
    backward_kernel,
    backward_of_keys,
    backward_of_queries,
    forward_kernel,
)
from rewriter.kernels.attention.hopper.backward_config import BackwardTiles
from rewriter.kernels.attention.hopper.config import Tiles
from tests import slow
from tests.kernels.attention.test_hopper import (
    CAUSAL,
    LIMITS,
    error,
    exact,
    exact_gradients,
    operands,
    split,
)
from tests.support.kernels import simulator
from tests.support.kernels.simulated_gpu import machine

SIMULATED: dict[str, tuple[tuple[int, ...], dict[str, Any], Tiles, BackwardTiles]] = {
    "one tile": ((1, 128, 128, 1, 1, 64, 64), {}, Tiles(64), BackwardTiles()),
    "odd": (
        (1, 203, 181, 2, 2, 64, 64), {}, Tiles(64, 2, 2, 3), BackwardTiles(programs=2),
    ),
    "one block, rows ahead": (
        (2, 197, 197, 2, 2, 32, 32), {}, Tiles(224, 2, 2, 3, False, held=True),
        BackwardTiles(128, 128, programs=2, ahead=2),
    ),
    "one row": ((2, 1, 200, 2, 2, 32, 32), {}, Tiles(128, programs=3), BackwardTiles()),
    "grouped, three warpgroups": (
        (1, 257, 200, 4, 2, 32, 32), {}, Tiles(64, 3, 3, 2), BackwardTiles(64, 64, 3, 3, 2),
    ),
    "causal, no turns": (
        (1, 330, 330, 2, 2, 32, 32), {"window": CAUSAL}, Tiles(64, 3, 2, 3, False),
        BackwardTiles(128, 64, 3, 2, 3),
    ),
    "all at once": (
        (3, 200, 200, 2, 1, 32, 32),
        {"window": (70, 5), "empty_rows": "mean", "offset": (-100, 0, 160),
         "kv_lengths": (200, 100, 0)},
        Tiles(64, 2, 3, 2), BackwardTiles(programs=3),
    ),
    "lengths": (
        (3, 130, 150, 2, 2, 32, 32), {"empty_rows": "mean", "kv_lengths": (0, 70, 150)},
        Tiles(64, programs=0), BackwardTiles(programs=0),
    ),
    "parts of a group": (
        (1, 130, 150, 8, 2, 32, 32), {"window": CAUSAL}, Tiles(64, programs=2),
        BackwardTiles(programs=5),
    ),
    "each query head by itself": (
        (2, 130, 70, 4, 1, 32, 64), {}, Tiles(64, programs=2), BackwardTiles(),
    ),
    "other values": (
        (1, 200, 200, 2, 2, 64, 32), {"window": CAUSAL}, Tiles(64, programs=1),
        BackwardTiles(),
    ),
    "odd, two panels": (
        (1, 203, 181, 2, 1, 128, 128), {"window": CAUSAL}, Tiles(64, 2, 2, 2),
        BackwardTiles(programs=2),
    ),
    "odd, panels of 32 columns": (
        (1, 131, 149, 2, 2, 96, 160), {"empty_rows": "mean", "kv_lengths": (100,)},
        Tiles(96, 2, 2, 2), BackwardTiles(32, 32, programs=2),
    ),
    "panels that end behind the heads": (
        (1, 136, 128, 2, 1, 72, 40), {"window": CAUSAL}, Tiles(64, 2, 2, 2),
        BackwardTiles(programs=2),
    ),
    "q shares memory": (
        (1, 300, 200, 2, 2, 128, 128), {}, Tiles(128, 3, 2, 2), BackwardTiles(),
    ),
    "wide": (
        (1, 203, 181, 2, 1, 256, 256), {"window": CAUSAL, "empty_rows": "zero"},
        Tiles(64, programs=2),
        BackwardTiles(programs=2, divided=True, v_stages=1),
    ),
    "wide, three times": (
        (1, 130, 200, 2, 1, 32, 32), {}, Tiles(64, programs=2),
        BackwardTiles(64, 64, 3, programs=1, divided=True, v_stages=1),
    ),
    "wide, other values": (
        (2, 130, 300, 4, 2, 192, 128), {"window": (70, 5), "softcap": 5.0},
        Tiles(64, programs=3), BackwardTiles(64, 64, 3, programs=3, divided=True),
    ),
    "blocks of 32": (
        (1, 130, 150, 2, 2, 192, 128), {}, Tiles(64, programs=2),
        BackwardTiles(32, 32, programs=2),
    ),
    "soft cap": (
        (1, 203, 181, 2, 1, 32, 32),
        {"softcap": 2.0, "times": 3, "window": (100, 40), "empty_rows": "zero"},
        Tiles(64, programs=2), BackwardTiles(programs=2),
    ),
    "window, longer than a tile and a block": (
        (1, 420, 448, 2, 1, 32, 32), {"window": (300, 0)}, Tiles(64, 3, 3, 2, False),
        BackwardTiles(programs=2),
    ),
    "window, in turns": (
        (1, 420, 448, 2, 1, 32, 32), {"window": (90, 3)}, Tiles(64, 2, 3, 2),
        BackwardTiles(programs=2),
    ),
    "window, beyond the keys": (
        (1, 500, 130, 2, 2, 32, 32), {"window": (20, 10), "empty_rows": "zero"},
        Tiles(64, 3, 3, 2, False), BackwardTiles(programs=2),
    ),
    "window, no end": (
        (1, 400, 384, 1, 1, 32, 32), {"window": (100, None), "shift": 40,
         "empty_rows": "mean"}, Tiles(64, 3, 3, 2, False), BackwardTiles(programs=2),
    ),
    "prefix": (
        (3, 260, 300, 2, 1, 32, 32), {"window": CAUSAL, "prefix": (0, 100, 400)},
        Tiles(64, 2, 2, 2), BackwardTiles(programs=2),
    ),
    "prefix, lengths and offsets": (
        (4, 203, 260, 2, 2, 32, 32), {"window": (None, -3), "prefix": (150, 70, 0, 5),
         "kv_lengths": (120, 260, 0, 200), "offset": (-70, 30, 140, -300),
         "empty_rows": "mean"}, Tiles(64, 2, 3, 2), BackwardTiles(64, 64, 3, 3, 2),
    ),
    "prefix, claimed": (
        (2, 260, 260, 2, 1, 32, 32), {"window": CAUSAL, "prefix": (33, 190)},
        Tiles(64, 3, 2, 2, False, claimed=True),
        BackwardTiles(64, 64, programs=2, claimed=True),
    ),
    "causal lengths, in turns": (
        (3, 260, 400, 1, 1, 32, 32), {"window": CAUSAL, "kv_lengths": (0, 170, 400),
         "offset": (-70, 30, 140), "empty_rows": "zero"}, Tiles(64, 2, 3, 2),
        BackwardTiles(programs=2),
    ),
}  # fmt: skip
for _name in ("odd", "causal, no turns", "soft cap", "window, in turns"):
    *_given, _tiles, _back = SIMULATED[_name]
    SIMULATED[f"{_name}, held"] = (
        *_given, dataclasses.replace(_tiles, held=True), _back,
    )  # fmt: skip
for _name in ("odd", "causal, no turns", "all at once", "wide, other values"):
    *_given, _tiles, _back = SIMULATED[_name]
    SIMULATED[f"{_name}, claimed"] = (
        *_given,
        dataclasses.replace(_tiles, claimed=True),
        dataclasses.replace(_back, claimed=True),
    )


def simulated(
    shape: tuple[int, ...], given: dict[str, Any], tiles: Tiles, back: BackwardTiles
) -> list[float]:
    """Relative errors of the result and of the gradients of q, k and v."""
    times = given.get("times", 1)
    q, k, v, up = (np.asarray(x) for x in operands(shape, "bfloat16", times))
    numbers, params = split(given, shape[5])
    both = {**{n: np.asarray(x) for n, x in numbers.items()}, **params}
    with simulator.simulated():
        out, residuals = forward_kernel.forward(
            q, k, v, residuals=True, config=tiles, **both
        )
        grads = backward_kernel.backward(
            q, k, v, out=out, residuals=residuals, cotangent=up, config=back, **both
        )
    want = exact_gradients(q, k, v, up, **both)
    got = [out, *(grads[x] for x in "qkv")]
    return [error(x, y) for x, y in zip(got, want, strict=True)]


@pytest.mark.once
@pytest.mark.parametrize(
    ("name", "fused"),
    slow.unless(
        lambda name, fused: name in list(SIMULATED)[: 2 if fused else 5],
        itertools.product(SIMULATED, [False, True]),
        several=True,
    ),
)
def test_its_code_run_by_threads(name: str, fused: bool) -> None:
    """Numbers, memory that is handed on, and barriers, with no GPU."""
    shape, given, tiles, back = SIMULATED[name]
    if fused:
        if back.warpgroups != 2 or back.queries != 64 or back.divided:
            pytest.skip("dq is added up by two warpgroups for 64 queries")
        back = dataclasses.replace(back, fused=True)
    assert max(simulated(shape, given, tiles, back)) <= LIMITS["bfloat16"]


@pytest.mark.once
@pytest.mark.parametrize(("h", "e"), [(72, 72), (5, 40)])
def test_heads_of_other_widths_get_zeros(h: int, e: int) -> None:
    """Up to multiples of 16, which are cut off the result and the gradients."""
    shape = (2, 130, 140, 4, 2, h, e)
    q, k, v, up = (np.asarray(x) for x in operands(shape, "bfloat16"))
    given = {"scale": h**-0.5, "window": CAUSAL, "shift": 10}
    with simulator.simulated():
        out, residuals = hopper.forward(q=q, k=k, v=v, residuals=True, **given)
        alone = hopper.forward(q=q, k=k, v=v, **given)
        grads = hopper.backward(
            q=q, k=k, v=v, out=out, residuals=residuals, cotangent=up, **given
        )
    np.testing.assert_array_equal(out, alone)
    want = exact_gradients(q, k, v, up, **given)
    for x, y in zip((out, *(grads[n] for n in "qkv")), want, strict=True):
        assert np.shape(x) == np.shape(y)
        assert error(x, y) <= LIMITS["bfloat16"]


@pytest.mark.parametrize("divided", [False, True])
def test_keys_past_a_length_meet_one_block_of_queries(
    divided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their gradients are zeros, and were computed from all queries before."""
    copied, copy = [], backward_of_keys.OfKeys.copy_block

    def counting(kernel: Any, tile: Any, i: Any, j: Any, step: Any) -> None:
        copied.append((int(tile.first), int(j)))
        copy(kernel, tile, i, j, step)

    monkeypatch.setattr(backward_of_keys.OfKeys, "copy_block", counting)
    back = BackwardTiles(64, 64, programs=0, divided=divided)
    given = {"kv_lengths": (100,)}
    errors = simulated((1, 320, 448, 2, 2, 32, 32), given, Tiles(64), back)
    assert max(errors) <= LIMITS["bfloat16"]
    rows = 64 if divided else 128
    for first in range(0, 448, rows):
        assert copied.count((first, 0)) == 2  # of each head
        others = {j for at, j in copied if at == first and j > 0}
        assert others == (set() if first >= 100 else {1, 2, 3, 4})


@pytest.mark.parametrize("swapped", [("q", "k", "v"), ("k", "v")])
def test_operands_whose_heads_lie_first(swapped: tuple[str, ...]) -> None:
    q, k, v, _ = (
        np.asarray(x) for x in operands((2, 70, 90, 4, 2, 32, 32), "bfloat16")
    )
    given = {"scale": 0.2, "window": CAUSAL, "shift": 20}
    with simulator.simulated():
        plain, first = (
            hopper.forward(q=q, k=k, v=v, **given, **more)
            for more in ({}, {"swapped": swapped})
        )
    np.testing.assert_array_equal(plain, first)
    assert error(first, exact(q, k, v, **given)) <= LIMITS["bfloat16"]


@pytest.mark.parametrize("barrier", ["k_free", "v_free", "q_free"])
def test_the_simulator_sees_memory_that_is_taken_too_early(
    barrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without waiting for it, what is copied next overwrites what is in use."""
    copy = forward_kernel._Block.copy

    def careless(block: Any) -> None:
        named = dict(block.named)
        many = machine.Barriers(len(named[barrier].completed), 1)
        many.completed = [1 << 20] * len(many.completed)
        many.anyway = True
        block.named = {**named, barrier: many}
        copy(block)

    monkeypatch.setattr(forward_kernel._Block, "copy", careless)
    shape, given, tiles, back = SIMULATED["causal, no turns"]
    try:
        errors = simulated(shape, given, tiles, back)
    except machine.Stuck:
        return
    assert errors[0] > 10 * LIMITS["bfloat16"]


@pytest.mark.parametrize("barrier", ["weights_free", "second_free", "done", "both"])
def test_it_sees_what_is_taken_too_early_of_wide_heads(
    barrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever does not wait for it overwrites what is in use."""
    (kind, name) = {
        "weights_free": (backward_of_keys._Weights, "step"),
        "second_free": (backward_of_queries.OfQueries, "copy_block"),
        "done": (backward_of_keys.Divided, "copy"),
        "both": (backward_of_keys._Weights, "store"),
    }[barrier]
    careful = getattr(kind, name)

    def careless(kernel: Any, *given: Any) -> Any:
        many = machine.Barriers(len(kernel.memory[barrier].completed), 1)
        many.completed = [1 << 20] * len(many.completed)
        many.anyway = True
        before = kernel.memory
        kernel.memory = {**before, barrier: many}
        made = careful(kernel, *given)
        kernel.memory = before
        return made

    monkeypatch.setattr(kind, name, careless)
    shape, given, tiles, back = SIMULATED["wide, three times"]
    try:
        errors = simulated(shape, given, tiles, back)
    except machine.Stuck:
        return
    assert max(errors[1:]) > 10 * LIMITS["bfloat16"]
