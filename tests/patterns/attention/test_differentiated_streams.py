"""Gradients of an online softmax by hand, where the program computes them itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter
from tests.patterns.attention import test_blocks_of_keys as streams
from tests.patterns.attention.test_blocks_of_keys import (
    BLOCK,
    FOUND,
    B,
    H,
    K,
    N,
    Q,
    S,
    T,
    V,
    begin,
    blocks,
    divided,
    dots,
    exact,
    gradients,
    near,
    step,
)  # fmt: skip

pytestmark = pytest.mark.once

FORCED = {"attention": "memory_bounded"}


def both(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The result and the gradients, as a step of training computes them."""
    weighed = streams.loss(lambda x: x)

    def loss(*args):
        out = fn(*args)
        return weighed(out), out

    def run(*args):
        (_, out), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*args)
        return out, grads

    return run


def stopped(q: Any, k: Any, v: Any, *, alpha: Callable = lambda x: x) -> Any:
    """No gradient passes to the largest scores."""

    def body(carry, x):
        m, total, acc = carry
        s = dots(q, x[0])
        new = lax.stop_gradient(jnp.maximum(m, s.max(-1)))
        p, a = jnp.exp(s - new[..., None]), alpha(jnp.exp(m - new))
        more = jnp.einsum("bnts,bnsh->bnth", p, x[1])
        return (new, total * a + p.sum(-1), acc * a[..., None] + more), None

    return divided(lax.scan(body, begin(), (blocks(k), blocks(v)))[0])


def saved(policy: Any) -> Callable[..., Any]:
    """A checkpoint around each step."""

    def fn(q, k, v):
        def body(carry, x):
            return step(carry, dots(q, x[0]), x[1]), None

        body = jax.checkpoint(body, policy=policy)
        return divided(lax.scan(body, begin(), (blocks(k), blocks(v)))[0])

    return fn


