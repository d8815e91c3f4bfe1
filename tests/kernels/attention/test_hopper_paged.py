"""Paged attention on Hopper: what it takes, its code on a simulator, its numbers."""

# ruff: noqa: E501  (one case per line reads best)

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.choose.choose import choose
from rewriter.config import Config
from rewriter.kernels.attention import PAGED
from rewriter.kernels.attention.hopper_decode import Split
from rewriter.kernels.attention.hopper_decode import paged as hopper
from rewriter.kernels.attention.pages import AXES
from rewriter.ops import device
from rewriter.ops.kernel import Spec, worth_measuring
from rewriter.ops.registry import registry
from tests import slow
from tests.kernels.attention.test_hopper import H200, LIMITS, error, needs_hopper
from tests.kernels.attention.test_tpu_paged import MASK, arguments, decode, spec
from tests.support.kernels import bits, simulator
from tests.support.kernels.float64 import float64

pytestmark = pytest.mark.once

KERNELS = registry().kernels(PAGED.name)
KERNEL = hopper.KERNEL


# ---------------------------------------------------------------- what it takes
@pytest.mark.parametrize(
    ("given", "why"),
    [
        (spec(dtype="float32"), "16-bit float, not float32"),
        (spec(more=MASK), "does not take mask"),
        (spec(t=17), "68 queries of a key head"),
        (spec(size=12), "pages of 12 keys, not a multiple of 8"),
        (spec(size=264), "pages of 264 keys do not divide into blocks"),
        (spec(b=0), "known sizes above 0"),
    ],
)
def test_what_it_refuses(given: Spec, why: str) -> None:
    verdict = hopper.supports(given)
    assert not verdict.ok
    assert any(why in reason.text for reason in verdict.reasons), verdict


@pytest.mark.parametrize("size", [8, 16, 24, 32, 40, 64, 128, 256, 1024])
def test_pages_that_it_takes(size: int) -> None:
    given = spec(size=size)
    assert hopper.supports(given).ok, hopper.supports(given)
    found, _ = worth_measuring(KERNEL.space, given, H200, 24)
    assert found[0] == hopper.default(given, H200)
    for c in found:
        assert c.block_kv % size == 0 or size % c.block_kv == 0
    wrong = hopper.fits(Split(48), spec(size=64), H200)
    assert "48 keys and pages of 64 do not divide" in wrong.reasons[0].text


@pytest.mark.parametrize(
    ("target", "pages", "wins"),
    [("h200", 64, True), ("h200", 1, False), ("a100", 64, False)],
)
def test_it_is_chosen_on_hopper_gpus(target: str, pages: int, wins: bool) -> None:
    """From so many keys on that it was measured."""
    given, on = spec(size=64, p=pages), device.named(target)
    found = choose(given, Config(tune="off"), KERNELS, on, 0)
    assert (found.kernel == "hopper_decode") == wins


# ------------------------------------------------------------------------- numbers
def operands(
    b: int = 3, t: int = 1, n: int = 8, k: int = 2, h: int = 32, e: int = 32,
    size: int = 16, p: int = 5, heads_axis: int = 2, dtype: str = "bfloat16",
    **numbers: Any,
) -> dict[str, Any]:  # fmt: skip
    """Pages in no order, of a pool twice as large."""
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = {"p": 2 * b * p, "z": size, "k": k}
    made = {"q": jax.random.normal(keys[0], (b, t, n, h), dtype)}
    for name, width, key in (("k_pages", h, keys[1]), ("v_pages", e, keys[2])):
        shape = [{**sizes, "h": width}[x] for x in AXES[heads_axis]]
        made[name] = jax.random.normal(key, shape, dtype)
    pages = jax.random.permutation(keys[3], 2 * b * p)[: b * p].reshape(b, p)
    return {**made, "table": pages, **{x: jnp.asarray(a) for x, a in numbers.items()}}


def exact(given: dict[str, Any], params: dict[str, Any]) -> np.ndarray:
    """The formula in float64."""
    with float64():
        wide = {
            n: jnp.asarray(
                x, np.float64 if jnp.issubdtype(x.dtype, np.floating) else None
            )
            for n, x in given.items()
        }
        return np.asarray(PAGED.reference(**wide, **params))


