"""Attention on Hopper: what it takes, how it cuts, and its numbers on such a GPU."""

# ruff: noqa: E501  (one case per line reads best)

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.choose.choose import choose
from rewriter.config import Config
from rewriter.kernels.attention import cudnn, hopper
from rewriter.kernels.attention.estimate import estimate
from rewriter.kernels.attention.hopper import (
    backward_config,
    backward_kernel,
    backward_of_keys,
    backward_of_queries,
    config,
    forward_kernel,
)
from rewriter.kernels.attention.hopper.backward_config import BackwardTiles
from rewriter.kernels.attention.hopper.blocks import Mask, blocks_of
from rewriter.kernels.attention.hopper.config import Tiles
from rewriter.kernels.attention.hopper.extra_operands import Beside
from rewriter.kernels.attention.hopper.order import Order
from rewriter.kernels.attention.reference import reference, visible
from rewriter.measure.programs import Task, function
from rewriter.ops import device
from rewriter.ops.kernel import Spec, spec_of, worth_measuring
from rewriter.ops.registry import registry
from rewriter.site.implementation import Implementation, settings
from rewriter.support.verdict import YES, no
from tests import slow
from tests.bench import record
from tests.support.kernels import bits, simulator
from tests.support.kernels.float64 import float64

H200 = device.named("h200")
CAUSAL, NONE = (None, 0), (None, None)


def spec(
    dtype: Any = jnp.bfloat16,
    shape: tuple[int, ...] = (2, 256, 4, 64),
    more: tuple[str, ...] = (),
    values: int = 0,
    **params: Any,
) -> Spec:
    x = jax.ShapeDtypeStruct(shape, dtype)
    v = jax.ShapeDtypeStruct((*shape[:3], values or shape[3]), dtype)
    operands = {"q": x, "k": x, "v": v}
    operands |= {n: jax.ShapeDtypeStruct((4,), jnp.float32) for n in more}
    return spec_of(registry().op("attention"), operands, params)


# ---------------------------------------------------------------- what it takes
@pytest.mark.parametrize(
    ("given", "why"),
    [
        (spec(jnp.float32), "16-bit float, not float32"),
        (spec(out_dtype="float32"), "bfloat16, float32"),
        (spec(more=("dropout",)), "does not take dropout"),
        (spec(more=("dropout", "scale_factor")), "does not take dropout, scale_factor"),
        (spec(more=("prefix",), window=(9, 0)), "where windows have no left end"),
        (spec(shape=(2, 256, 4, 320)), "heads of q are 320 wide, more than 256"),
        (spec(values=257), "heads of v are 257 wide"),
        (spec(shape=(2, 0, 4, 64)), "an axis of size 0"),
        (spec(scale=-1.0), "scale is -1.0, not positive"),
        (spec(softcap=-3.0), "softcap is -3.0"),
    ],
)
def test_what_it_refuses(given: Spec, why: str) -> None:
    verdict = hopper.supports(given)
    assert not verdict.ok
    assert any(why in reason.text for reason in verdict.reasons), verdict


@pytest.mark.parametrize(
    "given",
    [
        spec(),
        spec(jnp.float16),
        spec(more=("kv_lengths", "offset", "prefix")),
        spec(more=("prefix",), window=CAUSAL),
        spec(shape=(1, 1, 3, 80)),
        spec(shape=(1, 7, 3, 192), values=128),
        spec(shape=(2, 256, 4, 72)),
        spec(shape=(1, 7, 3, 5), values=249),
        spec(softcap=30.0, window=(100, 3), shift=-5, empty_rows="mean"),
    ],
)
def test_what_it_takes(given: Spec) -> None:
    assert hopper.supports(given).ok, hopper.supports(given)
    found, pruned = worth_measuring(
        registry().kernel("attention", "hopper").space, given, H200, 24
    )
    assert found[0] == hopper.default(given, H200), pruned
    assert all(hopper.fits(c, given, H200).ok for c in found)