def block_by_block(
    masked: bool,
    add: bool = False,
    skip: bool = False,
    sliced: bool = False,
    around: Callable = lambda f: f,
    keys: Callable = lambda x: x,
) -> Callable[..., Any]:
    """Blocks of queries are mapped over, each with a loop over blocks of keys.

    Blocks without keys may be skipped, and blocks of keys sliced in the loop.
    """

    def fn(q, k, v):
        def queries(x):
            qb, i = x

            def block(carry, kb, vb, j):
                s = dots(qb, keys(kb))
                t, n = i * 8 + jnp.arange(8)[:, None], j * 8 + jnp.arange(8)
                if masked and add:
                    s = s + jnp.where(t >= n, 0.0, -1e9)
                elif masked:
                    s = jnp.where(t >= n, s, -jnp.inf)
                return step(carry, s, vb)

            def body(carry, x):
                kb, vb, j = x
                if skip:
                    same = lambda carry, *_: carry
                    return lax.cond(i < j, same, around(block), carry, *x), None
                return around(block)(carry, kb, vb, j), None

            def at(j, carry):
                kb, vb = (lax.dynamic_slice_in_dim(x, j * 8, 8, 2) for x in (k, v))
                return around(block)(carry, kb, vb, j)

            first = begin(-1e30, 8)
            if sliced:
                return divided(lax.fori_loop(0, S // 8, at, first))
            xs = blocks(k), blocks(v), jnp.arange(S // 8)
            return divided(lax.scan(body, first, xs)[0])

        out = lax.map(queries, (blocks(q), jnp.arange(T // 8)))
        return jnp.moveaxis(out, 0, 2).reshape(B, N, T, H)

    return fn


def chunk_by_chunk(q, k, v, *, totals: Callable = lambda x: x) -> Any:
    """Parts of all blocks of keys are made first, and merged at the end."""

    @jax.checkpoint
    def part(q, k, v):
        s = dots(q, k)
        m = lax.stop_gradient(s.max(-1, keepdims=True))
        p = jnp.exp(s - m)
        return jnp.einsum("bnts,bnsh->bnth", p, v), p.sum(-1), m[..., 0]

    def queries(at, _):
        qb = lax.dynamic_slice_in_dim(q, at, 8, 2)
        cut = lambda i: (lax.dynamic_slice_in_dim(x, i, BLOCK, 2) for x in (k, v))
        starts = jnp.arange(0, S, BLOCK)
        values, sums, most = lax.map(lambda i: part(qb, *cut(i)), starts)
        d = jnp.exp(most - most.max(0))
        whole = (values * d[..., None]).sum(0)
        return at + 8, whole / totals((sums * d).sum(0))[..., None]

    _, out = lax.scan(queries, 0, None, length=T // 8)
    return jnp.moveaxis(out, 0, 2).reshape(B, N, T, H)


def unrolled(q, k, v, *, largest: Callable = lambda x: x, **how: Any) -> Any:
    """Two blocks of keys, one after the other."""
    carry = begin()
    for lo in (0, 12):
        s = dots(q, k[:, :, lo : lo + 12])
        m, total, acc = carry
        new = largest(jnp.maximum(m, s.max(-1)))
        p, alpha = jnp.exp(s - new[..., None]), jnp.exp(m - new)
        alpha = how.get("alpha", lambda x: x)(alpha)
        more = jnp.einsum("bnts,bnsh->bnth", p, v[:, :, lo : lo + 12])
        carry = new, total * alpha + p.sum(-1), acc * alpha[..., None] + more
    return divided(carry)


PROGRAMS: dict[str, Callable[..., Any]] = {
    name: FOUND[name][0]
    for name in (
        "scanned", "looped", "scanned_backwards", "looped_causal", "scanned_with_bias",
        "logarithm_of_the_sum_carried", "scanned_with_padding", "window_at_each_step",
        "segments_at_each_step", "powers_of_two", "infinite_maximum_guarded",
        "one_head_mapped", "queries_in_a_map", "queries_updated_in_a_loop",
    )
} | {
    "no gradient of the maximum": stopped,
    "nothing is saved": saved(None),
    "products are saved": saved(jax.checkpoint_policies.dots_saveable),
    "blocks of queries": block_by_block(False),
    "blocks of queries, causal": block_by_block(True),
    "blocks of queries, added": block_by_block(True, add=True),
    "blocks of queries, skipped": block_by_block(False, skip=True),
    "blocks of queries, causal, skipped": block_by_block(True, skip=True),
    "blocks of queries, causal, each run again": block_by_block(
        True, around=jax.checkpoint
    ),
    "blocks of queries, causal, keys sliced": block_by_block(True, sliced=True),
    "blocks of queries, causal, run again": jax.checkpoint(block_by_block(True)),
    "blocks of queries, causal, skipped, run again": jax.checkpoint(
        block_by_block(True, skip=True)
    ),
    "chunk by chunk": chunk_by_chunk,
    "one after the other": unrolled,
    "one after the other, no gradient of the maximum": functools.partial(
        unrolled, largest=lax.stop_gradient
    ),
    "in a jit": jax.jit(streams.scanned),
    "run again": jax.checkpoint(stopped),
    "run again, causal": jax.checkpoint(FOUND["looped_causal"][0]),
    "run again, nothing is saved": jax.checkpoint(saved(None)),
    "run again, products are saved": jax.checkpoint(
        saved(jax.checkpoint_policies.dots_saveable)
    ),
    "run again but products, blocks of queries, causal": jax.checkpoint(
        block_by_block(True), policy=jax.checkpoint_policies.dots_saveable
    ),
    "run again but products, blocks of queries, causal, keys sliced": jax.checkpoint(
        block_by_block(True, sliced=True),
        policy=jax.checkpoint_policies.dots_saveable,
    ),
    "everything is saved": jax.checkpoint(
        stopped, policy=jax.checkpoint_policies.everything_saveable
    ),
}  # fmt: skip


SOME_BY_JAX = {"logarithm_of_the_sum_carried", "one_head_mapped"}
"""Programs whose gradients of queries and keys are left as written."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_found(name: str) -> None:
    """Both loops are gone, and the numbers are those of the program in float64."""
    fn = PROGRAMS[name]
    new = rewriter.optimize(both(fn), implementation=FORCED, strict=True)
    sites = new.report(Q, K, V).sites
    assert any(s.replaced and s.backward for s in sites)
    if name not in SOME_BY_JAX:
        assert " exp " not in str(jax.make_jaxpr(new)(Q, K, V))
    _, _, (mask, bias) = FOUND.get(name, ("", {}, (True, 0.0)))
    mask = streams.CAUSAL if "causal" in name or "added" in name else mask
    if name == "blocks of queries, skipped":
        mask = np.arange(T)[:, None] // 8 >= np.arange(S) // 8
    out, grads = streams.truth(mask, bias)
    got = jax.tree.leaves(new(Q, K, V))
    near(got[:1], [out])
    near(got[1:], grads, 2e-5)


def test_loops_are_gone() -> None:
    new = rewriter.optimize(gradients(stopped), implementation=FORCED)
    program = str(jax.make_jaxpr(gradients(stopped))(Q, K, V))
    assert program.count("scan[") == 2
    assert str(jax.make_jaxpr(new)(Q, K, V)).count("scan[") == 0


def test_layers() -> None:
    """Two layers in a loop, each with a stream, differentiated by their weights."""
    x = np.random.default_rng(0).normal(size=(B, T, N * H)).astype(np.float32)
    w = np.random.default_rng(1).normal(size=(2, 4, N * H, N * H)) / 4
    w = w.astype(np.float32)

    def layer(x, w):
        q, k, v = (
            (x @ w[i]).reshape(B, T, N, H).transpose(0, 2, 1, 3) for i in range(3)
        )
        out = stopped(q, k, v).transpose(0, 2, 1, 3).reshape(B, T, N * H)
        return x + out @ w[3], None

    def loss(w, x):
        return (lax.scan(layer, x, w)[0] ** 2).mean()

    fn = jax.value_and_grad(loss)
    new = rewriter.optimize(fn, implementation=FORCED)
    (site,) = new.report(w, x).sites
    assert site.replaced
    assert site.backward
    for a, b in zip(*map(jax.tree.leaves, (new(w, x), fn(w, x))), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())


def causal_blocks(skip: bool = False, sliced: bool = False) -> Callable[..., Any]:
    """Blocks of queries and keys; steps above the diagonal may be skipped."""

    def fn(q, k, v):
        def queries(x):
            qb, i = x

            def body(carry, j):
                kb, vb = (lax.dynamic_slice_in_dim(x, j * 8, 8, 2) for x in (k, v))
                rows, keys = (n * 8 + jnp.arange(8) for n in (i, j))
                s = jnp.where(rows[:, None] >= keys, dots(qb, kb), -1e30)
                run = lambda c: step(c, s, vb)
                if skip:
                    return lax.cond(j <= i, run, lambda c: c, carry)
                return run(carry)

            if sliced:
                return divided(lax.fori_loop(0, S // 8, lambda j, c: body(c, j), first))
            numbers = jnp.arange(S // 8)
            return divided(lax.scan(lambda c, j: (body(c, j), None), first, numbers)[0])

        first = begin(-1e30, 8)
        out = lax.map(queries, (blocks(q), jnp.arange(T // 8)))
        return jnp.moveaxis(out, 0, 2).reshape(B, N, T, H)

    return fn


DOTS = jax.checkpoint_policies.dots_saveable
LAYERS = {
    "padding": (FOUND["scanned_with_padding"][0], None),
    "skipped, products saved": (causal_blocks(skip=True), DOTS),
    "counted, products saved": (causal_blocks(sliced=True), DOTS),
    "in a jit": (jax.jit(causal_blocks()), None),
}
"""By name: a stream, and the policy of the checkpoint around its layer."""


@pytest.mark.parametrize("name", LAYERS)
def test_checkpointed_layers_in_a_loop(name: str) -> None:
    """No stream is left, and the gradients are those in float64."""
    attention, policy = LAYERS[name]
    shapes = (B, T, N * H), (B, S, N * H), (2, 4, N * H, N * H)
    x, y, w = (
        np.random.default_rng(i).normal(size=shape).astype(np.float32) / (1, 1, 4)[i]
        for i, shape in enumerate(shapes)
    )

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x, w, y):
        heads = lambda x: x.reshape(B, -1, N, H).transpose(0, 2, 1, 3)
        q, k, v = (heads(a @ w[i]) for i, a in enumerate((x, y, y)))
        out = attention(q, k, v).transpose(0, 2, 1, 3).reshape(B, T, N * H)
        return x + jnp.tanh(out @ w[3])

    def loss(w, x, y):
        return (lax.scan(lambda x, w: (layer(x, w, y), None), x, w)[0] ** 2).mean()

    fn = jax.value_and_grad(loss)
    new = rewriter.optimize(fn, implementation=FORCED, strict=True)
    sites = new.report(w, x, y).sites
    assert all(s.replaced for s in sites)
    assert any(s.backward for s in sites)
    with jax.enable_x64(True):
        wide = jax.jit(fn)(*(a.astype(np.float64) for a in (w, x, y)))
    for a, b in zip(*map(jax.tree.leaves, (new(w, x, y), wide)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())


def scaled(factor: float) -> Callable[..., Any]:
    """A number whose cotangent is scaled by a rule."""

    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, None), lambda _, t: (factor * t,))
    return same


LOOK_ALIKES: dict[str, Callable[..., Any]] = {
    "no gradient of the factor": lambda q, k, v: stopped(
        q, k, v, alpha=lax.stop_gradient
    ),
    "no gradient of the sum": lambda q, k, v: streams.scanned(
        q, k, v, kept=lax.stop_gradient
    ),
    "half a gradient of the sum": lambda q, k, v: streams.scanned(
        q, k, v, kept=lambda x: x / 2 + lax.stop_gradient(x / 2)
    ),
    "no gradient of the weights": lambda q, k, v: streams.scanned(
        q, k, v, weights=lambda x: lax.stop_gradient(jnp.exp(x))
    ),
    "no gradient of the keys": lambda q, k, v: streams.scanned(
        q, lax.stop_gradient(k), v
    ),
    "skipped, twice the gradient of the keys": block_by_block(
        True, skip=True, keys=scaled(2.0)
    ),
    "each run again, twice the gradient of the keys": block_by_block(
        True, around=jax.checkpoint, keys=scaled(2.0)
    ),
    "sliced, no gradient of the keys": block_by_block(
        True, sliced=True, keys=lax.stop_gradient
    ),
    "run again but products, no gradient of the keys": jax.checkpoint(
        block_by_block(True, sliced=True, keys=lax.stop_gradient),
        policy=jax.checkpoint_policies.dots_saveable,
    ),
    "run again but products, twice the gradient of the keys": jax.checkpoint(
        block_by_block(True, keys=scaled(2.0)),
        policy=jax.checkpoint_policies.dots_saveable,
    ),
    "one after the other, no gradient of the factor": functools.partial(
        unrolled, alpha=lax.stop_gradient
    ),
    "chunk by chunk, no gradient of the sum": functools.partial(
        chunk_by_chunk, totals=lax.stop_gradient
    ),
    "twice the gradient of the sum": lambda q, k, v: streams.scanned(
        q, k, v, kept=scaled(2.0)
    ),
    "twice the gradient of the keys": lambda q, k, v: streams.scanned(
        q, k, v, keys=lambda x: blocks(scaled(2.0)(x))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_other_gradients_stay(name: str) -> None:
    fn = LOOK_ALIKES[name]
    new = rewriter.optimize(both(fn), implementation=FORCED)
    near(new(Q, K, V), exact(both(fn)), 2e-5)
