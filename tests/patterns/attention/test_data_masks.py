"""Masks made of data, in the programs in which people train: checkpoints and loops.

A mask is made once outside the layers, or in each of them. Layers are one after the
other or in a scan, under a checkpoint or not. The whole is differentiated.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.gradients import search
from tests import slow

pytestmark = pytest.mark.once

B, T, N, H, LAYERS = 2, 16, 2, 4, 3
FORCED = {"attention": "memory_bounded"}


# ---------------------------------------------------------------------- masks
def positions() -> Any:
    return jnp.arange(T)


def causal() -> Any:
    return positions()[:, None] >= positions()[None]


def packed(segments: Any) -> Any:
    return (causal() & (segments[:, :, None] == segments[:, None]))[:, None]


def prefixed(prefix: Any) -> Any:
    return (causal() | (positions()[None, None] < prefix[:, None, None]))[:, None]


def sloped(slopes: Any) -> Any:
    return (positions() - positions()[:, None]) * slopes[:, None, None]


def added(kept: Any) -> Any:
    """As Hugging Face's models make it: of a weak type, and cast where it is read."""
    return ((1 - kept) * -1e9)[:, None, None]


def ordered(where: Any) -> Any:
    return (where[:, :, None] >= where[:, None])[:, None]


RANDOM = np.random.default_rng(0)
IDS = np.where(positions()[None] < np.array([[9], [14]]), 5, 0).astype(np.int32)
SEGMENTS = (np.arange(T)[None] // np.array([[5], [7]])).astype(np.int32)
MASKS: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "padding": (lambda ids: (ids != 0)[:, None, None], IDS, "mask bool[2,1,1,16]"),
    "packed": (packed, SEGMENTS, "q_segments i32[2,16] kv_segments i32[2,16]"),
    "prefix": (prefixed, np.array([3, 6], np.int32), "prefix i32[2]"),
    "positions": (
        ordered,
        np.stack([np.r_[:9, :7], np.r_[:16]]).astype(np.int32),
        "kv_positions i32[2,16] last_position i32[2,16]",
    ),
    "array": (lambda m: m, RANDOM.random((B, 1, T, T)) > 0.3, "mask bool[2,1,16,16]"),
    "bias": (
        lambda b: b,
        RANDOM.normal(size=(1, N, T, T)).astype(np.float32),
        "bias f32[1,2,16,16]",
    ),
    "slopes": (sloped, np.array([0.5, 0.25], np.float32), "alibi f32[2]"),
    "added": (added, (IDS != 0).astype(np.int32), "bias f32[2,1,1,16]"),
}
"""By name: how a mask is made, of what, and what the site then reads."""


# ------------------------------------------------------------------- programs
def layer(x: Any, w: Any, mask: Any) -> Any:
    q, k, v = ((x @ w[i]).reshape(B, T, N, H) for i in range(3))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5
    kept = mask.dtype == bool
    scores = jnp.where(mask, scores, -1e30) if kept else scores + mask
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
    return x + out.reshape(x.shape) @ w[3]


def loss(
    x: Any, w: Any, data: Any, *, make: Any, scan: bool, wrap: Any, outside: bool = True
) -> Any:
    given = make(data) if outside else data
    step = wrap(lambda x, w, m: layer(x, w, m if outside else make(m)))
    if scan:
        x, _ = jax.lax.scan(lambda x, w: (step(x, w, given), None), x, w)
    else:
        for one in w:
            x = step(x, one, given)
    return (x**2).mean()


WRAPS: dict[str, tuple[bool, Callable[[Any], Any]]] = {
    "plain": (False, lambda f: f),
    "checkpoint": (False, jax.checkpoint),
    "scan": (True, lambda f: f),
    "scan+checkpoint": (True, jax.checkpoint),
}


