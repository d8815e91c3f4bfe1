"""Attention of few queries on Hopper: its line of blocks, its code, its numbers."""

# ruff: noqa: E501  (one case per line reads best)

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.attention import hopper_decode
from rewriter.kernels.attention.hopper_decode import Split, decode, kernel
from rewriter.kernels.attention.hopper_decode.config import (
    Sizes,
    fits_sizes,
    shared_memory,
)
from rewriter.kernels.attention.hopper_decode.work_split import WorkQueue
from rewriter.ops import device
from rewriter.ops.kernel import Spec, spec_of, worth_measuring
from rewriter.ops.registry import registry
from tests import slow
from tests.kernels.attention.test_hopper import (
    CAUSAL,
    H200,
    LIMITS,
    error,
    exact,
    needs_hopper,
    operands,
    split,
)
from tests.support.kernels import bits, simulator
from tests.support.kernels.simulated_gpu import machine

pytestmark = pytest.mark.once

# -------------------------------------------------------------- the line of blocks
LINES = [
    ([1, 40, 3, 1, 7], 3, 8),
    ([2, 2, 2, 2], 2, 264),  # more readers than blocks
    ([5], 1, 3),
    ([1, 1, 1], 2, 4),
    ([13] * 7, 4, 5),
]


@pytest.mark.parametrize("case", slow.first(2, LINES))
def test_every_block_is_taken_once_and_evenly(case: Any) -> None:
    """Pieces have numbers of their own, those of a pair follow each other."""
    counts, heads, readers = case
    b, ends = len(counts), np.cumsum(counts)
    line = WorkQueue(readers, b, heads, jnp.asarray(ends, jnp.int32))
    total = int(ends[-1]) * heads
    every = lambda f, n: map(
        np.asarray, jax.jit(jax.vmap(f))(np.arange(n, dtype="int32"))
    )
    shares = np.stack(list(every(line.share, readers)), 1)
    assert shares[0, 0] == 0
    assert (shares[1:, 0] == shares[:-1, 1]).all()
    assert shares[-1, 1] == total
    taken = shares[:, 1] - shares[:, 0]
    assert taken.max() - taken.min() <= 1
    owner = np.repeat(np.arange(b), np.array(counts) * heads)
    assert list(every(line.sequence_of, total)) == owner.tolist()
    pair = np.repeat(np.arange(b * heads), np.repeat(counts, heads))
    reader = np.searchsorted(shares[:, 1], np.arange(total), "right")
    first, last = every(line.readers_of, b * heads)
    for i in range(b * heads):
        assert (first[i], last[i]) == (reader[pair == i].min(), reader[pair == i].max())
    numbers = dict.fromkeys(zip(pair, reader, strict=True))  # of each piece
    found = [i + r for i, r in numbers]
    assert len(set(found)) == len(found)
    assert max(found) < line.pieces


# ---------------------------------------------------------------- what it takes
def spec(
    t: int = 1, s: int = 4096, n: int = 32, heads: int = 8, h: int = 128, e: int = 0,
    dtype: Any = jnp.bfloat16, more: tuple[str, ...] = (),
    mask: tuple[int, ...] = (), **params: Any,
) -> Spec:  # fmt: skip
    shapes = {"q": (8, t, n, h), "k": (8, s, heads, h), "v": (8, s, heads, e or h)}
    given = {x: jax.ShapeDtypeStruct(shape, dtype) for x, shape in shapes.items()}
    given |= {x: jax.ShapeDtypeStruct((8,), jnp.int32) for x in more}
    given |= {"mask": jax.ShapeDtypeStruct(mask, jnp.bool_)} if mask else {}
    return spec_of(registry().op("attention"), given, params)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (spec(dtype=jnp.float32), "16-bit float, not float32"),
        (spec(more=("alibi", "sinks")), "does not take alibi, sinks"),
        (spec(h=72), "heads of q are 72 wide"),
        (spec(e=264), "heads of v are 264 wide"),
        (spec(t=17), "68 queries of a key head, more than the 64"),
        (spec(s=0), "an axis of size 0"),
        (spec(s=1 << 25), "keys of all heads, more than"),
        (spec(scale=0.0), "scale is 0.0, not positive"),
        (spec(softcap=-3.0), "softcap is -3.0"),
        (
            spec(t=2, mask=(8, 1, 2, 4096)),
            "mask of shape (8, 1, 2, 4096), not of keys alone: [8 or 1, 1, 1, 4096]",
        ),
        (spec(mask=(8, 32, 1, 4096)), "mask of shape (8, 32, 1, 4096), not of keys"),
        (spec(mask=(8, 1, 1, 1)), "mask of shape (8, 1, 1, 1), not of keys"),
    ],
)
def test_what_it_refuses(given: Spec, why: str) -> None:
    verdict = hopper_decode.supports(given)
    assert not verdict.ok
    assert any(why in reason.text for reason in verdict.reasons), verdict


