"""Attention to a latent cache on Hopper: what it takes, its code, its numbers."""

# ruff: noqa: E501  (one case per line reads best)

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.attention import hopper_latent
from rewriter.kernels.attention.hopper_latent import Programs, decode, kernel
from rewriter.kernels.attention.hopper_latent.config import fits_widths
from rewriter.ops.kernel import Spec, spec_of
from rewriter.ops.registry import registry
from tests import slow
from tests.kernels.attention.test_hopper import (
    CAUSAL,
    LIMITS,
    error,
    exact,
    needs_hopper,
)
from tests.support.kernels import bits, simulator
from tests.support.kernels.simulated_gpu import machine

pytestmark = pytest.mark.once

BF16 = jnp.bfloat16


# ---------------------------------------------------------------- what it takes
def spec(
    t: int = 1, s: int = 4096, n: int = 128, c: int = 512, r: int = 64,
    dtype: Any = BF16, more: tuple[str, ...] = (), whole: bool = False, **params: Any,
) -> Spec:  # fmt: skip
    shapes = {"q": (8, t, n, c), "latent": (8, s, c + r * whole)}
    shapes |= {"q_rope": (8, t, n, r)} if r else {}
    shapes |= {"k_rope": (8, s, r)} if r and not whole else {}
    given = {x: jax.ShapeDtypeStruct(shape, dtype) for x, shape in shapes.items()}
    given |= {x: jax.ShapeDtypeStruct((8,), jnp.int32) for x in more}
    return spec_of(registry().op("latent_attention"), given, params)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (spec(dtype=jnp.float32), "16-bit float, not float32"),
        (spec(more=("prefix",)), "does not take prefix"),
        (spec(c=448), "a latent of 448 columns"),
        (spec(r=24), "24 rotary columns, not a multiple of 16"),
        (spec(r=128), "KiB of shared memory of 227 KiB"),
        (spec(t=9), "1152 query rows of a sequence, more than 1024"),
        (spec(s=0), "sizes above 0"),
        (spec(s=1 << 28), "keys of all sequences, more than"),
        (spec(scale=0.0), "scale is 0.0, not positive"),
        (spec(softcap=3.0), "no kernel for softcap 3.0"),
        (spec(window=(5, 0)), "a window that hides the first keys"),
        (spec(empty_rows="mean_passing"), "gradients pass through rows without keys"),
    ],
)
def test_what_it_refuses(given: Spec, why: str) -> None:
    verdict = hopper_latent.supports(given)
    assert not verdict.ok
    assert any(why in reason.text for reason in verdict.reasons), verdict


@pytest.mark.parametrize(
    "given",
    [
        spec(), spec(whole=True), spec(t=2, window=CAUSAL, more=("offset",)),
        spec(n=16, more=("kv_lengths",)), spec(n=40, c=256, r=32), spec(r=0),
        spec(dtype=jnp.float16, s=77),
    ],
)  # fmt: skip
def test_what_it_takes(given: Spec) -> None:
    assert hopper_latent.supports(given).ok, hopper_latent.supports(given)


def test_widths_that_fit() -> None:
    fit = lambda c, r: fits_widths(c, r).ok
    assert [fit(512, r) for r in (0, 32, 64, 80)] == [True, True, True, False]
    assert fit(256, 128)