def test_the_rule_of_thumb_fits_all_widths() -> None:
    for h, e in itertools.product(range(16, 257, 16), repeat=2):
        for window in (NONE, CAUSAL):
            given = spec(shape=(1, 4096, 2, h), values=e, window=window)
            tiles = hopper.default(given, H200)
            assert hopper.fits(tiles, given, H200).ok, (h, e, tiles)


def test_programs_are_as_many_as_processors() -> None:
    for kind, count in (("NVIDIA H20", 78), ("NVIDIA H100 PCIe", 114)):
        there = device.of(kind, "cuda")
        assert hopper.default(spec(), there).programs == count
        assert hopper.backward_default(spec(), there).programs == count
        assert {c.programs for c in hopper.configs(spec(), there)} == {0, count}
        assert {c.programs for c in hopper.backward_configs(spec(), there)} == {count}
    assert hopper.default(spec(), H200).programs == 132


def test_it_runs_on_hopper_gpus_alone() -> None:
    for name in ("h100", "h200"):
        assert hopper.runs_on(device.named(name)).ok
    assert hopper.runs_on(device.Device("cuda", "cuda")).ok  # not known yet
    for name in ("a100", "b200", "l40s"):
        verdict = hopper.runs_on(device.named(name))
        assert "no Hopper GPU" in verdict.reasons[0].text


def test_configs_that_cannot_run_are_pruned() -> None:
    many = Tiles(160, 3, 2)
    verdict = config.fits_widths(many, 128, 128)
    assert not verdict.ok
    assert "KiB of shared memory of 227 KiB" in verdict.reasons[0].text
    assert config.shared_memory(many, 128, 128, False) > 227 << 10
    assert "registers" in config.fits_widths(Tiles(192, 2, 3), 64, 64).reasons[0].text
    assert "warpgroups" in config.fits_widths(Tiles(64, 2, 4), 64, 64).reasons[0].text
    assert "multiple of 16" in config.fits_widths(Tiles(72), 64, 64).reasons[0].text
    assert "stages" in config.fits_widths(Tiles(64, 1), 64, 64).reasons[0].text
    # The result of other widths than q's has memory of its own.
    assert config.fits_widths(Tiles(128, 3), 128, 128).ok
    assert not config.fits_widths(Tiles(128, 3), 128, 112).ok


def test_configs_of_the_backward_that_cannot_run_are_pruned() -> None:
    def why(*given: Any, width: int = 128, **named: Any) -> str:
        verdict = backward_config.fits_backward_widths(
            BackwardTiles(*given, **named), width, width
        )
        return " ".join(r.text for r in verdict.reasons)

    assert why() == ""
    assert why(64, 128, 3, width=64) == ""
    assert "registers" in why(128)
    assert "shared memory" in why(64, 128, 3)
    assert "multiple of 64" in why(96)
    assert why(32, 32) == ""
    assert "3 warpgroups, not 2" in why(64, 64, 2, 3, divided=True, width=64)
    assert "shared memory" in why(64, 64, 2, divided=True, width=256)
    assert why(64, 64, 2, divided=True, v_stages=1, width=256) == ""
    assert "fewer than 2" in why(stages=1)
    assert "registers" in why(width=256)
    if jax.__version_info__ < (0, 11):
        assert "cannot add up dq" in why(fused=True)
        return
    assert why(fused=True) == ""
    assert "by 2 warpgroups" in why(64, 64, 2, 3, fused=True, width=64)
    assert hopper.fits_backward(BackwardTiles(), spec(softcap=3.0), H200).ok