@pytest.mark.parametrize(
    "given",
    [
        spec(), spec(t=16), spec(n=8), spec(dtype=jnp.float16), spec(s=1, n=1, heads=1),
        spec(h=16), spec(h=256, t=16), spec(h=192, e=128), spec(h=16, e=256),
        spec(more=("kv_lengths", "offset"), softcap=3.0, window=(5, 0)),
        spec(mask=(8, 1, 1, 4096)), spec(t=3, mask=(1, 1, 1, 4096), empty_rows="mean"),
        spec(s=77, h=256, t=16, mask=(8, 1, 1, 77), more=("kv_lengths",)),
    ],
)  # fmt: skip
def test_what_it_takes(given: Spec) -> None:
    assert hopper_decode.supports(given).ok, hopper_decode.supports(given)
    space = registry().kernel("attention", "hopper_decode").space
    found, _ = worth_measuring(space, given, H200, 24)
    assert found[0] == hopper_decode.default(given, H200)
    h20 = device.of("NVIDIA H20", "cuda")
    assert {c.programs for c in hopper_decode.configs(given, h20)} == {78}


def test_configs_that_cannot_run_are_pruned() -> None:
    def why(*given: int, e: int = 128) -> str:
        return " ".join(
            r.text for r in fits_sizes(Split(*given), Sizes(8, 128, e)).reasons
        )

    assert why(64, 2, 2) == ""
    assert "KiB of shared memory of 227 KiB" in why(64, 4, 2)
    assert "registers for tiles" in why(256, 2, 2, e=64)
    assert "registers for a product" in why(32, 2, 3)
    assert "registers for a product" in why(32, 2, 2, e=256)
    assert "multiple of 16" in why(72, 2, 1)
    assert "fewer than 2" in why(64, 1)
    assert "34 stages of all readers, of 32" in why(16, 17, 2)
    assert "not 1, 2 or 3" in why(64, 2, 4)


def test_masks_take_shared_memory() -> None:
    full, masked = Split(64, 3, 3), Sizes(40, 64, 64, masked=True)
    assert fits_sizes(full, Sizes(40, 64, 64)).ok
    assert "KiB of shared memory" in fits_sizes(full, masked).reasons[0].text
    for block, line in ((16, 128), (64, 256), (80, 384)):  # bytes that copies begin at
        with_mask, without = (
            shared_memory(Split(block, 5, 2), Sizes(8, 64, 64, x))
            for x in (True, False)
        )
        assert with_mask - without == 2 * 5 * line


# ------------------------------------------------------- on a simulator of threads
Case = tuple[tuple[int, ...], dict[str, Any], Split]
SIMULATED: dict[str, Case] = {  # b, t, s, n, heads of k, h, e; params, operands; config
    "odd": ((3, 1, 203, 6, 2, 64, 64), {}, Split(64, 2, 2, 3)),
    "all at once": (
        (3, 3, 201, 6, 2, 48, 80),
        {"kv_lengths": (201, 100, 0), "offset": (-2, 60, 120), "window": (70, 5),
         "empty_rows": "mean", "softcap": 4.0},
        Split(32, 3, 3, 2),
    ),
    "lengths": (
        (4, 1, 300, 8, 2, 32, 32),
        {"kv_lengths": (0, 300, 1, 257), "empty_rows": "zero"}, Split(32, 2, 1, 5),
    ),
    "one key": ((2, 1, 1, 3, 3, 16, 16), {}, Split(16, 2, 1, 132)),
    "rows without keys": (
        (2, 2, 70, 4, 4, 16, 16), {"kv_lengths": (0, 70)}, Split(16, 2, 2, 7),
    ),
    "causal, 64 rows": (
        (1, 8, 150, 8, 1, 64, 32), {"window": CAUSAL, "shift": 142}, Split(64, 2, 1, 2),
    ),
    "a window that ends before keys": (
        (2, 2, 130, 4, 2, 32, 32),
        {"window": (40, 0), "offset": (200, 100), "empty_rows": "nan"}, Split(32, 2, 2, 3),
    ),
    "large scores": ((2, 1, 90, 4, 2, 32, 32), {"times": 30}, Split(32, 2, 2, 2)),
}  # fmt: skip