Case = tuple[dict[str, Any], dict[str, Any], Split]
SIMULATED: dict[str, Case] = {
    "heads third": ({"kv_lengths": (80, 33, 1)}, {}, Split(32, 3, 2, 3)),
    "heads first, parts of pages": (
        {"size": 64, "p": 2, "heads_axis": 0, "kv_lengths": (128, 70, 5)}, {},
        Split(32, 2, 2, 2),
    ),
    "heads second, pages of 8": (
        {"size": 8, "heads_axis": 1, "b": 2, "kv_lengths": (39, 0)},
        {"empty_rows": "zero"}, Split(64, 2, 1, 2),
    ),
    "pages of 24": ({"size": 24, "p": 3}, {}, Split(48, 2, 1, 2)),
    "several queries, causal": (
        {"t": 3, "offset": (10, 77, -2)}, {"window": (30, 0), "empty_rows": "mean"},
        Split(32, 2, 2, 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", slow.first(3, SIMULATED))
def test_its_code_run_by_threads(name: str) -> None:
    sizes, params, config = SIMULATED[name]
    params = {"scale": 0.3, "heads_axis": sizes.get("heads_axis", 2), **params}
    given = operands(**sizes)
    got = simulated(given, params, config)
    assert error(got, exact(given, params)) <= LIMITS["bfloat16"]


def simulated(given: dict[str, Any], params: dict[str, Any], config: Split) -> Any:
    arrays = {n: np.asarray(x) for n, x in given.items()}
    with simulator.simulated_decode():
        return hopper._forward(**arrays, **params, config=config)


def test_pages_that_are_not_seen_are_not_read() -> None:
    """NaN on them does not spoil a result, wherever the table points behind a length."""
    given = operands(kv_lengths=(32, 80, 16))
    seen = given["table"][
        jnp.array([0, 0, 1, 1, 1, 1, 1, 2]), jnp.array([0, 1, 0, 1, 2, 3, 4, 0])
    ]
    clean = exact(given, {})
    for name in ("k_pages", "v_pages"):
        there = given[name].at[seen].get()
        given[name] = jnp.full_like(given[name], jnp.nan).at[seen].set(there)
    got = simulated(given, {}, Split(64, 2, 1, 2))
    assert error(got, clean) <= LIMITS["bfloat16"]


def test_numbers_of_pages_that_wrap_and_that_are_beyond() -> None:
    given = operands(b=3, size=16, p=2)
    count = given["k_pages"].shape[0]
    given["table"] = given["table"].at[0, 1].add(-count).at[1, 0].set(count + 7)
    for fills in (False, True):
        params = {"fills": fills, "scale": 0.2}
        got = simulated(given, params, Split(32, 2, 1, 2))
        assert error(got, exact(given, params)) <= LIMITS["bfloat16"]
        assert np.isnan(np.asarray(got, np.float32)).any() == fills


# --------------------------------------------------------- in programs, anywhere
FORCED = {"paged_attention": "hopper_decode"}


@pytest.mark.parametrize("heads_axis", [0, 1, 2])
def test_it_is_lowered_without_a_gpu(heads_axis: int) -> None:
    given = jax.eval_shape(
        lambda: operands(heads_axis=heads_axis, kv_lengths=(1, 2, 3), h=128, e=64)
    )
    run = lambda x: hopper.forward(**x, heads_axis=heads_axis)
    text = jax.export.export(jax.jit(run), platforms=["cuda"])(given).mlir_module()
    assert "attention_decode" in text
    # Pools are read where they lie.
    sizes = "x".join(map(str, given["k_pages"].shape))
    assert f"transpose(%arg1) : (tensor<{sizes}" not in text


def test_a_decoding_program_is_exported_with_it() -> None:
    given = spec()
    args = arguments(given)
    fast = rewriter.optimize(decode, implementation=FORCED)
    (site,) = fast.report(*args).sites
    assert site.kernel == "hopper_decode"
    text = jax.export.export(fast, platforms=["cuda"])(*args).mlir_module()
    assert "attention_decode" in text
    plain = jax.export.export(jax.jit(decode), platforms=["cuda"])(*args)
    assert "attention_decode" not in plain.mlir_module()


# ---------------------------------------------------------------- on a Hopper GPU
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Split | None]] = {
    **SIMULATED,
    "pages of 16": ({"b": 4, "n": 32, "k": 8, "h": 128, "e": 128, "p": 100, "kv_lengths": (1600, 1, 801, 64)}, {}, None),
    "pages of 64": ({"b": 4, "n": 32, "k": 8, "h": 128, "e": 128, "p": 30, "size": 64, "heads_axis": 1}, {}, None),
    "pages of 128": ({"b": 4, "n": 32, "k": 4, "h": 128, "e": 128, "p": 20, "size": 128, "heads_axis": 0, "kv_lengths": (2560, 1, 801, 64)}, {}, None),
    "pages of 256, width of 64": ({"b": 4, "n": 64, "k": 8, "h": 64, "e": 64, "p": 10, "size": 256, "kv_lengths": (2560, 1, 801, 64)}, {}, None),
    "width of 256": ({"b": 2, "n": 16, "k": 2, "h": 256, "e": 256, "p": 40}, {}, None),
}  # fmt: skip


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", CASES)
def test_numbers_against_float64(name: str, dtype: str) -> None:
    sizes, params, config = CASES[name]
    params = {"scale": 0.1, "heads_axis": sizes.get("heads_axis", 2), **params}
    given = operands(**sizes, dtype=dtype)
    run = jax.jit(lambda x: hopper.forward(**x, **params, config=config))
    got = run(given)
    assert error(got, exact(given, params)) <= LIMITS[dtype]
    for _ in range(3):  # a race would show as a change
        bits.assert_same(run(given), got)