def step_of(name: str, context: str, outside: bool = True, wrap: Any = None) -> Any:
    """The gradients, of a bias too."""
    scan, usual = WRAPS[context]
    program = functools.partial(
        loss, make=MASKS[name][0], scan=scan, wrap=wrap or usual, outside=outside
    )
    return jax.value_and_grad(program, (0, 1, 2) if name == "bias" else (0, 1))


@functools.cache
def arguments(name: str) -> tuple[Any, ...]:
    random = np.random.default_rng(1)
    x = random.normal(size=(B, T, N * H)).astype(np.float32)
    w = random.normal(size=(LAYERS, 4, N * H, N * H)).astype(np.float32) / 3
    return x, w, MASKS[name][1]


@functools.cache
def in_float64(name: str) -> list[Any]:
    """What all contexts compute, in float64."""
    with jax.enable_x64(True):
        wide = [
            a.astype(np.float64) if a.dtype == np.float32 else a
            for a in arguments(name)
        ]
        return [np.asarray(a) for a in jax.tree.leaves(step_of(name, "plain")(*wide))]


def read_by(step: Any, args: Any) -> set[str]:
    """What sites read beside queries, keys and values; all have gradients."""
    report = rewriter.explain(step, implementation=FORCED)(*args)
    assert not report.failures
    assert not report.misses
    sites = [s for s in report.sites if s.op == "attention"]
    assert all(s.replaced and s.backward for s in sites), report
    assert sum(s.repeats for s in sites) == LAYERS
    return {s.shapes.split(f"v f32[{B},{T},{N},{H}] ")[-1] for s in sites}


# ---------------------------------------------------------------------- tests
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("context", WRAPS)
def test_every_layer_is_replaced_with_its_gradient(context, name):
    args = arguments(name)
    for outside in (True, False):
        assert read_by(step_of(name, context, outside), args) == {MASKS[name][2]}


@pytest.mark.parametrize(
    ("context", "name"),
    slow.unless(
        lambda context, name: context != "plain" and name in ("packed", "bias"),
        itertools.product(WRAPS, MASKS),
        several=True,
    ),
)
def test_gradients_are_those_in_float64(context, name):
    fast = rewriter.optimize(step_of(name, context), implementation=FORCED)
    for got, want in zip(
        jax.tree.leaves(fast(*arguments(name))), in_float64(name), strict=True
    ):
        assert np.linalg.norm(got - want) <= 2e-6 * np.linalg.norm(want)


POLICIES = jax.checkpoint_policies
KEEPING = {
    "nothing": None,
    "products": POLICIES.dots_saveable,
    "products of weights": POLICIES.dots_with_no_batch_dims_saveable,
    "names": POLICIES.save_only_these_names("q", "k", "v"),
    "offloaded": POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=["q"], names_which_can_be_offloaded=["k", "v"],
        offload_src="device", offload_dst="pinned_host",
    ),
}  # fmt: skip


@pytest.mark.parametrize("policy", KEEPING)
@pytest.mark.parametrize("name", ["padding", "packed", "array", "bias"])
def test_whatever_a_checkpoint_keeps(name, policy):
    def named(f: Any) -> Any:
        return jax.checkpoint(f, policy=KEEPING[policy])

    for context in ("checkpoint", "scan+checkpoint"):
        step = step_of(name, context, wrap=named)
        assert read_by(step, arguments(name)) == {MASKS[name][2]}


@pytest.mark.parametrize("policy", KEEPING)
@pytest.mark.parametrize("context", ["checkpoint", "scan+checkpoint"])
def test_causal_layers_and_biases_without_gradients(context, policy):
    scan, _ = WRAPS[context]
    wrap = lambda f: jax.checkpoint(f, policy=KEEPING[policy])
    program = functools.partial(loss, scan=scan, wrap=wrap)
    fixed = jax.value_and_grad(functools.partial(program, make=lambda b: b), (0, 1))
    assert read_by(fixed, arguments("bias")) == {MASKS["bias"][2]}
    ordered = jax.value_and_grad(
        functools.partial(program, make=lambda _: causal()), (0, 1)
    )
    report = rewriter.explain(ordered, implementation=FORCED)(*arguments("packed"))
    sites = [s for s in report.sites if s.op == "attention"]
    assert sum(s.repeats for s in sites) == LAYERS
    assert all(s.replaced and s.backward for s in sites), report
    assert {s.params["window"] for s in sites} == {(None, 0)}