MASKED: dict[str, Case] = {  # "mask": of so many sequences, nothing of "hidden" ones
    "a mask": ((3, 1, 203, 6, 2, 64, 64), {"mask": 3}, Split(64, 2, 2, 3)),
    "a mask, all at once": (
        (3, 3, 201, 6, 2, 48, 80),
        {"mask": 3, "kv_lengths": (201, 150, 0), "offset": (-2, 60, 120),
         "window": (70, 5), "empty_rows": "mean", "softcap": 4.0},
        Split(32, 3, 3, 2),
    ),
    "a mask of all sequences, soft cap": (
        (2, 2, 77, 4, 4, 32, 32), {"mask": 1, "softcap": 4.0}, Split(16, 2, 1, 5),
    ),
    "a mask and lengths, zero": (
        (5, 1, 300, 8, 2, 32, 32),
        {"mask": 5, "hidden": (3,), "kv_lengths": (0, 300, 1, 257, 200), "empty_rows": "zero"},
        Split(32, 2, 2, 3),
    ),
    "a mask and a window, nan": (
        (3, 2, 130, 4, 2, 32, 32),
        {"mask": 3, "hidden": (2,), "window": (40, 0), "offset": (90, 41, 100)},
        Split(48, 2, 2, 3),
    ),
    "a mask, mean": (
        (3, 1, 128, 4, 2, 32, 32),
        {"mask": 3, "hidden": (0, 2), "empty_rows": "mean"}, Split(32, 2, 1, 3),
    ),
    "a mask and lengths, mean": (
        (4, 1, 300, 4, 2, 32, 32),
        {"mask": 1, "kv_lengths": (300, 1, 0, 180), "empty_rows": "mean"}, Split(64, 2, 2, 3),
    ),
}  # fmt: skip


