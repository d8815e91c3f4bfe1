"""Latent attention: what is found of it, before and after its weights are absorbed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.ops.registry import registry

pytestmark = pytest.mark.once

B, S, N, C, R = 2, 24, 4, 32, 8
"""Sequences, keys, heads, columns of the latent, and rotary columns."""

SCALE = 24**-0.5
FORCED = {"latent_attention": "joined", "attention": "memory_bounded"}


def normal(*shape: int, seed: int = 0) -> Any:
    made = np.random.default_rng(seed).normal(size=shape) * 0.7
    return jnp.asarray(made.astype(np.float32))


def inputs(t: int = 1) -> tuple[Any, ...]:
    """Queries for the latent and the rotary keys, both of these, and lengths."""
    return (
        normal(B, t, N, C, seed=1), normal(B, t, N, R, seed=2),
        normal(B, S, C, seed=3), normal(B, S, R, seed=4), jnp.array([5, S]),
    )  # fmt: skip


def weights(scores: Any, lengths: Any) -> Any:
    """Of scores [b, h, t, s] or [b, t, h, s], up to lengths."""
    keep = jnp.arange(S) < lengths[:, None, None, None]
    return jax.nn.softmax(jnp.where(keep, scores, -1e30))


def of_latent(p: Any, latent: Any) -> Any:
    return jnp.einsum("bhts,bsc->bthc", p, latent)


# ---------------------------------------------------------------- against a cache
def two_products(q, q_rope, latent, k_rope, lengths):
    s = jnp.einsum("bthc,bsc->bhts", q, latent)
    s += jnp.einsum("bthr,bsr->bhts", q_rope, k_rope)
    return of_latent(weights(s * SCALE, lengths), latent)


def rotary_first(q, q_rope, latent, k_rope, lengths):
    s = jnp.einsum("bthr,bsr->bhts", q_rope, k_rope) * SCALE
    s += jnp.einsum("bthc,bsc->bhts", q * SCALE, latent)
    return of_latent(weights(s, lengths), latent)


def joined(q, q_rope, latent, k_rope, lengths):
    q, k = (jnp.concatenate(x, -1) for x in ((q, q_rope), (latent, k_rope)))
    s = jnp.einsum("bthd,bsd->bhts", q, k)
    return of_latent(weights(s * SCALE, lengths), latent)


def joined_the_other_way(q, q_rope, latent, k_rope, lengths):
    q, k = (jnp.concatenate(x, -1) for x in ((q_rope, q), (k_rope, latent)))
    s = jnp.einsum("bthd,bsd->bhts", q, k)
    return of_latent(weights(s * SCALE, lengths), latent)


def one_cache(q, q_rope, latent, k_rope, lengths):
    cache = kept(latent, k_rope)
    s = jnp.einsum("bthd,bsd->bhts", jnp.concatenate((q, q_rope), -1), cache)
    return of_latent(weights(s * SCALE, lengths), cache[..., :C])


def one_cache_in_parts(q, q_rope, latent, k_rope, lengths):
    cache = kept(latent, k_rope)
    return two_products(q, q_rope, *jnp.split(cache, [C], -1), lengths)


def one_cache_with_a_head_axis(q, q_rope, latent, k_rope, lengths):
    cache = kept(latent[:, None], k_rope[:, None])
    q = jnp.concatenate((q, q_rope), -1).swapaxes(1, 2)
    p = weights(q @ cache.swapaxes(2, 3) * SCALE, lengths)
    return (p @ cache[..., :C]).swapaxes(1, 2)


def joined_with_a_head_axis(q, q_rope, latent, k_rope, lengths):
    k = jnp.concatenate((latent, k_rope), -1)[:, None]
    q = jnp.concatenate((q, q_rope), -1).swapaxes(1, 2)
    p = weights(q @ k.swapaxes(2, 3) * SCALE, lengths)
    return (p @ latent[:, None]).swapaxes(1, 2)


def absorbed(q, q_rope, latent, k_rope, lengths):
    up, down = normal(C, N, 16, seed=5), normal(C, N, 12, seed=6)
    q = jnp.einsum("bthd,chd->bthc", q[..., :16], up)
    out = two_products(q, q_rope, latent, k_rope, lengths)
    return jnp.einsum("bthc,chv->bthv", out, down)


def sequence_by_sequence(q, q_rope, latent, k_rope, lengths):
    def one(q, q_rope, latent, k_rope, length):
        s = jnp.einsum("thc,sc->hts", q, latent)
        s += jnp.einsum("thr,sr->hts", q_rope, k_rope)
        keep = jnp.arange(S) < length
        p = jax.nn.softmax(jnp.where(keep, s * SCALE, -1e30))
        return jnp.einsum("hts,sc->thc", p, latent)

    return jax.vmap(one)(q, q_rope, latent, k_rope, lengths)


def exponentials(q, q_rope, latent, k_rope, lengths):
    s = jnp.einsum("bthc,bsc->bths", q, latent)
    s = (s + jnp.einsum("bthr,bsr->bths", q_rope, k_rope)) * SCALE
    s = jnp.where(jnp.arange(S) < lengths[:, None, None, None], s, -1e30)
    p = jnp.exp(s - s.max(-1, keepdims=True))
    return jnp.einsum("bths,bsc->bthc", p, latent) / p.sum(-1)[..., None]


def written_into_the_cache(q, q_rope, latent, k_rope, lengths):
    new = normal(B, 1, C, seed=7).astype(latent.dtype)
    at = lengths - 1
    put = lambda x, new, i: jax.lax.dynamic_update_slice_in_dim(x, new, i, 0)
    latent = jax.vmap(put)(latent, new, at)
    return two_products(q, q_rope, latent, k_rope, lengths)


def layers(q, q_rope, latent, k_rope, lengths):
    stacked = jnp.stack([latent, latent[:, ::-1]]), jnp.stack([k_rope, k_rope * 2])

    def layer(x, cache):
        return x + jax.checkpoint(two_products)(x, q_rope, *cache, lengths), None

    return jax.lax.scan(layer, q, stacked)[0]


def without_rotary_keys(q, q_rope, latent, k_rope, lengths):
    del q_rope, k_rope
    s = jnp.einsum("bthc,bsc->bhts", q, latent)
    return of_latent(weights(s * SCALE, lengths), latent)


def kept(*parts: Any) -> Any:
    """A cache that holds several arrays side by side."""
    return jax.lax.optimization_barrier(jnp.concatenate(parts, -1))


SPELLINGS = (
    two_products, rotary_first, joined, joined_the_other_way, one_cache,
    one_cache_in_parts, one_cache_with_a_head_axis, joined_with_a_head_axis, absorbed,
    sequence_by_sequence, exponentials, written_into_the_cache, layers,
    without_rotary_keys,
)  # fmt: skip


def exact(f: Any, args: tuple[Any, ...]) -> Any:
    with jax.enable_x64(True):
        wide = [np.asarray(x, "float64") if x.dtype.kind == "f" else x for x in args]
        return np.asarray(f(*map(jnp.asarray, wide)))


@pytest.mark.parametrize("f", SPELLINGS, ids=lambda f: f.__name__)
def test_decoding(f: Any) -> None:
    """The latent is found as keys and as values, and rotary keys where they lie."""
    args = inputs()
    fast = rewriter.optimize(f, implementation=FORCED)
    (site,) = fast.report(*args).sites
    assert (site.op, site.form, site.kernel) == (
        "attention", "latent_attention", "joined",
    )  # fmt: skip
    if f is without_rotary_keys:
        assert "rope" not in site.shapes
    elif "one_cache" in f.__name__:
        assert f"latent f32[{B},{S},{C + R}]" in site.shapes
        assert "k_rope" not in site.shapes
    else:
        assert f"latent f32[{B},{S},{C}]" in site.shapes
        assert f"k_rope f32[{B},{S},{R}]" in site.shapes
    np.testing.assert_allclose(fast(*args), exact(f, args), rtol=2e-5, atol=2e-5)


def test_several_queries() -> None:
    """Each sees the keys up to its own position."""

    def f(q, q_rope, latent, k_rope, first):
        s = jnp.einsum("bthc,bsc->bhts", q, latent)
        s += jnp.einsum("bthr,bsr->bhts", q_rope, k_rope)
        at = first[:, None] + jnp.arange(q.shape[1])
        keep = jnp.arange(S) <= at[:, :, None]
        p = jax.nn.softmax(jnp.where(keep[:, None], s * SCALE, -jnp.inf))
        return of_latent(p, latent)

    *arrays, _ = inputs(3)
    args = (*arrays, jnp.array([2, S - 3], jnp.int32))
    fast = rewriter.optimize(f, implementation=FORCED)
    (site,) = fast.report(*args).sites
    assert site.form == "latent_attention"
    np.testing.assert_allclose(fast(*args), exact(f, args), rtol=2e-5, atol=2e-5)


# ---------------------------------------------------------------------- in pages
TABLE = np.array([[3, 0, 5], [1, 2, 4]])
"""The pages of each sequence, of 8 keys each."""


def pooled(*parts: Any) -> Any:
    """A pool of pages, with the keys of all sequences in the order of `TABLE`."""
    x = jnp.concatenate(parts, -1)
    pages = x.reshape(TABLE.size, 8, -1)
    pool = jnp.zeros_like(pages).at[TABLE.reshape(-1)].set(pages)
    return jax.lax.optimization_barrier(pool)


def joined_pages(pool: Any, table: Any = TABLE) -> Any:
    return pool[jnp.asarray(table)].reshape(B, S, pool.shape[-1])


def two_pools(q, q_rope, latent, k_rope, lengths):
    latent, k_rope = (joined_pages(pooled(x)) for x in (latent, k_rope))
    return two_products(q, q_rope, latent, k_rope, lengths)


def one_pool(q, q_rope, latent, k_rope, lengths):
    cache = joined_pages(pooled(latent, k_rope))
    s = jnp.einsum("bthd,bsd->bhts", jnp.concatenate((q, q_rope), -1), cache)
    return of_latent(weights(s * SCALE, lengths), cache[..., :C])


def one_pool_in_parts(q, q_rope, latent, k_rope, lengths):
    cache = joined_pages(pooled(latent, k_rope))
    return two_products(q, q_rope, *jnp.split(cache, [C], -1), lengths)


def one_pool_with_a_head_axis(q, q_rope, latent, k_rope, lengths):
    cache = joined_pages(pooled(latent, k_rope)[:, :, None])
    return two_products(q, q_rope, *jnp.split(cache, [C], -1), lengths)


def taken_from_a_pool(q, q_rope, latent, k_rope, lengths):
    take = lambda pool: jnp.take(pool, jnp.asarray(TABLE), axis=0).reshape(B, S, -1)
    latent, k_rope = (take(pooled(x)) for x in (latent, k_rope))
    return two_products(q, q_rope, latent, k_rope, lengths)


PAGED = (
    two_pools, one_pool, one_pool_in_parts, one_pool_with_a_head_axis,
    taken_from_a_pool,
)  # fmt: skip


@pytest.mark.parametrize("f", PAGED, ids=lambda f: f.__name__)
def test_decoding_from_pages(f: Any) -> None:
    args = inputs()
    forced = {**FORCED, "paged_latent_attention": "joined"}
    fast = rewriter.optimize(f, implementation=forced)
    (site,) = fast.report(*args).sites
    assert (site.form, site.kernel) == ("paged_latent_attention", "joined")
    whole = "one_pool" in f.__name__
    assert f"latent_pages f32[{TABLE.size},8,{C + R * whole}]" in site.shapes
    assert ("k_rope_pages" in site.shapes) != whole
    np.testing.assert_allclose(fast(*args), exact(f, args), rtol=2e-5, atol=2e-5)


def test_pages_of_two_tables() -> None:
    """A kernel reads one table: the cache is gathered first."""

    def f(q, q_rope, latent, k_rope, lengths):
        latent = joined_pages(pooled(latent))
        k_rope = joined_pages(pooled(k_rope), TABLE[::-1])
        return two_products(q, q_rope, latent, k_rope, lengths)

    forced = {**FORCED, "paged_latent_attention": "joined"}
    fast, args = rewriter.optimize(f, implementation=forced), inputs()
    (site,) = fast.report(*args).sites
    assert site.form == "latent_attention"
    np.testing.assert_allclose(fast(*args), exact(f, args), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("form", ["latent_attention", "paged_latent_attention"])
def test_what_may_be_split_over_devices(form: str) -> None:
    """Heads too, which are queries of one head where each sequence has one query."""
    op = registry().op(form)
    rule = op.spread(op.defaults)
    assert rule.along == frozenset("btn")
    assert rule.local is not None


def test_what_decides() -> None:
    """A Hopper GPU takes the form where its kernel is estimated to be faster."""
    shape = lambda *x: jax.ShapeDtypeStruct(x, jnp.bfloat16)

    def step(q, q_rope, latent, k_rope, lengths):
        s = jnp.einsum("bthc,bsc->bhts", q, latent)
        s += jnp.einsum("bthr,bsr->bhts", q_rope, k_rope)
        keep = jnp.arange(s.shape[-1]) < lengths[:, None, None, None]
        s = jnp.where(keep, s.astype(jnp.float32) * SCALE, -jnp.inf)
        return of_latent(jax.nn.softmax(s).astype(q.dtype), latent)

    def site(heads: int, wide: int, target: str) -> Any:
        args = (
            shape(64, 1, heads, wide), shape(64, 1, heads, 64), shape(64, 4096, wide),
            shape(64, 4096, 64), jax.ShapeDtypeStruct((64,), jnp.int32),
        )  # fmt: skip
        return rewriter.explain(step, target=target, tune="off")(*args).sites[0]

    found = site(128, 512, "h100")
    assert (found.form, found.kernel) == ("latent_attention", "hopper_latent")
    assert site(128, 512, "a100").form == ""
    other = site(128, 192, "h100")
    assert other.form == ""
    assert "a latent of 192 columns" in str(dict(other.not_chosen))


# ------------------------------------------------------------------- look-alikes
def other_values(q, q_rope, latent, k_rope, lengths):
    s = jnp.einsum("bthc,bsc->bhts", q, latent)
    s += jnp.einsum("bthr,bsr->bhts", q_rope, k_rope)
    return of_latent(weights(s * SCALE, lengths), normal(B, S, C, seed=9))


def scaled_values(q, q_rope, latent, k_rope, lengths):
    s = jnp.einsum("bthc,bsc->bhts", q, latent)
    s += jnp.einsum("bthr,bsr->bhts", q_rope, k_rope)
    return of_latent(weights(s * SCALE, lengths), latent * normal(C, seed=8))


def last_columns(q, q_rope, latent, k_rope, lengths):
    cache = kept(latent, k_rope)
    s = jnp.einsum("bthd,bsd->bhts", jnp.concatenate((q, q_rope), -1), cache)
    return of_latent(weights(s * SCALE, lengths), cache[..., R:])


def reversed_columns(q, q_rope, latent, k_rope, lengths):
    s = jnp.einsum("bthc,bsc->bhts", q, latent[..., ::-1])
    s += jnp.einsum("bthr,bsr->bhts", q_rope, k_rope)
    return of_latent(weights(s * SCALE, lengths), latent)


def values_of_the_next_token(q, q_rope, latent, k_rope, lengths):
    k = jnp.concatenate([latent, k_rope], -1)
    s = jnp.einsum("bthd,bsd->bhts", jnp.concatenate((q, q_rope), -1), k)
    return of_latent(weights(s * SCALE, lengths), jnp.roll(latent, -1, 1))


def values_of_another_sequence(q, q_rope, latent, k_rope, lengths):
    k = jnp.concatenate([latent, k_rope], -1)
    s = jnp.einsum("bthd,bsd->bhts", jnp.concatenate((q, q_rope), -1), k)
    return of_latent(weights(s * SCALE, lengths), latent[::-1])


def keys_of_each_head(q, q_rope, latent, k_rope, lengths):
    keys = latent[:, :, None] + normal(S, N, C, seed=8)
    s = jnp.einsum("bthc,bshc->bhts", q, keys)
    s += jnp.einsum("bthr,bsr->bhts", q_rope, k_rope)
    return of_latent(weights(s * SCALE, lengths), latent)


def three_products(q, q_rope, latent, k_rope, lengths):
    s = jnp.einsum("bthc,bsc->bhts", q, latent)
    s += jnp.einsum("bthr,bsr->bhts", q_rope, k_rope)
    s += jnp.einsum("bthr,bsr->bhts", q_rope[..., ::-1], normal(B, S, R, seed=8))
    return of_latent(weights(s * SCALE, lengths), latent)


def rounded_values(q, q_rope, latent, k_rope, lengths):
    s = jnp.einsum("bthc,bsc->bhts", q, latent)
    s += jnp.einsum("bthr,bsr->bhts", q_rope, k_rope)
    values = latent.astype(jnp.bfloat16).astype(latent.dtype)
    return of_latent(weights(s * SCALE, lengths), values)


LOOK_ALIKES = (
    other_values, scaled_values, last_columns, reversed_columns,
    values_of_the_next_token, values_of_another_sequence, keys_of_each_head,
    three_products, rounded_values,
)  # fmt: skip


@pytest.mark.parametrize("f", LOOK_ALIKES, ids=lambda f: f.__name__)
def test_look_alikes(f: Any) -> None:
    """Attention may be found there, but none whose values are the keys' columns."""
    args = inputs()
    fast = rewriter.optimize(f, implementation=FORCED)
    assert all(not site.form for site in fast.report(*args).sites)
    if f is not rounded_values:  # float64 does not round them
        np.testing.assert_allclose(fast(*args), exact(f, args), rtol=3e-5, atol=3e-5)
