"""Attention over keys in several arrays: two caches, a prefix and what follows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from tests.spellings.check import Case, disagreements
from tests.support.arrays import normal

B, T, N, H, FIRST, THEN = 2, 6, 4, 8, 12, 6
FILL = -2.38e38
LENGTHS, MORE = (jnp.asarray(np.array(x, np.int32)) for x in ([9, 4], [3, 6]))


Q = normal(B, T, N, H)
ONE = normal(B, 1, N, H, seed=9)
K1, V1 = (normal(B, FIRST, N, H, seed=i) for i in (1, 2))
K2, V2 = (normal(B, THEN, N, H, seed=i) for i in (3, 4))
CAUSAL = jnp.asarray(np.tri(T, THEN, dtype=bool))


def local(q, k, v, mask=None, scores="btnh,bsnh->bnts", weigh="bnts,bsnh->btnh"):
    """Values weighed without division, the largest score, the sum of weights."""
    s = jnp.einsum(scores, q, k) * H**-0.5
    if mask is not None:
        s = jnp.where(mask, s, FILL)
    m = s.max(-1, keepdims=True)
    e = jnp.exp(s - m)
    total = e.sum(-1, keepdims=True)
    return jnp.einsum(weigh, e, v), *(jnp.moveaxis(x, 1, 2) for x in (m, total))


def merged(parts):
    """Parts as of one softmax, by their largest scores and sums."""
    most = functools.reduce(jnp.maximum, [m for _, m, _ in parts])
    total = sum(jnp.exp(m - most) * s for _, m, s in parts)
    return sum(jnp.exp(m - most) / total * o for o, m, _ in parts)


def until(lengths, keys):
    return (jnp.arange(keys) < lengths[:, None])[:, None, None]


def two_caches(q, k1, v1, k2, v2):
    return merged([local(q, k1, v1), local(q, k2, v2)])


def two_lengths(q, k1, v1, k2, v2):
    before = local(q, k1, v1, until(LENGTHS, FIRST))
    return merged([before, local(q, k2, v2, until(MORE, THEN))])


def quotient(q, k1, v1, k2, v2):
    (o1, m1, s1), (o2, m2, s2) = local(q, k1, v1), local(q, k2, v2)
    m = jnp.maximum(m1, m2)
    e1, e2 = jnp.exp(m1 - m), jnp.exp(m2 - m)
    return (o1 * e1 + o2 * e2) / (e1 * s1 + e2 * s2)


def prefix_and_causal(q, k1, v1, k2, v2):
    return merged([local(q, k1, v1), local(q, k2, v2, CAUSAL)])


def scores_joined(q, k1, v1, k2, v2):
    s = [jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5 for k in (k1, k2)]
    s[1] = jnp.where(CAUSAL, s[1], -1e30)
    p = jax.nn.softmax(jnp.concatenate(s, -1))
    weigh = functools.partial(jnp.einsum, "bnts,bsnh->btnh")
    return weigh(p[..., :FIRST], v1) + weigh(p[..., FIRST:], v2)


def logsumexps(q, k1, v1, k2, v2):
    def part(k, v):
        s = jnp.einsum("btnh,bsnh->btns", q, k) * H**-0.5
        lse = jax.nn.logsumexp(s, -1, keepdims=True)
        return jnp.einsum("btns,bsnh->btnh", jnp.exp(s - lse), v), lse

    (o1, l1), (o2, l2) = part(k1, v1), part(k2, v2)
    both = jnp.logaddexp(l1, l2)
    return o1 * jnp.exp(l1 - both) + o2 * jnp.exp(l2 - both)


def grouped_in_two_layouts(q, k1, v1, k2, v2):
    """Two heads of keys for four of queries; the second cache holds keys first."""

    def part(k, v, cache):
        s = jnp.einsum(f"btkgh,{cache}->bkgts", q.reshape(B, -1, 2, 2, H), k)
        m = s.max(-1, keepdims=True)
        e = jnp.exp(s - m)
        out = jnp.einsum(f"bkgts,{cache}->btkgh", e, v).reshape(B, -1, N, H)
        rows = (m, e.sum(-1, keepdims=True))
        return out, *(jnp.moveaxis(x, 3, 1).reshape(B, -1, N, 1) for x in rows)

    k2, v2 = (x.transpose(1, 0, 2, 3) for x in (k2, v2))
    first = part(k1[:, :, :2], v1[:, :, :2], "bskh")
    return merged([first, part(k2[:, :, :2], v2[:, :, :2], "sbkh")])


def three(q, k1, v1, k2, v2):
    return merged(
        [local(q, *kv) for kv in ((k1, v1), (k2, v2), (k2 + 1, v1[:, :THEN]))]
    )


FOUND: dict[str, tuple[Callable[..., Any], jax.Array, int, dict[str, Any]]] = {
    "two_caches": (two_caches, ONE, 18, {}),
    "two_caches_and_some_queries": (two_caches, Q, 18, {}),
    "two_lengths": (two_lengths, ONE, 18, {"empty_rows": "mean"}),
    "quotient": (quotient, ONE, 18, {}),
    "logsumexps": (logsumexps, Q, 18, {}),
    "prefix_and_causal": (prefix_and_causal, Q, 18, {"window": (None, 0), "shift": 12}),
    "scores_joined": (scores_joined, Q, 18, {"window": (None, 0), "shift": 12}),
    "grouped_in_two_layouts": (grouped_in_two_layouts, ONE, 18, {}),
    "three": (three, Q, 24, {}),
}


@pytest.mark.parametrize("name", FOUND)
def test_found_as_one_attention(name: str) -> None:
    fn, q, keys, params = FOUND[name]
    report = rewriter.explain(fn)(q, K1, V1, K2, V2)
    assert not report.failures
    assert not report.misses
    (site,) = report.sites
    heads = 2 if name.startswith("grouped") else N
    assert f"k f32[{B},{keys},{heads},{H}]" in site.shapes
    assert params.items() <= dict(site.params).items()
    assert ("mask" in site.shapes) == (name == "two_lengths")
    case = Case(name, fn, (q, K1, V1, K2, V2), "attention", "empty_rows" not in params)
    assert not disagreements([case])


def test_the_program_holds_one_softmax() -> None:
    forced = rewriter.optimize(two_caches, implementation={"attention": "reference"})
    before = jax.make_jaxpr(two_caches)(ONE, K1, V1, K2, V2)
    after = forced.jaxpr(ONE, K1, V1, K2, V2)
    assert str(before).count("dot_general") == 4
    assert "dot_general" not in str(after)
    assert str(after).count("concatenate") == 2


def test_gradients_are_found() -> None:
    def loss(*args):
        return (two_caches(*args) ** 2).sum()

    step = jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4))
    args = Q, K1, V1, K2, V2
    fast = rewriter.optimize(
        step, implementation={"attention": "reference"}, strict=True
    )
    for got, want in zip(
        jax.tree.leaves(fast(*args)), jax.tree.leaves(step(*args)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


LOOK_ALIKES: dict[str, Callable[..., Any]] = {
    "one_maximum_forgotten": lambda q, k1, v1, k2, v2: _merged_wrongly(
        local(q, k1, v1), local(q, k2, v2), 1.0, 0.0
    ),
    "one_part_twice": lambda q, k1, v1, k2, v2: _merged_wrongly(
        local(q, k1, v1), local(q, k2, v2), 2.0, 1.0
    ),
    "other_queries": lambda q, k1, v1, k2, v2: merged(
        [local(q, k1, v1), local(jnp.sin(q), k2, v2)]
    ),
    "other_scale": lambda q, k1, v1, k2, v2: merged(
        [local(q, k1, v1), local(2 * q, k2, v2)]
    ),
    "total_of_one": lambda q, k1, v1, k2, v2: (
        (local(q, k1, v1)[0] + local(q, k2, v2)[0]) / local(q, k1, v1)[2]
    ),
}


def _merged_wrongly(one, other, times, rescaled):
    (o1, m1, s1), (o2, m2, s2) = one, other
    m = jnp.maximum(m1, m2)
    e1, e2 = jnp.exp(m1 - m), jnp.exp(m2 - m)
    return (o1 * e1 + times * o2 * e2) / (e1 * s1 + (e2 if rescaled else 1) * s2)


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_are_refused(name: str) -> None:
    report = rewriter.explain(LOOK_ALIKES[name])(Q, K1, V1, K2, V2)
    assert not report.failures
    assert not report.sites
    assert report.misses


MEMORY = normal(2, 3, N, H, seed=5)


def with_memory(q, k, v, memory, times=1.0):
    """Learned keys and values that a batch shares, joined to the scores."""
    own, more = jnp.einsum("btnh,bsnh->bnts", q, k), memory[0]
    shared = jnp.einsum("btnh,snh->bnts", q, more) * times
    keep = jnp.where(CAUSAL, own, FILL)
    weights = jax.nn.softmax(jnp.concatenate([shared, keep], -1) * H**-0.5)
    values = jnp.broadcast_to(memory[1], (B, *memory[1].shape))
    return jnp.einsum("bnts,bsnh->btnh", weights, jnp.concatenate([values, v], 1))


@pytest.mark.once
@pytest.mark.parametrize("times", [1.0, 2.0])
def test_keys_that_a_batch_shares(times: float) -> None:
    """They are found with their gradients, unless their scores are made otherwise."""

    def fn(*args):
        loss = lambda *args: (with_memory(*args, times) ** 2).sum()
        return jax.value_and_grad(loss, (0, 1, 2, 3))(*args)

    args = Q, K2, V2, MEMORY
    new = rewriter.optimize(fn, implementation={"attention": "memory_bounded"})
    sites = new.report(*args).sites
    assert [bool(s.backward) for s in sites] == ([True] if times == 1 else [])
    with jax.enable_x64(True):
        wide = jax.jit(fn)(*(np.asarray(a, np.float64) for a in args))
    for a, b in zip(*map(jax.tree.leaves, (new(*args), wide)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def test_two_softmaxes_stay_two() -> None:
    def fn(q, k1, v1, k2, v2):
        (o1, _, s1), (o2, _, s2) = local(q, k1, v1), local(q, k2, v2)
        return o1 / s1 + o2 / s2

    assert len(rewriter.explain(fn)(Q, K1, V1, K2, V2).sites) == 2
    assert not disagreements([Case("two", fn, (Q, K1, V1, K2, V2), "attention")])
