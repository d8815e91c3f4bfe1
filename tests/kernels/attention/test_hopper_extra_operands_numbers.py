"""Attention on Hopper with more operands: its numbers on such a GPU."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rewriter.kernels.attention import hopper
from rewriter.kernels.attention.hopper.backward_config import BackwardTiles
from rewriter.kernels.attention.hopper.config import Tiles
from rewriter.ops.kernel import spec_of
from rewriter.ops.registry import registry
from tests.kernels.attention.test_hopper import (
    CAUSAL,
    LIMITS,
    error,
    exact,
    needs_hopper,
    operands,
)
from tests.kernels.attention.test_hopper_extra_operands import H200
from tests.kernels.attention.test_hopper_extra_operands_simulated import (
    CASES,
    COLUMNS,
    HIDDEN,
    PASSING,
    TABLES,
    Case,
    check_hidden,
    drawn,
    errors_within_limits,
    wanted,
)
from tests.support.kernels import bits

pytestmark = pytest.mark.once


WIDE: dict[str, Case] = {
    "pairs of a fold": (
        (64, 384, 384, 4, 4, 32, 32),
        {"bias": ((1, 4, 384, 384), "bfloat16"), "mask": (64, 1, 1, 384)},
        None, BackwardTiles(),
    ),
    "pairs, float32": (
        (8, 333, 333, 4, 4, 32, 32),
        {"bias": ((1, 4, 333, 333), "float32"), "mask": (8, 1, 1, 333)},
        None, BackwardTiles(),
    ),
    "wide tables": (
        (2, 300, 500, 4, 2, 128, 128),
        {"bias": ((2, 4, 300, 500), "float32"), "mask": (2, 1, 300, 500)},
        None, BackwardTiles(),
    ),
    "three warpgroups": (
        (2, 300, 500, 4, 2, 64, 64), {"mask": (2, 1, 300, 500), "window": (90, 90)},
        Tiles(64, 2, 3), BackwardTiles(64, 64, 2, 3),
    ),
    "documents by a mask": (
        (2, 1500, 1500, 4, 2, 128, 128), {"near": (2, 4, 1500, 1500)},
        None, BackwardTiles(),
    ),
    "packed": (
        (2, 2500, 2500, 4, 2, 128, 128), {"segments": "packed", "window": CAUSAL},
        None, BackwardTiles(),
    ),
    "window of data": (
        (2, 2500, 2500, 4, 2, 128, 128), {"positions": (600, 5)},
        None, BackwardTiles(),
    ),
    "positions that restart": (
        (2, 700, 900, 4, 2, 64, 64),
        {"positions": (200, 0), "period": 300, "segments": "packed",
         "empty_rows": "zero"},
        None, BackwardTiles(64, 64, 2, claimed=True),
    ),
    "last positions, width of 256": (
        (1, 300, 420, 2, 2, 256, 256), {"positions": (None, 0), "alibi": (2,)},
        None, BackwardTiles(64, 32, divided=True),
    ),
    "slopes": (
        (2, 700, 700, 4, 4, 64, 64), {"alibi": (4,), "window": CAUSAL},
        None, BackwardTiles(64, 128, 2),
    ),
    "slopes, far": (
        (1, 300, 4000, 4, 4, 128, 128), {"alibi": (4,), "shift": 3700},
        None, BackwardTiles(),
    ),
    "sinks": (
        (2, 700, 700, 8, 2, 64, 64), {"sinks": (8,), "window": (127, 0)},
        None, BackwardTiles(64, 128, 3),
    ),
    "soft cap": (
        (2, 300, 300, 2, 2, 64, 64),
        {"bias": ((2, 1, 300, 300), "bfloat16"), "softcap": 4.0, "sinks": (2,)},
        None, BackwardTiles(),
    ),
    "width of 256, segments and slopes": (
        (2, 700, 700, 4, 2, 256, 256),
        {"segments": "packed", "alibi": (4,), "window": CAUSAL},
        None, BackwardTiles(64, 32, divided=True),
    ),
    "width of 256, bias and mask": (
        (2, 300, 300, 4, 2, 256, 256),
        {"bias": ((2, 1, 300, 300), "float32"), "mask": (1, 4, 300, 300),
         "softcap": 5.0, "empty_rows": "zero"},
        None, BackwardTiles(32, 32, divided=True, v_stages=1),
    ),
    "width of 192, values of 128": (
        (2, 500, 400, 4, 4, 192, 128),
        {"bias": ((1, 4, 500, 400), "bfloat16"), "sinks": (4,)},
        None, BackwardTiles(64, 64, 2, divided=True),
    ),
    "values of 256": (
        (1, 300, 300, 2, 2, 256, 256), {"segments": "packed", "alibi": (2,)},
        None, BackwardTiles(),
    ),
    "one row": (
        (3, 1, 200, 2, 2, 64, 64), {"bias": ((3, 2, 1, 200), "float32")},
        None, BackwardTiles(),
    ),
    "one key": (
        (3, 200, 1, 2, 2, 64, 64), {"mask": (3, 2, 200, 1), "empty_rows": "zero"},
        None, BackwardTiles(),
    ),
}  # fmt: skip


LARGE_TABLES: dict[str, Case] = {
    "for each, 128 wide": (
        (2, 700, 600, 4, 2, 128, 128),
        {"bias": ((2, 4, 700, 600), "bfloat16"), "softcap": 5.0},
        None, BackwardTiles(),
    ),
    "for a head, 128 wide": (
        (3, 700, 700, 4, 4, 128, 128),
        {"bias": ((1, 4, 700, 700), "float32"), "window": CAUSAL},
        None, BackwardTiles(),
    ),
    "for a head, pairs": (
        (64, 384, 384, 4, 4, 32, 32),
        {"bias": ((1, 4, 384, 384), "bfloat16"), "mask": (64, 1, 1, 384)},
        None, BackwardTiles(64, 128),
    ),
    "for all, 192 wide": (
        (2, 300, 300, 2, 2, 192, 128), {"bias": ((1, 1, 300, 300), "bfloat16")},
        None, BackwardTiles(64, 64, divided=True),
    ),
}  # fmt: skip


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    "name", [*CASES, *WIDE, *TABLES, *LARGE_TABLES, *COLUMNS, *PASSING]
)
def test_numbers_against_float64(name: str) -> None:
    tables = {**TABLES, **LARGE_TABLES}
    every = {**CASES, **WIDE, **COLUMNS, **PASSING, **tables}
    shape, case, tiles, back = every[name]
    back = dataclasses.replace(back, tables=back.tables or name in tables)
    arrays = dict(zip(("q", "k", "v"), operands(shape, "bfloat16"), strict=False))
    up, given = operands(shape, "bfloat16")[3], drawn(case, shape)
    others = {n: jnp.asarray(x) for n, x in given.items() if isinstance(x, np.ndarray)}
    params = {n: x for n, x in given.items() if n not in others}
    its = spec_of(registry().op("attention"), {**arrays, **others}, params)
    assert hopper.supports(its).ok
    tiles = tiles or hopper.default(its, H200)

    @jax.jit
    def run(arrays: Any) -> Any:
        out, kept = hopper.forward(**arrays, **params, residuals=True, config=tiles)
        grads = hopper.backward(
            **arrays, **params, out=out, residuals=kept, cotangent=up, config=back
        )
        return {"out": out, **grads}

    both = {**arrays, **others}
    got, again = run(both), run(both)
    want = wanted(*(np.asarray(x) for x in arrays.values()), np.asarray(up), given)
    assert error(got["out"], np.asarray(want["out"])) <= LIMITS["bfloat16"]
    errors_within_limits(got, want, {**both, **params}, up)
    by_xla = "bias" in others and 1 not in others["bias"].shape[2:]
    others = {"bias"} if by_xla and not back.tables else set()
    others |= {"q"} if back.fused else set()  # added up in no fixed order
    for which in want.keys() - others:
        bits.assert_same(got[which], again[which])  # a race would show as a change


@pytest.mark.gpu
@needs_hopper
def test_what_is_hidden_may_be_anything_there_too() -> None:
    q, k, v, _ = operands((2, 300, 300, 2, 2, 64, 64), "bfloat16")
    seen = np.arange(300) < 170
    bad = k.at[:, 170:].set(jnp.nan)
    run = jax.jit(functools.partial(hopper.forward, scale=0.125))
    want = exact(q, k[:, :170], v[:, :170], scale=0.125)
    for mask in (seen[None, None, None], np.broadcast_to(seen, (1, 2, 300, 300))):
        got = run(q=q, k=bad, v=v, mask=jnp.asarray(mask))
        assert error(got, want) <= LIMITS["bfloat16"]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("name", HIDDEN)
def test_gradients_of_what_is_hidden_are_finite_there_too(name: str) -> None:
    def as_arrays(call: Any, given: dict[str, Any]) -> Any:
        arrays = {n: jnp.asarray(x) for n, x in given.items() if hasattr(x, "shape")}
        params = {n: x for n, x in given.items() if n not in arrays}
        return jax.jit(lambda x: call(**x, **params))(arrays)

    check_hidden(
        name,
        lambda **given: as_arrays(hopper.forward, given),
        lambda residuals, **given: as_arrays(
            lambda lse, **x: hopper.backward(residuals=(lse,), **x),
            {"lse": residuals[0], **given},
        ),
    )