@pytest.mark.parametrize(
    ("context", "name"),
    slow.first(
        2,
        [
            ("checkpoint", "padding"), ("scan+checkpoint", "packed"),
            ("checkpoint", "packed"), ("scan+checkpoint", "array"), ("scan", "bias"),
        ],
        several=True,
    ),
)  # fmt: skip
def test_a_layer_keeps_no_more_than_as_written(context, name, monkeypatch):
    rows = 128
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments(name)]
    monkeypatch.setitem(globals(), "T", rows)  # arguments are kept, of fewer
    step = step_of(name, context)
    fast = rewriter.optimize(step, implementation=FORCED)
    x, w, data = (
        jax.ShapeDtypeStruct([rows if n == 16 else n for n in s.shape], s.dtype)
        for s in shapes
    )

    def a_layer_more(step: Any) -> float:
        few, many = (
            step.lower(x, jax.ShapeDtypeStruct((n, *w.shape[1:]), w.dtype), data)
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
            for n in (2, 6)
        )
        return (many - few) / 4

    assert a_layer_more(fast) <= 1.01 * a_layer_more(jax.jit(step)) + 512


@pytest.mark.parametrize("context", ["scan", "scan+checkpoint"])
def test_a_loop_adds_up_the_gradient_of_a_bias_with_learned_slopes(context):
    """The gradient of the slopes is computed once, from that of the bias."""
    x, w, slopes = arguments("slopes")
    scan, wrap = WRAPS[context]
    step = functools.partial(loss, make=sloped, scan=scan, wrap=wrap)
    step = jax.value_and_grad(step, (0, 1, 2))
    assert read_by(step, (x, w, slopes)) == {"bias f32[1,2,16,16]"}


# -------------------------------------------------------- where masks come from
def kept_on_both_sides(pad: Any) -> Any:
    return pad[:, None, :, None] & pad[:, None, None, :]


def blocks(pad: Any) -> Any:
    same = positions()[:, None] // 4 == positions()[None] // 4
    return (same[None] & pad[:, None])[:, None]


def early(pad: Any) -> Any:
    """Broadcast before it is compared, as flax's masks of whole numbers are."""
    keys = jnp.broadcast_to(pad.astype(jnp.int32)[:, None, None], (B, 1, T, T))
    return jnp.logical_and(causal(), keys) > 0


def started(starts: Any) -> Any:
    return packed(jnp.cumsum(starts, -1))


