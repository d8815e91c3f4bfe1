"""Ring attention against float64, devices being an axis of `jax.vmap`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rewriter.kernels.attention import KERNELS, OP
from rewriter.kernels.attention.ring import RING
from rewriter.kernels.attention.ring.passes import merged
from rewriter.kernels.attention.ring.turns import seen, turns
from rewriter.ops.kernel import Spec, spec_of
from tests import slow
from tests.kernels.attention.test_memory_bounded import TOLERANCE, exact
from tests.support.kernels import tpu

pytestmark = pytest.mark.once

KERNEL = next(k for k in KERNELS if k.name == "memory_bounded")
COUNT, PART = 4, 16
CAUSAL, FULL = (None, 0), (None, None)


def operands(dtype: str = "float32", keys: int = PART, **more: Any) -> dict[str, Any]:
    """Queries of four heads, keys of two, for all devices."""
    rng = np.random.default_rng(0)
    t, s = COUNT * PART, COUNT * keys
    shapes = {"q": (2, t, 4, 8), "k": (2, s, 2, 8), "v": (2, s, 2, 12)}
    arrays = {n: rng.standard_normal(x) for n, x in shapes.items()}
    return {**{n: jnp.asarray(x, dtype) for n, x in arrays.items()}, **more}


def split(x: Any, axis: int = 1) -> jax.Array:
    """What each device has, in front."""
    return jnp.stack(jnp.split(x, COUNT, axis))


def joined(x: Any, axis: int = 1) -> jax.Array:
    """The parts of all devices together."""
    return jnp.concatenate(list(x), axis)


def block(given: Mapping[str, Any], params: Mapping[str, Any]) -> Any:
    """One part of the keys, by the memory-bounded kernel."""
    return KERNEL.forward(**given, **params, residuals=True)


def block_backward(given: Any, params: Any, out: Any, lse: Any, cotangent: Any) -> Any:
    """Its gradient, from what is known of all keys."""
    assert KERNEL.backward is not None
    return KERNEL.backward(
        **given, **params, out=out, residuals=(lse,), cotangent=cotangent
    )


def ringed(arrays: Mapping[str, Any], up: Any, params: Mapping[str, Any]) -> Any:
    """The result, the log-sum-exps and the cotangents of a ring."""
    params = {**OP.defaults, **params}
    axes = ("devices",)
    lengths = {n: x for n, x in arrays.items() if n == "kv_lengths"}

    def on_device(given: Any, up: Any) -> Any:
        given = {**given, **lengths}
        out, lse = RING.forward(given, params, axes, COUNT, block)
        grads = RING.backward(given, params, out, lse, up, axes, COUNT, block_backward)
        return out, lse, grads

    parts = {n: split(x) for n, x in arrays.items() if n not in lengths}
    run = jax.jit(jax.vmap(on_device, axis_name=axes[0]))
    out, lse, grads = run(parts, split(up))
    return joined(out), joined(lse, 2), {n: joined(x) for n, x in grads.items()}


def check(
    arrays: dict[str, Any], params: dict[str, Any], dtype: str, loose: float = 1
) -> None:
    """Asserts that result and cotangents are those of attention to all keys."""
    (b, t, n, _), e = arrays["q"].shape, arrays["v"].shape[3]
    up = jnp.asarray(np.random.default_rng(1).standard_normal((b, t, n, e)), dtype)
    out, _, grads = ringed(arrays, up, params)
    want, true = exact(arrays, up, params)
    for got, wanted in ((out, want), *((grads[n], true[n]) for n in "qkv")):
        assert got.dtype == dtype
        limit = loose * TOLERANCE[dtype] * np.nanmax(np.abs(wanted), initial=0)
        got = np.asarray(got, np.float64)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=limit)


def lengths(of: list[int]) -> jax.Array:
    return jax.device_put(np.array(of, np.int32))


SEGMENTS = np.repeat(np.arange(COUNT * PART, dtype=np.int32)[None] // 20, 2, 0)
OTHERS = np.array(SEGMENTS)
OTHERS[1, 30:] = 9
CASES = {
    "full": ({}, {}),
    "no keys, a gradient": (
        {"kv_lengths": lengths([0, 50])}, {"empty_rows": "mean_passing"}
    ),
    "full, more keys": ({"keys": 24}, {}),
    "causal": ({}, {"window": CAUSAL}),
    "strictly causal": ({}, {"window": (None, -1), "empty_rows": "zero"}),
    "strictly causal, a gradient": (
        {}, {"window": (None, -1), "empty_rows": "mean_passing"}
    ),
    "strictly causal, a mean": ({}, {"window": (None, -1), "empty_rows": "mean"}),
    "window within two parts": ({}, {"window": (20, 0)}),
    "window of both sides": ({}, {"window": (9, 21)}),
    "wide window": ({}, {"window": (40, 30), "softcap": 2.0}),
    "only later keys": ({}, {"window": (0, None)}),
    "shifted": ({}, {"window": CAUSAL, "shift": 5}),
    "lengths": ({"kv_lengths": lengths([23, 1])}, {"window": CAUSAL}),
    "no keys in one sequence": (
        {"kv_lengths": lengths([0, 64])}, {"empty_rows": "zero"}
    ),
    "no keys, a mean": ({"kv_lengths": lengths([0, 50])}, {"empty_rows": "mean"}),
    "no keys, not a number": ({"kv_lengths": lengths([0, 50])}, {}),
    "no keys, a gradient that is none": (
        {"kv_lengths": lengths([0, 50])}, {"empty_rows": "nan_passing"}
    ),
    "no keys, zero with a gradient that is none": (
        {"kv_lengths": lengths([0, 50])}, {"empty_rows": "zero_nan_passing"}
    ),
    "segments": (
        {
            "q_segments": jax.device_put(SEGMENTS),
            "kv_segments": jax.device_put(OTHERS),
        },
        {"window": CAUSAL, "empty_rows": "mean"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", slow.first(5, CASES))
def test_all_keys_are_attended_to(case: str) -> None:
    more, params = CASES[case]
    check(operands(**more), {"scale": 0.3, **params}, "float32")


def test_parts_are_merged_in_float32() -> None:
    check(operands("bfloat16"), {"scale": 0.3, "window": CAUSAL}, "bfloat16")


def test_large_scores_neither_overflow_nor_vanish() -> None:
    arrays = operands()
    arrays["q"] = arrays["q"] * jnp.where(jnp.arange(64) % 2, 100, 1.0)[:, None, None]
    # Scores of a thousand have an error of 1e-4 in float32.
    check(arrays, {"window": CAUSAL}, "float32", loose=10)


def test_what_kernels_for_tpus_save_of_parts_is_merged() -> None:
    """One half of the keys, then the other; gradients from what is known of both."""
    tpu_kernel = next(k for k in KERNELS if k.name == "mosaic_tpu")
    assert tpu_kernel.merges
    assert tpu_kernel.backward is not None
    rng = np.random.default_rng(2)
    arrays = {
        n: jnp.asarray(rng.standard_normal((1, 256, 2, 64)), "float32") for n in "qkv"
    }
    up = jnp.asarray(rng.standard_normal((1, 256, 2, 64)), "float32")
    want, true = exact(arrays, up, {"window": CAUSAL})
    halves = [
        ({"window": CAUSAL, "shift": shift, "empty_rows": "zero"}, keys)
        for shift, keys in ((0, slice(0, 128)), (-128, slice(128, 256)))
    ]
    parts = [
        ({**arrays, **{n: arrays[n][:, keys] for n in "kv"}}, {**OP.defaults, **params})
        for params, keys in halves
    ]
    with tpu.interpreted():
        found = [tpu_kernel.forward(**x, **p, residuals=True) for x, p in parts]
        shape = found[0][1][0].shape
        out, lse = merged(*((o, kept.reshape(1, 2, 256)) for o, (kept,) in found))
        grads = [
            tpu_kernel.backward(
                **x, **p, out=out, residuals=(lse.reshape(shape),), cotangent=up
            )
            for x, p in parts
        ]
    joint = {n: joined([g[n] for g in grads]) for n in "kv"}
    joint["q"] = grads[0]["q"] + grads[1]["q"]
    for got, wanted in ((out, want), *((joint[n], true[n]) for n in "qkv")):
        np.testing.assert_allclose(
            got, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max()
        )


# ---------------------------------------------------------------------- turns
@pytest.mark.parametrize(
    "window", [(a, b) for a in (None, 0, 3, 9) for b in (None, -2, 0, 6)]
)
@pytest.mark.parametrize("shift", [0, 2, -7])
def test_turns_are_those_in_which_something_is_seen(window: Any, shift: int) -> None:
    size, count = 4, 5
    found = {t.distance: t for t in turns(window, shift, size, count)}
    at = np.arange(size * count)
    relative = at[None] - at[:, None] - shift
    left, right = window
    keep = relative >= -(10**9 if left is None else left)
    keep &= relative <= (10**9 if right is None else right)
    for query in range(count):
        for key in range(count):
            part = keep[query * size :, key * size :][:size, :size]
            turn = found.get((query - key) % count)
            own = turn and (turn.before if query >= key else turn.around)
            assert bool(own) == part.any()
            if own:
                relative = np.arange(size)[None] - np.arange(size)[:, None] - own.shift
                its = relative >= -(10**9 if own.window[0] is None else own.window[0])
                its &= relative <= (10**9 if own.window[1] is None else own.window[1])
                assert (its == part).all()


def test_parts_of_which_all_is_seen_need_no_mask() -> None:
    assert seen(CAUSAL, 4, 4).window == FULL  # type: ignore[union-attr]
    assert seen(CAUSAL, 3, 4).window == FULL  # type: ignore[union-attr]
    assert seen(CAUSAL, 2, 4).window == CAUSAL  # type: ignore[union-attr]


def test_a_window_ends_the_ring() -> None:
    assert [t.distance for t in turns((5, 0), 0, 4, 8)] == [0, 1, 2]
    assert [t.distance for t in turns((5, 5), 0, 4, 8)] == [0, 1, 2, 6, 7]


# -------------------------------------------------------------------- refusals
def part(keys: int = PART, more: Any = (), **params: Any) -> Spec:
    """What one device sees."""
    arrays = {
        n: x[:, : (PART if n == "q" else keys)] for n, x in operands(keys=keys).items()
    }
    return spec_of(OP, {**arrays, **dict(more)}, params)


def symbolic() -> Spec:
    """What one device sees of any number of sequences."""
    (b,) = jax.export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((b, PART, 2, 8), jnp.float32)
    return spec_of(OP, {"q": x, "k": x, "v": x}, {})


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (part(more={"bias": jnp.zeros((1, 1, 1, 1))}), "a ring does not take bias"),
        (part(more={"offset": jnp.zeros(1, int)}, window=CAUSAL), "not take offset"),
        (part(keys=24, window=CAUSAL), "16 queries and 24 keys"),
        (part(window=(None, -16)), "hides each device's own keys"),
        (symbolic(), "some are symbolic"),
    ],
)  # fmt: skip
def test_refused(spec: Spec, why: str) -> None:
    verdict = RING.supports(spec, COUNT)
    assert not verdict.ok
    assert why in "; ".join(r.text for r in verdict.reasons)


@pytest.mark.parametrize(
    "spec",
    [
        part(),
        part(keys=24),
        part(window=CAUSAL),
        part(window=CAUSAL, shift=3),
        part(window=(None, -1)),
        part(more={"kv_lengths": jnp.ones(1, int)}),
    ],
)
def test_taken(spec: Spec) -> None:
    assert RING.supports(spec, COUNT).ok


def test_few_keys_are_gathered_and_those_of_few_queries_for_gradients() -> None:
    def pays(t: int, n: int, count: int, kept: int, window: Any = FULL) -> str:
        keys = jax.ShapeDtypeStruct((1, t, 8, 128), jnp.bfloat16)
        q = jax.ShapeDtypeStruct((1, t, n, 128), jnp.bfloat16)
        spec = spec_of(OP, {"q": q, "k": keys, "v": keys}, {"window": window})
        return "; ".join(r.text for r in RING.pays(spec, count, kept).reasons)

    assert not pays(2048, 8, 8, 0)  # 64 MiB
    assert pays(1024, 8, 8, 0) == (
        "keys and values of 32768 KiB gathered on each device are few"
    )
    assert "32768 KiB" in pays(2048, 8, 4, 1)
    assert not pays(2048, 8, 4, 2)  # in two layers
    assert not pays(1024, 8, 16, 0)
    assert "it moves 1.5 times" in pays(1024, 8, 16, 1)
    assert "1024 queries a device are too few" in pays(1024, 8, 16, 1)
    assert not pays(1024, 16, 16, 1)  # two of which read each key
    assert not pays(1024, 8, 16, 1, (4096, 0))  # to a quarter of the devices