# ------------------------------------------------------------------ how it cuts
def masks() -> list[tuple[Mask, int, int | None]]:
    found = []
    sizes = [(128, 128), (1, 300), (300, 1), (257, 130), (100, 333)]
    windows = [
        NONE,
        CAUSAL,
        (0, 0),
        (50, 0),
        (70, 33),
        (None, -40),
        (5, -9),
        (40, None),
    ]
    for (t, s), window, shift, mean in itertools.product(
        sizes, windows, (0, 60, -200), (False, True)
    ):
        found.append((Mask(t, s, *window, shift, mean=mean), 0, None))
        found.append(
            (Mask(t, s, *window, shift, True, True, mean), 17 - s // 2, s // 3)
        )
        found.append((Mask(t, s, *window, shift, True, True, mean), 3, 0))
    return found


@pytest.mark.parametrize(("rows", "keys"), [(128, 64), (192, 80), (64, 256)])
def test_blocks_against_a_table_of_what_is_seen(rows: int, keys: int) -> None:
    """Whole blocks are seen whole; what is left out is seen by no row."""
    for mask, offset, length in masks():
        seen = visible(
            mask.t, mask.s, window=(mask.left, mask.right), shift=mask.shift,
            offset=np.array([offset]),
            kv_lengths=None if length is None else np.array([length]),
        )  # fmt: skip
        table = np.ones((mask.t, mask.s), bool) if seen is None else np.asarray(seen)
        table = np.broadcast_to(table, (1, 1, mask.t, mask.s))[0, 0]
        empty = ~table.any(1)
        assert mask.may_be_empty or not empty.any()
        if mask.averages:
            table = table | empty[:, None]  # they read all keys
        for first in range(0, mask.t, rows):
            r = blocks_of(mask, first, rows, keys, offset + mask.shift, length)
            tile = table[first : first + rows]
            assert 0 <= r.start <= r.whole <= r.part <= r.end <= -(-mask.s // keys)
            assert r.count >= 1
            assert not tile[:, : r.start * keys].any()
            assert not tile[:, r.end * keys :].any()
            inside = tile[:, r.whole * keys : r.part * keys]
            assert inside.all()
            assert inside.shape[1] == (r.part - r.whole) * keys


@pytest.mark.parametrize("turned", [False, True])
def test_blocks_with_a_prefix_against_a_table(turned: bool) -> None:
    """The same of keys before a number, which all queries see, both ways round."""
    given = itertools.product(
        [(257, 130), (100, 333), (128, 128)], (0, 5, -40), (0, 60, -90), (None, 70),
        (0, 1, 64, 100, 500),
    )  # fmt: skip
    for (t, s), right, shift, length, prefix in given:
        seen = visible(
            t, s, window=(None, right), shift=shift, prefix=np.array([prefix]),
            kv_lengths=None if length is None else np.array([length]),
        )  # fmt: skip
        table = np.broadcast_to(np.asarray(seen), (1, 1, t, s))[0, 0]
        if turned:  # rows past a length are cut elsewhere
            table = np.asarray(
                visible(t, s, window=(None, right), shift=shift,
                        prefix=np.array([prefix]))
            )[0, 0].T  # fmt: skip
            mask = Mask(s, t, right, None, -shift, more=True, prefixes=True)
        else:
            mask = Mask(
                t, s, None, right, shift, length is not None, more=True, prefixes=True
            )
        for first in range(0, mask.t, 128):
            named = {"early": prefix} if turned else {"prefix": prefix}
            at = None if turned else length
            r = blocks_of(mask, first, 128, 64, mask.shift, at, **named)
            tile = table[first : first + 128]
            assert 0 <= r.start <= r.whole <= r.part <= r.end <= -(-mask.s // 64)
            assert r.count >= 1
            assert not tile[:, : r.start * 64].any()
            assert not tile[:, r.end * 64 :].any()
            inside = tile[:, r.whole * 64 : r.part * 64]
            assert inside.all()
            assert inside.shape[1] == (r.part - r.whole) * 64


def test_blocks_of_a_kernel_are_those_of_plain_integers() -> None:
    """In a kernel the same arithmetic runs on scalars that are not known."""
    for mask, offset, length in masks()[::7]:

        def traced(
            first: Any, offset: Any, length: Any, mask: Mask = mask
        ) -> tuple[Any, ...]:
            return tuple(
                jnp.asarray(x)
                for x in dataclasses.astuple(
                    blocks_of(mask, first, 128, 64, offset, length)
                )
            )

        for first in range(0, mask.t, 128):
            at = offset + mask.shift
            want = dataclasses.astuple(blocks_of(mask, first, 128, 64, at, length))
            given = (jnp.int32(first), jnp.int32(at))
            given += (None if length is None else jnp.int32(length),)
            assert tuple(map(int, traced(*given))) == want


def test_blocks_that_are_seen_whole_need_no_comparisons() -> None:
    """Of 32 blocks of a causal tile's keys only the last is compared."""
    r = blocks_of(Mask(4096, 4096, None, 0), 4096 - 128, 128, 128)
    assert (r.start, r.whole, r.part, r.end) == (0, 0, 31, 32)
    r = blocks_of(Mask(4096, 4096, 255, 0), 2048, 128, 128)
    assert (r.start, r.whole, r.part, r.end) == (14, 15, 16, 17)


def test_every_tile_is_taken_once_and_work_is_even() -> None:
    for pairs, rows, programs, nbytes in [(64, 32, 132, 1), (7, 5, 4, 9 << 20)]:
        work = tuple(range(1, rows + 1))
        order = Order(pairs, nbytes, programs, work)
        places = [order.place(i) for i in range(order.tiles)]
        assert len(set(places)) == rows * pairs
        assert [r for r, _ in places[: order.section]] == [rows - 1] * order.section
        table = order.table
        assert table is not None
        assert table.shape[0] == order.blocks
        taken = [list(row[1 : 1 + row[0]]) for row in table]
        assert sorted(itertools.chain(*taken)) == list(range(order.tiles))
        ends = [sum(work[places[i][0]] + 1 for i in row) for row in taken]
        assert max(ends) - min(ends) <= rows + 1
        traced = jax.jit(order.place)(jnp.int32(order.tiles - 1))
        assert tuple(map(int, traced)) == places[-1]


def test_tiles_alike_are_taken_in_turns() -> None:
    order = Order(3, 1, 4, (2, 2, 2))
    assert order.table is None
    assert sum(int(order.count(p)) for p in range(order.blocks)) == 9


# --------------------------------------------------------- in programs, anywhere
def attention(q, k, v):
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * 0.125
    s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)


def loss(q, k, v):
    return attention(q, k, v).astype(jnp.float32).sum()


def scanned(q, k, v):
    return jax.lax.scan(lambda x, _: (attention(x, k, v), None), q, length=2)[0]


PROGRAMS = {
    "plain": attention,
    "jit": jax.jit(attention),
    "vmap": lambda q, k, v: jax.vmap(attention)(q[None], k[None], v[None]),
    "scan": scanned,
    "gradient": jax.grad(loss, (0, 1, 2)),
}
FORCED = {"attention": "hopper"}
X = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)


@pytest.mark.once
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_exported_without_a_gpu(name: str) -> None:
    """JAX keeps the call of such kernels stable in exported programs."""
    fast = rewriter.optimize(PROGRAMS[name], implementation=FORCED)
    (site,) = fast.report(X, X, X).sites
    assert site.kernel == "hopper"
    artifact = rewriter.export(fast, platforms=("cpu", "cuda"))(X, X, X)
    assert artifact.manifest["custom_calls"] == ["mosaic_gpu_v2"]


def test_it_is_chosen_for_hopper_gpus_where_cudnn_is_not() -> None:
    x = jax.ShapeDtypeStruct((2, 2048, 4, 64), jnp.bfloat16)
    for target in ("h200", "h100"):
        (site,) = rewriter.explain(attention, target=target, tune="off")(x, x, x).sites
        assert (site.kernel, site.origin) == ("hopper", "estimated")
        (site,) = rewriter.explain(attention, target=target, tune="off")(X, X, X).sites
        assert site.kernel == "xla"  # so small that it is as fast
    (site,) = rewriter.explain(attention, target="a100", tune="off")(x, x, x).sites
    assert site.kernel != "hopper"
    assert "no Hopper GPU" in dict(site.not_chosen)["hopper"]
    # Of "cuda" alone it is not known which GPU it is.
    exported = rewriter.export(attention, platforms=("cuda",))(X, X, X)
    assert exported.manifest["custom_calls"] == []


def prefixed(q, k, v, prefix):
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * 0.125
    rows, keys = (jax.lax.broadcasted_iota(jnp.int32, s.shape[-2:], i) for i in (0, 1))
    mask = (keys <= rows) | (keys < prefix[:, None, None, None])
    return jnp.einsum(
        "bnts,bsnh->btnh", jax.nn.softmax(jnp.where(mask, s, -jnp.inf)), v
    )


@pytest.mark.parametrize("gradients", [False, True])
def test_it_is_chosen_for_causal_attention_with_a_prefix(gradients: bool) -> None:
    x = jax.ShapeDtypeStruct((2, 2048, 4, 64), jnp.bfloat16)
    length = jax.ShapeDtypeStruct((2,), jnp.int32)
    loss = lambda *given: prefixed(*given).astype(jnp.float32).sum()
    run = jax.grad(loss, (0, 1, 2)) if gradients else prefixed
    (site,) = rewriter.explain(run, target="h200", tune="off")(x, x, x, length).sites
    assert (site.kernel, site.origin) == ("hopper", "estimated")


@pytest.mark.parametrize(
    ("shape", "heads", "forward_ms", "both_ms"),
    [((4, 4096, 16, 128), 16, 0.456, 2.034), ((16, 1024, 8, 256), 1, 0.137, 0.777)],
)
def test_prefixes_are_estimated_as_they_were_measured(
    shape: tuple[int, ...], heads: int, forward_ms: float, both_ms: float
) -> None:
    """On an H200 (tests/bench/results/hopper_attention_h200.json), within a quarter."""
    q, k = (
        jax.ShapeDtypeStruct((*shape[:2], n, shape[3]), jnp.bfloat16)
        for n in (shape[2], heads)
    )
    given = {
        "q": q,
        "k": k,
        "v": k,
        "prefix": jax.ShapeDtypeStruct(shape[:1], jnp.int32),
    }
    its = spec_of(registry().op("attention"), given, {"window": CAUSAL})
    for passes, ms in (("forward", forward_ms), ("forward_and_vjp", both_ms)):
        assert 0.75 < 1e3 * estimate(its, H200, passes)["hopper"] / ms < 1.25


WIDTHS = {
    "full, 72 wide, 729": ((32, 729, 16, 72), None),
    "full, 80 wide, 1k": ((16, 1024, 16, 80), None),
    "causal, 96 wide, 4k": ((4, 4096, 32, 96), 0),
    "full, 40 wide, 4k": ((4, 4096, 8, 40), None),
}
"""Shape, and what the window's right end is, of timed heads of other widths."""


@pytest.mark.parametrize("passes", ["forward", "forward_and_vjp"])
@pytest.mark.parametrize("case", WIDTHS)
def test_heads_of_other_widths_are_estimated_as_they_were_measured(
    case: str, passes: str
) -> None:
    """On an H200: within a quarter, and what is chosen is as fast as the other."""
    rows = json.loads(record.named("hopper_attention_h200").read_text())["rows"]
    ms: dict[str, float] = {}
    for row in rows:
        if (row["case"], row["pass"]) == (case, passes) and "ms" in row:
            name = "hopper" if "Tiles" in row["by"] else row["by"]
            ms[name] = min(row["ms"], ms.get(name, np.inf))
    shape, right = WIDTHS[case]
    times = estimate(spec(shape=shape, window=(None, right)), H200, passes)
    assert 0.75 < 1e3 * times["hopper"] / ms["hopper"] < 1.25
    if shape[1] % 2 == 0:  # or cuDNN was measured without what makes lengths even
        assert 0.75 < 1e3 * times["cudnn"] / ms["cudnn"] < 1.25
        best = min(("cudnn", "hopper"), key=lambda name: times[name])
        assert ms[best] < 1.1 * min(ms.values())


@pytest.mark.parametrize(("width", "copied"), [(64, False), (128, True)])
def test_copies_of_odd_lengths_are_estimated(width: int, copied: bool) -> None:
    """Those of heads that are not as wide as a tile."""
    odd, even = (
        estimate(spec(shape=(16, t, 16, width)), H200, "forward_and_vjp")["hopper"]
        for t in (575, 576)
    )
    assert (odd > 1.2 * even) == copied


@pytest.mark.parametrize("differentiated", [0, 1])
@pytest.mark.parametrize("case", list(WIDTHS)[:3])
def test_it_is_chosen_for_heads_of_other_widths(
    case: str, differentiated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether cuDNN is there or not, which is given 730 rows for 729."""
    shape, right = WIDTHS[case]
    its = spec(shape=shape, window=(None, right), scale=0.1)
    kernels = registry().kernels("attention")
    for there in (no("cudnn", "is not there"), YES):
        monkeypatch.setattr(cudnn, "_asked", lambda _, there=there: there)
        choice = choose(its, Config(tune="off"), kernels, H200, differentiated)
        assert (choice.kernel, choice.origin) == ("hopper", "estimated")


def test_gradients_that_it_leaves_to_the_loop_are_estimated_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    its = spec(shape=(2, 2048, 4, 64), window=CAUSAL, scale=0.125)
    for loop in (False, True):
        if loop:
            monkeypatch.setattr(hopper, "fits_backward", lambda *_: no("", ""))
        forward, both = (estimate(its, H200, x) for x in ("forward", "forward_and_vjp"))
        gradients = both["hopper"] - forward["hopper"]
        assert (gradients > 0.5 * both["memory_bounded"]) == loop


@pytest.mark.parametrize("given", [{"softcap": 30.0}, {"values": 128}])
def test_gradients_of_capped_scores_and_wide_heads_are_ours(
    given: dict[str, Any],
) -> None:
    width = 192 if "values" in given else 64
    its = spec(shape=(2, 2048, 4, width), **given)
    for passes in ("forward", "forward_and_vjp"):
        times = estimate(its, H200, passes)
        assert times["hopper"] < 0.8 * times["xla"]


def test_kernels_choose_tiles_that_fit_if_no_one_does() -> None:
    """As where a kernel is called by hand."""
    for h, e in ((64, 64), (192, 128), (256, 256), (128, 256)):
        assert config.fits_widths(config.first_fitting(h, e), h, e).ok
        backward = backward_config.first_fitting_backward(h, e)
        assert backward is not None
        assert backward_config.fits_backward_widths(backward, h, e).ok
    assert (
        backward_config.first_fitting_backward(256, 256, Beside((4, 4), slopes=True))
        is None
    )


def test_other_gpus_are_told_why() -> None:
    with pytest.raises(rewriter.KernelError, match="A100-SXM4-80GB is no Hopper GPU"):
        rewriter.explain(attention, target="a100", implementation=FORCED)(X, X, X)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="it runs there")
def test_where_it_cannot_run_the_plain_form_does() -> None:
    q, k, v = (jax.random.normal(jax.random.key(i), X.shape, X.dtype) for i in range(3))
    fast = rewriter.optimize(attention, implementation=FORCED)
    got = np.asarray(fast(q, k, v), np.float32)
    want = np.asarray(attention(q, k, v), np.float32)
    assert np.linalg.norm(got - want) <= 1e-2 * np.linalg.norm(want)


LOWERED = {
    "odd": ((2, 257, 300, 4, 2, 64, 64), {"window": (100, 0)}, (128, 4, 3)),
    "average": (
        (2, 257, 300, 4, 2, 128, 128),
        {"window": CAUSAL, "empty_rows": "mean", "lengths": True},
        (160, 2, 2),
    ),
    "prefix": (
        (2, 257, 300, 4, 2, 64, 64),
        {"window": CAUSAL, "prefix": True},
        (128, 4, 3),
    ),
    "soft cap": ((1, 64, 64, 2, 2, 64, 64), {"softcap": 30.0}, (128, 4, 3, 0)),
    "wide": ((1, 257, 300, 4, 2, 256, 256), {"window": CAUSAL}, (80, 2, 2)),
    "other values": ((1, 300, 300, 2, 2, 192, 128), {}, (64, 2, 2)),
    "width of 80": ((1, 300, 300, 2, 2, 80, 80), {}, (96, 2, 2)),
    "width of 72": ((1, 300, 300, 2, 2, 72, 40), {}, (96, 2, 2)),
}


@pytest.mark.parametrize("name", LOWERED)
def test_it_is_lowered_without_a_gpu(name: str) -> None:
    (b, t, s, n, heads, h, e), params, tiles = LOWERED[name]
    params = dict(params)
    sizes = {"q": (b, t, n, h), "k": (b, s, heads, h), "v": (b, s, heads, e)}
    given = {i: jax.ShapeDtypeStruct(x, jnp.bfloat16) for i, x in sizes.items()}
    if params.pop("lengths", False):
        given["kv_lengths"] = jax.ShapeDtypeStruct((b,), jnp.int32)
    if params.pop("prefix", False):
        given["prefix"] = jax.ShapeDtypeStruct((1,), jnp.int32)

    def run(given: Any) -> Any:
        more = {"residuals": True, "config": Tiles(*tiles)}
        return hopper.forward(**given, **more, **params)

    exported = jax.export.export(jax.jit(run), platforms=["cuda"])(given)
    assert [x.shape for x in exported.out_avals] == [(b, t, n, e), (b, n, t)]


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_lowered_with_each_config(fused: bool) -> None:
    """As the autotuner builds them, for a GPU that is not there."""
    given = spec(window=CAUSAL, scale=0.125)
    tiles = BackwardTiles(64, 64, 2, fused=fused)
    if not hopper.fits_backward(tiles, given, H200).ok:
        pytest.skip(f"jax {jax.__version__} cannot add up dq in memory")
    of = registry()
    task = Task(
        of.op("attention"), given, tuple(of.kernels("attention")), "forward_and_vjp"
    )
    made = Implementation("hopper", "", None, settings(tiles))
    lower = jax.export.export(jax.jit(function(task, made)), platforms=["cuda"])
    exported = lower({"q": X, "k": X, "v": X}, X)
    names = [f"attention_{x}" for x in (("backward",) if fused else ("dk_dv", "dq"))]
    text = exported.mlir_module()
    assert all(name in text for name in ("attention", *names))
    assert text.count("mosaic_gpu_v2") == 1 + len(names)


@pytest.mark.once
@pytest.mark.parametrize(
    ("t", "h", "e"),
    [(200, 40, 40), (200, 72, 72), (200, 96, 96), (200, 112, 48), (203, 64, 32)],
)
def test_every_config_offered_for_other_sizes_is_lowered(
    t: int, h: int, e: int
) -> None:
    """Their tiles and swizzles follow the widths, in operands of a product alike."""
    q, v = (jax.ShapeDtypeStruct((1, t, 2, x), jnp.bfloat16) for x in (h, e))
    given = spec(shape=q.shape, values=e)
    offered = hopper.backward_configs(given, H200)
    fitting = [x for x in offered if hopper.fits_backward(x, given, H200).ok]
    assert any(x.fused for x in fitting) == (jax.__version_info__ >= (0, 11))

    def run(q: Any, v: Any) -> Any:
        out, kept = hopper.forward(q=q, k=q, v=v, residuals=True)
        more = {"out": out, "residuals": kept, "cotangent": v}
        return [hopper.backward(q=q, k=q, v=v, **more, config=x) for x in fitting]

    exported = jax.export.export(jax.jit(run), platforms=["cuda"])(q, v)
    kernels = 1 + sum(1 if x.fused else 2 for x in fitting)
    assert exported.mlir_module().count("mosaic_gpu_v2") == kernels


@pytest.mark.parametrize("h", [16, 32, 64])
@pytest.mark.parametrize("given", [{}, {"window": CAUSAL}, {"bias": (1, 2, 1, 197)}])
def test_odd_lengths_are_read_and_written_in_place(
    h: int, given: dict[str, Any]
) -> None:
    """Heads as wide as a tile are copied row by row: nothing is padded or sliced."""
    x = jax.ShapeDtypeStruct((64, 197, 2, h), jnp.bfloat16)
    more = dict(given)
    bias = more.pop("bias", None)
    other = {} if bias is None else {"bias": jax.ShapeDtypeStruct(bias, jnp.float32)}

    def both(q: Any, k: Any, v: Any, up: Any, other: Any) -> Any:
        call = functools.partial(hopper.forward, q=q, k=k, v=v, **other, **more)
        out, kept = call(residuals=True)
        back = functools.partial(hopper.backward, q=q, k=k, v=v, **other, **more)
        grads = back(out=out, residuals=kept, cotangent=up)
        return out, *(grads[name] for name in "qkv")

    moves = {"pad", "slice", "concatenate", "transpose", "dynamic_slice", "gather"}
    large = [
        e for e in jax.make_jaxpr(both)(x, x, x, x, other).eqns
        if e.primitive.name in moves and e.invars[0].aval.size >= math.prod(x.shape)
    ]  # fmt: skip
    assert not large


# ------------------------------------------------------- on a simulator of threads
SIMULATED: dict[str, tuple[tuple[int, ...], dict[str, Any], Tiles, BackwardTiles]] = {
    "one tile": ((1, 128, 128, 1, 1, 64, 64), {}, Tiles(64), BackwardTiles()),
    "odd": (
        (1, 203, 181, 2, 2, 64, 64), {}, Tiles(64, 2, 2, 3), BackwardTiles(programs=2),
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
    "other values": (
        (1, 200, 200, 2, 2, 64, 32), {"window": CAUSAL}, Tiles(64, programs=1),
        BackwardTiles(),
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
        many = simulator.Barriers(len(named[barrier].completed), 1)
        many.completed = [1 << 20] * len(many.completed)
        many.anyway = True
        block.named = {**named, barrier: many}
        copy(block)

    monkeypatch.setattr(forward_kernel._Block, "copy", careless)
    shape, given, tiles, back = SIMULATED["causal, no turns"]
    try:
        errors = simulated(shape, given, tiles, back)
    except simulator.Stuck:
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
        many = simulator.Barriers(len(kernel.memory[barrier].completed), 1)
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
    except simulator.Stuck:
        return
    assert max(errors[1:]) > 10 * LIMITS["bfloat16"]


# ---------------------------------------------------------------- on a Hopper GPU
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
LIMITS = {"bfloat16": 4e-3, "float16": 6e-4}
"""Of the relative error: half a unit in the last place, of weights and result."""

ON_HOPPER = jax.default_backend() == "gpu" and hopper.runs_on(device.attached()).ok
needs_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs an NVIDIA Hopper GPU")


def operands(
    shape: tuple[int, ...], dtype: str, times: float = 1
) -> tuple[jax.Array, ...]:
    b, t, s, n, heads, h, e = shape
    sizes = ((b, t, n, h), (b, s, heads, h), (b, s, heads, e), (b, t, n, e))
    made = (jax.random.normal(jax.random.key(i), x) for i, x in enumerate(sizes))
    scaled = (x * times if i == 0 else x for i, x in enumerate(made))
    return tuple(x.astype(dtype) for x in scaled)


def split(params: dict[str, Any], h: int) -> tuple[dict[str, Any], dict[str, Any]]:
    numbers = {
        x: jnp.asarray(params[x], jnp.int32)
        for x in ("kv_lengths", "offset", "prefix")
        if x in params
    }
    rest = {x: v for x, v in params.items() if x not in (*numbers, "times")}
    return numbers, {"scale": h**-0.5, **rest}


def exact(q: Any, k: Any, v: Any, **given: Any) -> np.ndarray:
    with float64():
        wide = [np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v)]
        return np.asarray(reference(*wide, **given))


def exact_gradients(q: Any, k: Any, v: Any, up: Any, **given: Any) -> list[np.ndarray]:
    """The result and the gradients of q, k and v."""
    with float64():
        wide = [np.asarray(x, np.float64) for x in (q, k, v, up)]
        out, back = jax.vjp(lambda *x: reference(*x, **given), *wide[:3])
        return [np.asarray(x) for x in (out, *back(wide[3]))]


def error(got: Any, want: np.ndarray) -> float:
    got = np.asarray(got, np.float64)
    assert (np.isnan(got) == np.isnan(want)).all()
    got, want = (np.nan_to_num(x, nan=0.0) for x in (got, want))
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


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
    sizes = (config.filled(x) for x in shape[5:])
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