def others(
    shape: tuple[int, ...], given: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The other operands of a case and its parameters."""
    given = dict(given)
    count, hidden = given.pop("mask", 0), list(given.pop("hidden", ()))
    numbers, params = split(given, shape[5])
    if count:
        s = shape[2]
        mask = np.random.default_rng(0).random((count, 1, 1, s)) < 0.7
        mask[..., : s // 3] = False  # as of prompts that are padded on the left
        mask[hidden] = False
        numbers["mask"] = jnp.asarray(mask)
    return numbers, params


def simulated(
    shape: tuple[int, ...],
    given: dict[str, Any],
    config: Split,
    swapped: tuple[str, ...] = (),
) -> float:
    """The relative error of the result."""
    made = operands(shape, "bfloat16", given.get("times", 1))[:3]
    q, k, v = (np.asarray(x) for x in made)
    numbers, params = others(shape, given)
    both = {**{n: np.asarray(x) for n, x in numbers.items()}, **params}
    with simulator.simulated_decode():
        out = decode.forward(q=q, k=k, v=v, config=config, swapped=swapped, **both)
    return error(out, exact(q, k, v, **both))


@pytest.mark.parametrize("name", slow.first(5, SIMULATED))
def test_its_code_run_by_threads(name: str) -> None:
    """Numbers, memory that is handed on, and barriers, with no GPU."""
    assert simulated(*SIMULATED[name]) <= LIMITS["bfloat16"]


@pytest.mark.parametrize("name", slow.first(3, SIMULATED))
@pytest.mark.parametrize("swapped", slow.first(1, [("k", "v"), ("k",)]))
def test_caches_whose_heads_lie_first(name: str, swapped: tuple[str, ...]) -> None:
    assert simulated(*SIMULATED[name], swapped) <= LIMITS["bfloat16"]


@pytest.mark.parametrize("name", MASKED)
def test_masks_of_keys(name: str) -> None:
    assert simulated(*MASKED[name]) <= LIMITS["bfloat16"]


def test_keys_that_a_mask_hides_are_not_added() -> None:
    """Whatever they are, in blocks that are read."""
    shape = (2, 1, 150, 4, 2, 32, 32)
    q, k, v, _ = (np.array(x) for x in operands(shape, "bfloat16"))
    more = {**others(shape, {"mask": 2})[0], "scale": 0.3}
    clean = exact(q, k, v, **more)
    hidden = ~np.asarray(more["mask"])[:, 0, 0]
    k[hidden] = np.where(np.arange(hidden.sum()) % 2, np.nan, np.inf)[:, None, None]
    np.testing.assert_array_equal(exact(q, k, v, **more), clean)
    with simulator.simulated_decode():
        more["mask"] = np.asarray(more["mask"])
        got = decode.forward(q=q, k=k, v=v, config=Split(32, 2, 2, 3), **more)
    assert error(got, clean) <= LIMITS["bfloat16"]


@pytest.mark.parametrize(
    ("barrier", "keys"), [("k_free", 203), ("v_free", 203), ("q_free", 60)]
)
def test_the_simulator_sees_memory_that_is_taken_too_early(
    barrier: str, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without waiting for it, what is copied next overwrites what is in use."""
    copy = kernel._Reader.copy

    def careless(reader: Any) -> None:
        many = machine.Barriers(len(reader.x[barrier].completed), 1)
        many.anyway = True
        reader.x = {**reader.x, barrier: many}
        copy(reader)

    monkeypatch.setattr(kernel._Reader, "copy", careless)
    try:
        found = simulated((3, 1, keys, 4, 2, 32, 32), {}, Split(64, 2, 1, 1))
    except machine.Stuck:
        return
    assert found > 10 * LIMITS["bfloat16"]


def test_what_is_not_seen_is_not_read() -> None:
    """NaN in blocks behind a sequence's length does not spoil its result."""
    q, k, v, _ = (np.array(x) for x in operands((2, 1, 200, 4, 2, 32, 32), "bfloat16"))
    lengths = np.array([64, 160], np.int32)
    clean = exact(q, k, v, kv_lengths=lengths, scale=0.3)
    for x in (k, v):
        x[0, 64:], x[1, 160:] = np.nan, np.nan
    config = Split(32, 2, 2, 3)
    with simulator.simulated_decode():
        got = decode.forward(
            q=q, k=k, v=v, kv_lengths=lengths, scale=0.3, config=config
        )
    assert error(got, clean) <= LIMITS["bfloat16"]


# --------------------------------------------------------- in programs, anywhere
LOWERED: dict[str, Case] = {
    "grouped": ((8, 1, 4096, 32, 8, 128, 128), {"kv_lengths": (1,) * 8}, Split()),
    "all at once": (SIMULATED["all at once"]),
    "one reader": ((2, 1, 4000, 16, 4, 256, 192), {}, Split(64, 2, 1)),
    "a mask": ((8, 1, 4097, 32, 8, 128, 128), {"mask": 8}, Split()),
    "a mask, small blocks": ((2, 1, 77, 4, 4, 32, 32), {"mask": 1}, Split(16, 2, 1)),
    "a mask, all at once": (MASKED["a mask, all at once"]),
}


@pytest.mark.parametrize("name", LOWERED)
def test_it_is_lowered_without_a_gpu(name: str) -> None:
    shape, given, config = LOWERED[name]
    q, k, v, out = jax.eval_shape(lambda: operands(shape, "bfloat16"))
    numbers, params = others(shape, given)
    run = lambda q, k, v, more: hopper_decode.forward(
        q=q, k=k, v=v, **more, **params, config=config
    )
    exported = jax.export.export(jax.jit(run), platforms=["cuda"])(q, k, v, numbers)
    assert exported.out_avals[0].shape == out.shape
    text = exported.mlir_module()
    assert text.count("mosaic_gpu_v2") == 2
    assert "attention_decode" in text
    assert "attention_merge" in text


def attention(q, k, v, lengths):
    b, _, n, h = q.shape
    s, heads = k.shape[1:3]
    x = jnp.einsum("bkgh,bskh->bkgs", q.reshape(b, heads, n // heads, h), k) * h**-0.5
    x = jnp.where((jnp.arange(s) < lengths[:, None])[:, None, None], x, -jnp.inf)
    weights = jax.nn.softmax(x.astype(jnp.float32)).astype(v.dtype)
    return jnp.einsum("bkgs,bske->bkge", weights, v).reshape(b, 1, n, h)


def masked_attention(q, k, v, attention_mask, fill):
    """As models write a decoding step with prompts that are padded on the left."""
    n, heads = q.shape[2], k.shape[2]
    k, v = (jnp.repeat(x, n // heads, axis=2) for x in (k, v))
    x = jnp.einsum("btnh,bsnh->bnts", q, k).astype(jnp.float32) * q.shape[3] ** -0.5
    x = jnp.where(attention_mask[:, None, None, :], x, fill)
    weights = jax.nn.softmax(x, axis=-1).astype(v.dtype)
    return jnp.einsum("bnts,bsne->btne", weights, v)


FILLS = {"-inf": -np.inf, "-1e30": -1e30, "lowest": float(np.finfo(np.float32).min)}

FORCED = {"attention": "hopper_decode"}
LENGTHS = jax.ShapeDtypeStruct((8,), jnp.int32)
ARGS = (
    jax.ShapeDtypeStruct((2, 1, 8, 64), jnp.bfloat16),
    *[jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16)] * 2,
    jax.ShapeDtypeStruct((2,), jnp.int32),
)


def test_a_decoding_program_is_exported_with_it() -> None:
    fast = rewriter.optimize(attention, implementation=FORCED)
    (site,) = fast.report(*ARGS).sites
    assert site.kernel == "hopper_decode"
    text = jax.export.export(fast, platforms=["cuda"])(*ARGS).mlir_module()
    assert "attention_decode" in text
    plain = jax.export.export(jax.jit(attention), platforms=["cuda"])(*ARGS)
    assert "attention_decode" not in plain.mlir_module()


def test_it_is_chosen_on_hopper_gpus() -> None:
    chosen = lambda target, args: rewriter.explain(
        attention, target=target, tune="off"
    )(*args).sites[0]  # fmt: skip
    many = jax.ShapeDtypeStruct((8, 8192, 2, 64), jnp.bfloat16)
    args = jax.ShapeDtypeStruct((8, 1, 8, 64), jnp.bfloat16), many, many, LENGTHS
    site = chosen("h200", args)
    assert (site.kernel, site.origin) == ("hopper_decode", "estimated")
    assert chosen("h200", ARGS).kernel == "xla"  # so few keys that it is as fast
    assert "not a Hopper GPU" in dict(chosen("a100", args).not_chosen)["hopper_decode"]


@pytest.mark.parametrize("fill", FILLS)
def test_it_is_chosen_for_masks_of_keys(fill: str) -> None:
    step = lambda *x: masked_attention(*x, FILLS[fill])
    many = jax.ShapeDtypeStruct((8, 8191, 2, 64), jnp.bfloat16)
    mask = jax.ShapeDtypeStruct((8, 8191), jnp.bool_)
    args = jax.ShapeDtypeStruct((8, 1, 8, 64), jnp.bfloat16), many, many, mask
    (site,) = rewriter.explain(step, target="h200", tune="off")(*args).sites
    assert (site.kernel, site.origin) == ("hopper_decode", "estimated")
    fast = rewriter.optimize(step, implementation=FORCED)
    text = jax.export.export(fast, platforms=["cuda"])(*args).mlir_module()
    assert "attention_decode" in text


# ---------------------------------------------------------------- on a Hopper GPU
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], Split | None]] = {
    **SIMULATED,
    **MASKED,
    "grouped": ((4, 1, 4096, 32, 8, 128, 128), {}, None),
    "8 queries of a head": ((3, 1, 5000, 32, 4, 128, 128), {"kv_lengths": (1, 5000, 3333)}, None),
    "no groups": ((2, 1, 1000, 8, 8, 128, 128), {}, None),
    "one pair": ((1, 1, 20000, 4, 1, 128, 128), {}, None),
    "many sequences": ((70, 1, 300, 8, 2, 64, 64), {"kv_lengths": tuple(range(0, 280, 4)), "empty_rows": "zero"}, None),
    "one reader": ((4, 1, 2000, 32, 8, 128, 128), {"kv_lengths": (1, 2000, 77, 1024)}, Split(64, 5, 1)),
    "blocks of 32": ((4, 1, 2000, 32, 8, 128, 128), {"kv_lengths": (1, 2000, 77, 1024)}, Split(32, 5, 2)),
    "blocks of 128": ((4, 1, 2000, 32, 8, 128, 128), {"kv_lengths": (1, 2000, 77, 1024)}, Split(128, 2, 1)),
    "three readers": ((4, 1, 2000, 32, 8, 64, 64), {"kv_lengths": (1, 2000, 77, 1024)}, Split(64, 3, 3)),
    "width of 256": ((2, 1, 1500, 16, 2, 256, 256), {}, None),
    "other values": ((2, 1, 1500, 16, 2, 192, 128), {}, None),
    "several queries, causal": ((3, 4, 1111, 32, 8, 128, 128), {"window": CAUSAL, "offset": (0, 500, 1107)}, None),
    "64 rows": ((2, 16, 1111, 8, 2, 128, 128), {"window": (300, 0), "offset": (900, 1095)}, None),
    "mean": ((3, 2, 700, 8, 2, 64, 64), {"kv_lengths": (0, 700, 3), "empty_rows": "mean"}, None),
    "soft cap": ((2, 1, 900, 8, 2, 128, 128), {"softcap": 5.0, "times": 3}, None),
    "a long mask": ((4, 1, 4097, 32, 8, 128, 128), {"mask": 4}, None),
    "a mask, blocks of 32": ((4, 1, 2000, 32, 8, 128, 128), {"mask": 4, "kv_lengths": (1, 2000, 77, 1024)}, Split(32, 5, 2)),
    "a mask, blocks of 128": ((4, 1, 2000, 32, 8, 128, 128), {"mask": 1}, Split(128, 2, 1)),
    "a mask, three readers": ((4, 1, 2000, 32, 8, 64, 64), {"mask": 4}, Split(32, 3, 3)),
    "a mask, width of 256": ((2, 1, 1500, 16, 2, 256, 256), {"mask": 2}, None),
    "a mask, several queries": ((3, 4, 1111, 32, 8, 128, 128), {"mask": 3, "hidden": (1,), "window": CAUSAL, "offset": (0, 500, 1107), "empty_rows": "mean"}, None),
    "a mask, many sequences": ((70, 1, 300, 8, 2, 64, 64), {"mask": 70, "hidden": (0, 33), "kv_lengths": tuple(range(0, 280, 4)), "empty_rows": "zero"}, None),
}  # fmt: skip


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", CASES)
def test_numbers_against_float64(name: str, dtype: str) -> None:
    shape, given, config = CASES[name]
    q, k, v, _ = operands(shape, dtype, given.get("times", 1))
    numbers, params = others(shape, given)
    more = {} if config is None else {"config": config}

    @jax.jit
    def run(q, k, v, numbers):
        return hopper_decode.forward(q=q, k=k, v=v, **numbers, **params, **more)

    out = run(q, k, v, numbers)
    assert out.dtype == q.dtype
    assert error(out, exact(q, k, v, **numbers, **params)) <= LIMITS[dtype]
    swapped = jax.jit(
        lambda q, k, v, numbers: hopper_decode.forward(
            q=q, k=k.swapaxes(1, 2), v=v.swapaxes(1, 2), swapped=("k", "v"),
            **numbers, **params, **more,
        )
    )  # fmt: skip
    first = (x.swapaxes(1, 2) for x in (k, v))
    bits.assert_same(swapped(q, *first, numbers), out)
    for _ in range(3):  # a race would show as a change
        bits.assert_same(run(q, k, v, numbers), out)


@pytest.mark.gpu
@needs_hopper
def test_a_decoding_program_runs_on_it() -> None:
    q, k, v, _ = operands((3, 1, 700, 16, 4, 64, 64), "bfloat16")
    lengths = jnp.array([700, 1, 345], jnp.int32)
    fast = rewriter.optimize(attention, implementation=FORCED)
    assert "mosaic_gpu" in fast.lower(q, k, v, lengths).as_text()
    want = exact(q, k, v, kv_lengths=lengths, scale=64**-0.5)
    assert error(fast(q, k, v, lengths), want) <= 1e-2


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("fill", FILLS)
def test_a_masked_decoding_program_runs_on_it(fill: str) -> None:
    """Also of a sequence that is all padding, but for a fill that leaves NaN."""
    q, k, v, _ = operands((3, 1, 701, 16, 4, 64, 64), "bfloat16")
    mask = jnp.arange(701) >= jnp.array([[0], [344], [701]])
    step = lambda *x: masked_attention(*x, FILLS[fill])
    fast = rewriter.optimize(step, implementation=FORCED)
    assert "mosaic_gpu" in fast.lower(q, k, v, mask).as_text()
    empty = "nan" if fill == "-inf" else "mean"
    more = {"mask": mask[:, None, None], "scale": 64**-0.5, "empty_rows": empty}
    assert error(fast(q, k, v, mask), exact(q, k, v, **more)) <= 1e-2