PAD = IDS != 0
SEGMENTED = "q_segments i32[2,16] kv_segments i32[2,16]"
SOURCES: dict[str, tuple[Any, Any, str]] = {
    "both sides": (kept_on_both_sides, PAD, SEGMENTED),
    "both sides and causal": (
        lambda p: kept_on_both_sides(p) & causal(),
        PAD,
        SEGMENTED,
    ),
    "blocks": (blocks, PAD, f"mask bool[2,1,1,16] {SEGMENTED}"),
    "broadcast first": (early, PAD, "mask bool[2,1,1,16]"),
    "a helper's": (jax.jit(packed), SEGMENTS, SEGMENTED),
    "counted": (started, (SEGMENTS == 0).astype(np.int32), SEGMENTED),
    "a bias": (lambda s: jnp.where(packed(s), 0.0, -1e9), SEGMENTS, SEGMENTED),
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("context", ["checkpoint", "scan"])
def test_masks_are_read_at_their_source(context, name):
    make, data, wanted = SOURCES[name]
    scan, wrap = WRAPS[context]
    step = jax.value_and_grad(
        functools.partial(loss, make=make, scan=scan, wrap=wrap), (0, 1)
    )
    x, w, _ = arguments("packed")
    assert read_by(step, (x, w, data)) == {wanted}


def in_the_carry(x: Any, w: Any, segments: Any) -> Any:
    def turn(carry: Any, w: Any) -> Any:
        return (layer(carry[0], w, carry[1]), carry[1]), None

    (x, _), _ = jax.lax.scan(turn, (x, packed(segments)), w)
    return (x**2).mean()


def by_a_counter(x: Any, w: Any, segments: Any) -> Any:
    mask = packed(segments)
    turn = lambda i, x: layer(x, w[i], mask)
    return (jax.lax.fori_loop(0, LAYERS, turn, x) ** 2).mean()


def in_nested_loops(x: Any, w: Any, segments: Any) -> Any:
    mask = packed(segments)

    @jax.checkpoint
    def group(x: Any, w: Any) -> Any:
        turn = jax.checkpoint(lambda x, w: (layer(x, w, mask), None))
        return jax.lax.scan(turn, x, w)

    x, _ = jax.lax.scan(group, x, w[None])
    return (x**2).mean()


def on_devices(x: Any, w: Any, segments: Any) -> Any:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    data, whole = jax.P("d"), jax.P()

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(data, whole, data),
        out_specs=data,
        check_vma=False,
    )
    def layers(x: Any, w: Any, segments: Any) -> Any:
        mask = packed(segments)
        turn = jax.checkpoint(lambda x, w: (layer(x, w, mask), None))
        return jax.lax.scan(turn, x, w)[0]

    return (layers(x, w, segments) ** 2).mean()


@pytest.mark.parametrize(
    "program", [in_the_carry, by_a_counter, in_nested_loops, on_devices]
)
def test_bodies_are_given_segments(program):
    args = arguments("packed")
    step = jax.value_and_grad(program, (0, 1))
    report = rewriter.explain(step, implementation=FORCED)(*args)
    assert not report.failures
    assert report.counts(backward=True)["attention"] == LAYERS, report
    sites = [s for s in report.sites if s.op == "attention"]
    assert all(s.replaced and SEGMENTED in s.shapes for s in sites), report
    found = rewriter.optimize(step, implementation=FORCED)(*args)
    for got, want in zip(jax.tree.leaves(found), in_float64("packed"), strict=True):
        assert np.linalg.norm(got - want) <= 2e-6 * np.linalg.norm(want)


def test_a_branch_is_given_segments():
    def program(x: Any, w: Any, segments: Any) -> Any:
        mask = packed(segments)

        def turn(x: Any, w: Any) -> Any:
            other = lambda x: x * 2.0
            return jax.lax.cond(x.sum() < 1e9, lambda x: layer(x, w, mask), other, x)

        return jax.lax.scan(lambda x, w: (turn(x, w), None), x, w)[0]

    args = arguments("packed")
    fast = rewriter.optimize(program, implementation=FORCED)
    np.testing.assert_allclose(fast(*args), program(*args), rtol=2e-5, atol=2e-5)
    (site,) = fast.report().sites
    assert site.replaced
    assert SEGMENTED in site.shapes


# ------------------------------------------------------------ steps and blocks
def test_a_left_padded_cache_has_its_own_boolean():
    def step(q: Any, k: Any, v: Any, offset: Any, start: Any) -> Any:
        scores = jnp.einsum("bnh,bsnh->bns", q, k)
        seen = offset[:, None, None] >= positions() - start[:, None, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30))
        return jnp.einsum("bns,bsnh->bnh", weights, v)

    k = np.random.default_rng(2).normal(size=(B, T, N, H)).astype(np.float32)
    args = k[:, 0], k, k, np.array([7, 3], np.int32), np.array([2, 0], np.int32)
    fast = rewriter.optimize(step, implementation=FORCED)
    np.testing.assert_allclose(fast(*args), step(*args), rtol=2e-5, atol=2e-6)
    assert [s.replaced for s in fast.report().sites] == [True]


