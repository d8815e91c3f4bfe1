"""Attention on Hopper whose q, k and v are parts of one array, on the simulator."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from rewriter.kernels.attention import hopper
from rewriter.ops.kernel import Heads
from tests.kernels.attention.test_hopper import CAUSAL, LIMITS, error, exact_gradients
from tests.support.kernels import simulator

PACKINGS: dict[str, tuple[int, tuple[Heads, Heads, Heads]]] = {
    "q, k and v": (6, (Heads(0, 1, 2, 6), Heads(2, 1, 2, 6), Heads(4, 1, 2, 6))),
    "head by head": (6, (Heads(0, 3, 2, 6), Heads(1, 3, 2, 6), Heads(2, 3, 2, 6))),
    "fewer heads of keys": (
        8, (Heads(0, 1, 4, 8), Heads(4, 1, 2, 8), Heads(6, 1, 2, 8)),
    ),
    "by groups": (8, (Heads(0, 1, 4, 8), Heads(4, 2, 2, 8), Heads(5, 2, 2, 8))),
}  # fmt: skip


def drawn(count: int, t: int, h: int) -> tuple[np.ndarray, np.ndarray]:
    """An array of heads, [2, t, count, h], and a cotangent of as many."""
    keys = jax.random.split(jax.random.key(0))
    both = (jax.random.normal(key, (2, t, count, h), "bfloat16") for key in keys)
    whole, up = map(np.asarray, both)
    return whole, up


def both_passes(
    joined: dict[str, Heads] | None = None, **given: Any
) -> list[np.ndarray]:
    """The result and the gradients of q, k and v, cut out of an array if joined."""
    up = given.pop("cotangent")
    with simulator.simulated():
        out, residuals = hopper.forward(**given, residuals=True)
        more = {"out": out, "residuals": residuals, "cotangent": up}
        grads = hopper.backward(
            **given, **more, **({"joined": joined} if joined else {})
        )
    for name, at in (joined or {}).items():
        assert name not in grads
        grads[name] = grads["joined"][:, :, at.indices]
    return [out, *(grads[n] for n in "qkv")]


@pytest.mark.parametrize(
    ("packing", "t", "h", "more"),
    [
        ("q, k and v", 128, 32, {"window": CAUSAL}),
        ("head by head", 101, 64, {}),
        ("fewer heads of keys", 72, 72, {"window": (30, 0)}),
        ("by groups", 64, 128, {"kv_lengths": (40, 0), "empty_rows": "mean_passing"}),
    ],
)
def test_heads_are_read_where_they_lie(
    packing: str, t: int, h: int, more: dict[str, Any]
) -> None:
    """Bit for bit what separate operands give, which must not be read.

    Gradients are written into one array likewise.
    """
    count, places = PACKINGS[packing]
    whole, up = drawn(count, t, h)
    cut = {n: whole[:, :, at.indices] for n, at in zip("qkv", places, strict=True)}
    given = {"scale": h**-0.5, **more, "cotangent": up[:, :, : places[0].count]}
    if "kv_lengths" in given:
        given["kv_lengths"] = np.asarray(given["kv_lengths"], np.int32)
    apart = both_passes(**cut, **given)
    packed = {n: (whole, at) for n, at in zip("qkv", places, strict=True)}
    unread = {n: np.full_like(x, np.nan) for n, x in cut.items()}
    joined = dict(zip("qkv", places, strict=True))
    together = both_passes(joined, **unread, packed=packed, **given)
    for x, y in zip(apart, together, strict=True):
        np.testing.assert_array_equal(
            np.asarray(x, np.float32), np.asarray(y, np.float32)
        )
    up = given.pop("cotangent")
    want = exact_gradients(cut["q"], cut["k"], cut["v"], up, **given)
    for x, y in zip(together, want, strict=True):
        assert error(x, y) <= LIMITS["bfloat16"]


def test_padded_heads_are_cut_out() -> None:
    """Heads of 20 are no multiple of 8, and copied to wider ones: not in place."""
    whole, _ = drawn(6, 40, 20)
    _, places = PACKINGS["q, k and v"]
    cut = {n: whole[:, :, at.indices] for n, at in zip("qkv", places, strict=True)}
    packed = {n: (whole * np.nan, at) for n, at in zip("qkv", places, strict=True)}
    with simulator.simulated():
        plain = hopper.forward(**cut, scale=0.2)
        given = hopper.forward(**cut, scale=0.2, packed=packed)
    assert plain.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(plain, given)


def test_some_gradients_lie_in_one_array() -> None:
    """Those of keys and values alone, or of any two."""
    q, up = drawn(2, 72, 32)
    k, v = drawn(2, 72, 32)
    given = {"q": q, "k": k, "v": v, "scale": 0.2, "cotangent": up}
    apart = both_passes(**given)
    first, second = Heads(0, 2, 2, 4), Heads(1, 2, 2, 4)
    for pair in ("kv", "qv"):
        got = both_passes(dict(zip(pair, (first, second), strict=True)), **given)
        for x, y in zip(apart, got, strict=True):
            np.testing.assert_array_equal(
                np.asarray(x, np.float32), np.asarray(y, np.float32)
            )