# ------------------------------------------------------- on a simulator of threads
Case = tuple[tuple[int, ...], int, dict[str, Any]]
SIMULATED: dict[str, Case] = {  # b, t, s, n, c, r; programs; params, operands, layout
    "several groups": (
        (2, 3, 320, 40, 256, 32), 5, {"window": CAUSAL, "offset": (100, 280)},
    ),
    "lengths": ((2, 1, 300, 8, 128, 64), 3, {"kv_lengths": (300, 77)}),
    "zero": ((2, 1, 300, 8, 128, 64), 2, {"kv_lengths": (0, 300), "empty_rows": "zero"}),
    "mean, one array": (
        (3, 1, 200, 8, 128, 32), 5,
        {"kv_lengths": (0, 1, 131), "empty_rows": "mean", "whole": True},
    ),
    "no rotary keys": ((2, 2, 256, 8, 128, 0), 1, {"window": CAUSAL, "shift": 254}),
    "small pages": ((2, 1, 256, 8, 128, 64), 3, {"pages": 16, "kv_lengths": (17, 256)}),
    "pages, one array": (
        (2, 1, 256, 8, 128, 64), 3,
        {"pages": 128, "whole": True, "kv_lengths": (17, 256), "times": 10},
    ),
    "one key": ((1, 1, 1, 8, 128, 64), 132, {}),
    "before the first key": (
        (2, 2, 130, 4, 128, 64), 3,
        {"window": CAUSAL, "offset": (-2, 100), "empty_rows": "mean"},
    ),
    "nan": ((2, 1, 130, 4, 128, 64), 3, {"kv_lengths": (0, 130)}),
}  # fmt: skip


def arrays(shape: tuple[int, ...], given: dict[str, Any], dtype: Any = BF16) -> Any:
    """Operands of `decode.attend`, those of the reference, and what both take."""
    (b, t, s, n, c, r), given = shape, dict(given)
    times, pages = given.pop("times", 1), given.pop("pages", 0)
    whole, draw = given.pop("whole", False), np.random.default_rng(0)
    normal = lambda *sizes: np.asarray(
        jnp.asarray(draw.normal(size=sizes) * times, dtype)
    )
    q, k = normal(b, t, n, c + r), normal(b, s, c + r)
    for name in ("kv_lengths", "offset"):
        if name in given:
            given[name] = np.asarray(given[name], np.int32)
    given["scale"] = (c + r) ** -0.5
    plain = {"q": q, "k": k[:, :, None], "v": k[:, :, None, :c]}
    own = {
        "q": q[..., :c], "q_rope": q[..., c:] if r else None,
        "latent": k if whole else k[..., :c],
        "k_rope": None if whole or not r else k[..., c:],
    }  # fmt: skip
    if pages:
        count = b * s // pages
        table = draw.permutation(count).astype(np.int32).reshape(b, -1)
        for name in ("latent", "k_rope"):
            if own[name] is not None:
                pool = np.empty((count, pages, own[name].shape[-1]), q.dtype)
                pool[table.reshape(-1)] = own[name].reshape(count, pages, -1)
                own[name] = pool
        own["table"] = table
    own = {n: x if x is None else np.ascontiguousarray(x) for n, x in own.items()}
    return own, plain, given


def simulated(name: str) -> float:
    """The relative error of the result."""
    shape, programs, given = SIMULATED[name]
    own, plain, more = arrays(shape, given)
    with simulator.simulated_decode():
        out = decode.attend(config=Programs(programs), **own, **more)
    return error(out, exact(*plain.values(), **more))


@pytest.mark.parametrize("name", slow.first(4, SIMULATED))
def test_its_code_run_by_threads(name: str) -> None:
    """Numbers, memory that is handed on, and barriers, with no GPU."""
    assert simulated(name) <= LIMITS["bfloat16"]