def in_blocks(q: Any, k: Any, v: Any) -> Any:
    """Causal, by blocks of queries and of keys, as it is written by hand."""
    rows = 4

    def of_queries(block: Any) -> Any:
        q, i = block

        def turn(carry: Any, keys: Any) -> Any:
            out, total, most = carry
            k, v, j = keys
            scores = jnp.einsum("btnh,bsnh->bnts", q, k)
            row, column = (a * rows + jnp.arange(rows) for a in (i, j))
            scores += jnp.where(row[:, None] >= column, 0.0, -1e9)
            new = jnp.maximum(most, scores.max(-1))
            weights, old = jnp.exp(scores - new[..., None]), jnp.exp(most - new)
            out = out * old[..., None] + jnp.einsum("bnts,bsnh->bnth", weights, v)
            return (out, total * old + weights.sum(-1), new), None

        zero = jnp.zeros((B, N, rows))
        start = jnp.zeros((B, N, rows, H)), zero, zero - jnp.inf
        (out, total, _), _ = jax.lax.scan(turn, start, (split(k), split(v), steps))
        return (out / total[..., None]).swapaxes(1, 2)

    def split(x: Any) -> Any:
        return jnp.moveaxis(x.reshape(B, -1, rows, N, H), 1, 0)

    steps = jnp.arange(T // rows)
    return jnp.moveaxis(jax.lax.map(of_queries, (split(q), steps)), 0, 1)


def test_blocks_of_queries_have_positions_of_the_loop():
    k = np.random.default_rng(3).normal(size=(3, B, T, N, H)).astype(np.float32)
    fast = rewriter.optimize(in_blocks, implementation=FORCED)
    np.testing.assert_allclose(fast(*k), in_blocks(*k), rtol=2e-5, atol=2e-6)
    (site,) = fast.report().sites
    assert site.replaced
    assert "offset i32" in site.shapes
    assert "mask" not in site.shapes


# --------------------------------------------------------------- near misses
@jax.custom_jvp
def with_sums(scores: Any) -> Any:
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True), weights.sum(-1)


@with_sums.defjvp
def _(primals: Any, tangents: Any) -> Any:
    weights, sums = with_sums(*primals)
    moved = weights * tangents[0]
    moved -= weights * moved.sum(-1, keepdims=True)
    return (weights, sums), (moved, jnp.zeros_like(sums))


def weighing(weights: Any) -> Any:
    def program(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("btnh,bsnh->bnts", q, k)
        return jnp.einsum("bnts,bsnh->btnh", weights(scores), v)

    return program


def test_reports_say_what_an_array_costs():
    texts = {}
    for name in ("array", "packed"):
        step = step_of(name, "scan")
        texts[name] = str(rewriter.explain(step)(*arguments(name)))
    assert "a mask of 2×1×16×16, 512 B is read" in texts["array"]
    known = rewriter.explain(step_of("array", "plain"), target="h200")
    assert " µs or more, is read in each pass" in str(known(*arguments("array")))
    assert "keys of the same segment" in texts["packed"]
    assert "is read in each pass" not in texts["packed"]


def test_layers_with_one_mask_are_proved_once(monkeypatch):
    """A mask that they share does not tell them apart."""
    proofs = []
    first = search.proved_gradients

    def counted(*given: Any, **how: Any) -> Any:
        proofs.append(given)
        return first(*given, **how)

    monkeypatch.setattr(search, "proved_gradients", counted)
    read_by(step_of("packed", "checkpoint"), arguments("packed"))
    assert len(proofs) == 1


def test_a_softmax_with_a_proved_rule_of_its_own_is_found():
    x = np.ones((B, T, N, H), np.float32)
    report = rewriter.explain(weighing(lambda s: with_sums(s)[0]))(x, x, x)
    assert [site.op for site in report.sites] == ["attention"]
