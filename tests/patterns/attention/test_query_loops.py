"""Loops over blocks of queries, with checkpoints around steps and around the loop."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter
from rewriter.program.graph import Graph
from tests import slow

pytestmark = pytest.mark.once

B, T, N, H, C = 2, 16, 2, 4, 4
FORCED = {"attention": "memory_bounded"}
POLICIES = jax.checkpoint_policies
RANDOM = np.random.default_rng(0)
Q, K, V, WEIGHTS = RANDOM.normal(size=(4, B, T, N, H)).astype(np.float32)
NUMBERS = jnp.arange(T // C)
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


# --------------------------------------------------------------------- loops
def blocks(x: Any) -> Any:
    return jnp.moveaxis(x.reshape(B, T // C, C, *x.shape[2:]), 1, 0)


def joined(x: Any) -> Any:
    return jnp.moveaxis(x, 0, 1).reshape(B, T, N, H)


def attend(q: Any, k: Any, v: Any, i: Any) -> Any:
    """A block of queries and all keys, causal."""
    s = jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5
    s = jnp.where((i * C + jnp.arange(C))[:, None] >= jnp.arange(T), s, -1e30)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)


def block_of(q: Any, i: Any) -> Any:
    return lax.dynamic_slice_in_dim(q, i * C, C, 1)


def mapped(wrap: Wrap, q: Any, k: Any, v: Any) -> Any:
    step = wrap(lambda x: attend(x[0], k, v, x[1]))
    return joined(lax.map(step, (blocks(q), NUMBERS)))


def sliced(wrap: Wrap, q: Any, k: Any, v: Any) -> Any:
    return joined(lax.map(wrap(lambda i: attend(block_of(q, i), k, v, i)), NUMBERS))


def carried(wrap: Wrap, q: Any, k: Any, v: Any, *, start: int = 0) -> Any:
    """The number of the block is a carry."""

    def step(i: Any, _: Any) -> Any:
        return i + 1, attend(block_of(q, i), k, v, i)

    return joined(lax.scan(wrap(step), start, None, length=T // C)[1])


def updated(wrap: Wrap, q: Any, k: Any, v: Any) -> Any:
    """Blocks are put into an array that is carried."""
    one = wrap(lambda i: attend(block_of(q, i), k, v, i))
    put = lambda i, out: lax.dynamic_update_slice_in_dim(out, one(i), i * C, 1)
    return lax.fori_loop(0, T // C, put, jnp.zeros_like(q))


def two_keys(wrap: Wrap, q: Any, k: Any, v: Any) -> Any:
    """Scores are a sum of two products; the second part of keys is shared by heads."""
    part, shared = q[..., :2], k[:, :, 0, :2]

    def step(x: Any) -> Any:
        qb, pb, i = x
        s = jnp.einsum("btnh,bsnh->bnts", qb, k)
        s = (s + jnp.einsum("btnh,bsh->bnts", pb, shared)) / H**0.5
        s = jnp.where((i * C + jnp.arange(C))[:, None] >= jnp.arange(T), s, -1e30)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)

    return joined(lax.map(wrap(step), (blocks(q), blocks(part), NUMBERS)))


def streamed(wrap: Wrap, q: Any, k: Any, v: Any, *, around: Wrap = lambda f: f) -> Any:
    """Each block of queries goes over blocks of keys."""

    def queries(x: Any) -> Any:
        qb, i = x

        def step(carry: Any, x: Any) -> Any:
            (m, total, acc), (kb, vb, j) = carry, x
            s = jnp.einsum("btnh,bsnh->bnts", qb, kb) / H**0.5
            seen = (i * C + jnp.arange(C))[:, None] >= j * C + jnp.arange(C)
            s = jnp.where(seen, s, -1e30)
            new = jnp.maximum(m, s.max(-1))
            p, alpha = jnp.exp(s - new[..., None]), jnp.exp(m - new)
            more = jnp.einsum("bnts,bsnh->bnth", p, vb)
            return (new, total * alpha + p.sum(-1), acc * alpha[..., None] + more), None

        first = (jnp.full((B, N, C), -1e30), jnp.zeros((B, N, C)))
        first = (*first, jnp.zeros((B, N, C, H)))
        xs = blocks(k), blocks(v), NUMBERS
        (_, total, acc), _ = lax.scan(wrap(step), first, xs)
        return jnp.moveaxis(acc / total[..., None], 1, 2)

    return joined(lax.map(around(queries), (blocks(q), NUMBERS)))


LOOPS = (mapped, sliced, carried, updated, two_keys)
WRAPS: dict[str, Wrap] = {
    "nothing": lambda f: f,
    "a checkpoint": jax.checkpoint,
    "one that saves products": functools.partial(
        jax.checkpoint, policy=POLICIES.dots_saveable
    ),
}
PROGRAMS = {
    f"{loop.__name__}, {a} around a step, {b} around the loop": WRAPS[b](
        functools.partial(loop, WRAPS[a])
    )
    for loop, a, b in itertools.product(LOOPS, WRAPS, WRAPS)
}
saved = functools.partial(jax.checkpoint, policy=POLICIES.dots_saveable)
STREAMS = {
    "steps, run again": jax.checkpoint(functools.partial(streamed, jax.checkpoint)),
    "steps that save products, run again": jax.checkpoint(
        functools.partial(streamed, saved)
    ),
    "blocks of queries": functools.partial(
        streamed, lambda f: f, around=jax.checkpoint
    ),
    "blocks of queries, run again": jax.checkpoint(
        functools.partial(streamed, lambda f: f, around=jax.checkpoint)
    ),
    "both, run again": jax.checkpoint(
        functools.partial(streamed, jax.checkpoint, around=jax.checkpoint)
    ),
}
"""Streams, by what is under a checkpoint."""


def gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    loss = lambda *args: (fn(*args) * WEIGHTS).sum()
    return jax.value_and_grad(loss, (0, 1, 2))


@functools.cache
def truth(loop: Any) -> list[Any]:
    """What the loop as written gives in float64."""
    with jax.enable_x64(True):
        wide = [x.astype(np.float64) for x in (Q, K, V)]
        step = gradients(functools.partial(loop, lambda f: f))
        return [np.asarray(x) for x in jax.tree.leaves(jax.jit(step)(*wide))]


def check(program: Any, loop: Any) -> None:
    """No softmax is left, and the numbers are those in float64.

    But for the gradient of a part of keys that heads share: it is left as written.
    """
    fast = rewriter.optimize(gradients(program), implementation=FORCED)
    if loop is not two_keys:
        assert " exp " not in str(jax.make_jaxpr(fast)(Q, K, V))
    got = jax.tree.leaves(fast(Q, K, V))
    for x, y in zip(got, truth(loop), strict=True):
        assert np.linalg.norm(x - y) <= 2e-6 * np.linalg.norm(y) + 1e-6


# --------------------------------------------------------------------- tests
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_found(name: str) -> None:
    report = rewriter.explain(gradients(PROGRAMS[name]), implementation=FORCED)
    sites = report(Q, K, V).sites
    assert all(s.replaced for s in sites)
    assert any(s.backward for s in sites)


SAMPLE = (
    "mapped, one that saves products around a step, a checkpoint around the loop",
    "carried, a checkpoint around a step, a checkpoint around the loop",
)


@pytest.mark.parametrize("name", slow.unless(SAMPLE.__contains__, PROGRAMS))
def test_numbers(name: str) -> None:
    loop = next(x for x in LOOPS if x.__name__ == name.split(",")[0])
    check(PROGRAMS[name], loop)


@pytest.mark.parametrize("name", slow.first(2, list(STREAMS)))
def test_streams(name: str) -> None:
    check(STREAMS[name], streamed)


def with_gradients_of(loop: Any, other: Any) -> Callable[..., Any]:
    """One loop whose gradients are those of another one."""
    fn = jax.custom_vjp(functools.partial(loop, jax.checkpoint))
    back = functools.partial(other, jax.checkpoint)
    fn.defvjp(
        lambda *args: (loop(jax.checkpoint, *args), args),
        lambda args, t: jax.vjp(back, *args)[1](t),
    )
    return lambda *args: jax.checkpoint(lambda *a: fn(*a))(*args)


def halved(wrap: Wrap, q: Any, k: Any, v: Any) -> Any:
    return mapped(wrap, q, k / 2 + lax.stop_gradient(k / 2), v)


LOOK_ALIKES = {
    "another first block": with_gradients_of(
        carried, functools.partial(carried, start=1)
    ),
    "half a gradient of the keys": jax.checkpoint(
        functools.partial(halved, jax.checkpoint)
    ),
    "blocks of keys as those of queries": with_gradients_of(
        mapped, lambda wrap, q, k, v: mapped(wrap, k, k, v)
    ),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_other_gradients_stay(name: str) -> None:
    step = gradients(LOOK_ALIKES[name])
    fast = rewriter.optimize(step, implementation=FORCED)
    pairs = zip(*map(jax.tree.leaves, (fast(Q, K, V), step(Q, K, V))), strict=True)
    for x, y in pairs:
        assert np.linalg.norm(x - y) <= 1e-5 * np.linalg.norm(y) + 1e-6


def test_loops_inside_each_other_count_apart() -> None:
    """Both count from 0, as often, and in a checkpoint's recomputation again."""

    def inner(x: Any, i: Any) -> Any:
        step = lambda j, _: (j + 1, jnp.sin(x) * (i * 10 + j))
        return lax.scan(step, 0, None, length=3)[1].sum(0)

    @jax.checkpoint
    def outer(x: Any) -> Any:
        step = lambda i, _: (i + 1, inner(x, i))
        return lax.scan(step, 0, None, length=3)[1].sum()

    graph = Graph(jax.make_jaxpr(jax.grad(outer))(jnp.ones(4)))
    scopes, found = [graph.top], 0
    while scopes:
        scope = scopes.pop()
        scopes += itertools.chain(*scope.children.values())
        around, mine = scope.parent, counters(graph, scope)
        while mine and around is not None:
            assert mine.isdisjoint(counters(graph, around))
            around = around.parent
        found += len(mine)
    assert found >= 4


def counters(graph: Graph, scope: Any) -> set[int]:
    """The counters that a loop's body is given."""
    if scope.kind != "scan":
        return set()
    body = getattr(scope.jaxpr, "jaxpr", scope.jaxpr)
    return {scope.env[v] for v in body.invars} & graph.counters.known.keys()