@pytest.mark.parametrize(
    ("barrier", "name"),
    [("early_free", "lengths"), ("late_free", "lengths"), ("q_free", "several groups")],
)
def test_the_simulator_sees_memory_that_is_taken_too_early(
    barrier: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without waiting for it, what is copied next overwrites what is in use."""
    copy = kernel._Block.copy

    def careless(block: Any) -> None:
        many = machine.Barriers(len(block.x[barrier].completed), 1)
        many.anyway = True
        block.x = {**block.x, barrier: many}
        copy(block)

    monkeypatch.setattr(kernel._Block, "copy", careless)
    try:
        found = simulated(name)
    except machine.Stuck:
        return
    assert found > 10 * LIMITS["bfloat16"]


def test_what_is_not_seen_is_not_read() -> None:
    """NaN in blocks behind a sequence's length does not spoil its result."""
    own, plain, more = arrays((2, 1, 256, 4, 128, 64), {"kv_lengths": (128, 192)})
    clean = exact(*plain.values(), **more)
    for name in ("latent", "k_rope"):
        own[name][0, 192:], own[name][1, 256:] = np.nan, np.nan
    with simulator.simulated_decode():
        got = decode.attend(config=Programs(3), **own, **more)
    assert error(got, clean) <= LIMITS["bfloat16"]


# --------------------------------------------------------- in programs, anywhere
LOWERED: dict[str, Case] = {
    "two arrays": ((64, 1, 4096, 128, 512, 64), 132, {"kv_lengths": (1,) * 64}),
    "one array": ((64, 1, 4096, 128, 512, 64), 132, {"whole": True}),
    "pages": (
        (4, 2, 1024, 128, 512, 64),
        132,
        {"pages": 64, "window": CAUSAL, "offset": (0,) * 4},
    ),
    "mean": SIMULATED["mean, one array"],
}


@pytest.mark.parametrize("name", slow.first(1, LOWERED))
def test_it_is_lowered_without_a_gpu(name: str) -> None:
    (b, t, s, n, c, r), programs, given = LOWERED[name]
    own, _, more = arrays((b, t, 64, n, c, r), {**given, "pages": 0})
    own = {n: x for n, x in own.items() if x is not None}
    long = lambda x: jax.ShapeDtypeStruct((b, s, x.shape[2]), x.dtype)
    own = {n: long(x) if n in ("latent", "k_rope") else x for n, x in own.items()}
    if size := given.get("pages"):
        for name in own.keys() & {"latent", "k_rope"}:
            x = own[name]
            own[name] = jax.ShapeDtypeStruct((b * s // size, size, x.shape[2]), x.dtype)
        own["table"] = jax.ShapeDtypeStruct((b, s // size), jnp.int32)
    empty = {n: own.pop(n, None) for n in ("q_rope", "k_rope") if n not in own}
    config = Programs(programs)
    run = lambda own: decode.attend(config=config, **empty, **own, **more)
    exported = jax.export.export(jax.jit(run), platforms=["cuda"])(own)
    assert exported.out_avals[0].shape == (b, t, n, c)
    text = exported.mlir_module()
    assert text.count("mosaic_gpu_v2") == 2
    assert "latent_attention" in text


def step(q, q_rope, latent, k_rope, lengths):
    """A step of decoding with absorbed weights, as models write it."""
    s = jnp.einsum("bthc,bsc->bhts", q, latent)
    s += jnp.einsum("bthr,bsr->bhts", q_rope, k_rope)
    keep = jnp.arange(s.shape[-1]) < lengths[:, None, None, None]
    s = jnp.where(keep, s.astype(jnp.float32) * 192**-0.5, -jnp.inf)
    return jnp.einsum("bhts,bsc->bthc", jax.nn.softmax(s).astype(q.dtype), latent)


FORCED = {"latent_attention": "hopper_latent"}


def test_a_decoding_program_is_exported_with_it() -> None:
    shape = lambda *x: jax.ShapeDtypeStruct(x, BF16)
    args = (
        shape(2, 1, 16, 256), shape(2, 1, 16, 32), shape(2, 256, 256),
        shape(2, 256, 32), jax.ShapeDtypeStruct((2,), jnp.int32),
    )  # fmt: skip
    fast = rewriter.optimize(step, implementation=FORCED)
    (site,) = fast.report(*args).sites
    assert (site.form, site.kernel) == ("latent_attention", "hopper_latent")
    text = jax.export.export(fast, platforms=["cuda"])(*args).mlir_module()
    assert text.count("mosaic_gpu_v2") == 2


def paged_step(q, q_rope, pool, table, lengths):
    b, count = table.shape
    cache = pool[table].reshape(b, count * pool.shape[1], -1)
    latent, k_rope = jnp.split(cache, [q.shape[-1]], -1)
    return step(q, q_rope, latent, k_rope, lengths)


def test_a_program_with_pages_is_exported_with_it() -> None:
    shape = lambda *x: jax.ShapeDtypeStruct(x, BF16)
    args = (
        shape(2, 1, 16, 256), shape(2, 1, 16, 64), shape(12, 64, 320),
        jax.ShapeDtypeStruct((2, 5), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32),
    )  # fmt: skip
    forced = {"paged_latent_attention": "hopper_latent"}
    fast = rewriter.optimize(paged_step, implementation=forced)
    (site,) = fast.report(*args).sites
    assert (site.form, site.kernel) == ("paged_latent_attention", "hopper_latent")
    text = jax.export.export(fast, platforms=["cuda"])(*args).mlir_module()
    assert text.count("mosaic_gpu_v2") == 2
    sites = rewriter.explain(paged_step, target="h100", tune="off")(
        shape(64, 1, 128, 512), shape(64, 1, 128, 64), shape(4096, 64, 576),
        jax.ShapeDtypeStruct((64, 64), jnp.int32),
        jax.ShapeDtypeStruct((64,), jnp.int32),
    ).sites  # fmt: skip
    site = next(s for s in sites if s.op == "attention")
    assert (site.form, site.kernel) == ("paged_latent_attention", "hopper_latent")


# ---------------------------------------------------------------- on a Hopper GPU
CASES: dict[str, Case] = {
    **SIMULATED,
    "heads of V3": (
        (4, 1, 4096, 128, 512, 64),
        132,
        {"kv_lengths": (1, 4096, 77, 1024)},
    ),
    "one array": (
        (4, 1, 4096, 128, 512, 64),
        132,
        {"kv_lengths": (1, 4096, 77, 1024), "whole": True},
    ),
    "pages": (
        (4, 1, 4096, 128, 512, 64),
        132,
        {"kv_lengths": (1, 4096, 77, 1024), "pages": 64},
    ),
    "two queries": (
        (3, 2, 1111, 128, 512, 64),
        132,
        {"window": CAUSAL, "offset": (0, 500, 1107)},
    ),
    "many sequences": (
        (128, 1, 512, 16, 512, 64),
        132,
        {"kv_lengths": tuple(range(1, 513, 4))},
    ),
    "heads of MiniCPM3": ((3, 1, 3000, 40, 256, 32), 132, {}),
    "large scores": ((2, 1, 900, 128, 512, 64), 132, {"times": 5}),
}


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", CASES)
def test_numbers_against_float64(name: str, dtype: str) -> None:
    shape, programs, given = CASES[name]
    own, plain, more = arrays(shape, given, dtype)
    own = jax.tree.map(jnp.asarray, own)
    config = Programs(programs)
    run = jax.jit(lambda own: decode.attend(config=config, **own, **more))
    out = run(own)
    assert error(out, exact(*plain.values(), **more)) <= LIMITS[dtype]
    for _ in range(3):  # a race would show as a change
        bits.assert_same(run(own), out)


@pytest.mark.gpu
@needs_hopper
def test_a_decoding_program_runs_on_it() -> None:
    own, plain, _ = arrays((3, 1, 700, 128, 512, 64), {})
    lengths = jnp.array([700, 1, 345], jnp.int32)
    args = [jnp.asarray(own[n]) for n in ("q", "q_rope", "latent", "k_rope")]
    fast = rewriter.optimize(step, implementation=FORCED)
    assert "mosaic_gpu" in fast.lower(*args, lengths).as_text()
    want = exact(*plain.values(), kv_lengths=lengths, scale=192**-0.5)
    assert error(fast(*args, lengths), want) <= 1e-2
