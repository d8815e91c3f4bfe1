"""Online softmax by hand whose upper blocks of keys are skipped by a condition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter

pytestmark = pytest.mark.once

B, N, T, H, BLOCK = 2, 2, 12, 4, 4
COUNT = T // BLOCK
RANDOM = np.random.default_rng(0)
Q, K, V = (RANDOM.normal(size=(B, T, N, H)).astype(np.float32) for _ in range(3))
FORCED = {"attention": "memory_bounded"}


def blocks(x: Any) -> Any:
    return jnp.moveaxis(x.reshape(B, -1, BLOCK, N, H), 1, 0)


def begin(lowest: float = -1e30) -> Any:
    row = B, N, BLOCK
    return jnp.zeros((*row, H)), jnp.zeros(row), jnp.full(row, lowest, jnp.float32)


def step(q: Any, k: Any, v: Any, carry: Any, i: Any, j: Any) -> Any:
    """Block i of the queries and block j of the keys."""
    rows, keys = (n * BLOCK + jnp.arange(BLOCK) for n in (i, j))
    return unmasked(q, k, v, carry, rows[:, None] >= keys)


def unmasked(q: Any, k: Any, v: Any, carry: Any, mask: Any = True) -> Any:
    out, total, largest = carry
    s = jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5
    s = jnp.where(mask, s, -1e30)
    new = jnp.maximum(largest, s.max(-1))
    p, alpha = jnp.exp(s - new[..., None]), jnp.exp(largest - new)
    more = jnp.einsum("bnts,bsnh->bnth", p, v)
    return out * alpha[..., None] + more, total * alpha + p.sum(-1), new


def over_queries(keys: Callable) -> Callable:
    def attention(q: Any, k: Any, v: Any) -> Any:
        def rows(x: Any) -> Any:
            out, total, *_ = keys(x[0], k, v, x[1])
            return jnp.moveaxis(out / total[..., None], 1, 2)

        out = lax.map(rows, (blocks(q), jnp.arange(COUNT)))
        return jnp.moveaxis(out, 0, 1).reshape(q.shape)

    return attention


def skipping(decide: Callable, first: Callable = begin) -> Callable:
    def keys(q: Any, k: Any, v: Any, i: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            return decide(carry, lambda c: step(q, x[0], x[1], c, i, x[2]), i, x[2])

        xs = blocks(k), blocks(v), jnp.arange(COUNT)
        return lax.scan(lambda c, x: (body(c, x), None), first(), xs)[0]

    return over_queries(keys)


def same(carry: Any) -> Any:
    return carry


def chosen(carry: Any, run: Callable, i: Any, j: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(j <= i, a, b), run(carry), carry)


def looped(q: Any, k: Any, v: Any, i: Any) -> Any:
    def body(j: Any, carry: Any) -> Any:
        kb, vb = (lax.dynamic_slice_in_dim(x, j * BLOCK, BLOCK, 1) for x in (k, v))
        return lax.cond(j <= i, lambda c: step(q, kb, vb, c, i, j), same, carry)

    return lax.fori_loop(0, COUNT, body, begin())


def block(k: Any, v: Any, j: Any) -> Any:
    return (lax.dynamic_slice_in_dim(x, j * BLOCK, BLOCK, 1) for x in (k, v))


def bounded(bound: Callable, first: int = 0) -> Callable:
    """As many blocks as a bound says that depends on the block of queries."""

    def keys(q: Any, k: Any, v: Any, i: Any) -> Any:
        run = lambda j, c: step(q, *block(k, v, j), c, i, j)
        return lax.fori_loop(first, bound(i), run, begin())

    return over_queries(keys)


def going_on(test: Callable, by: int = 1) -> Callable:
    """A loop by hand, as long as a test of both blocks holds."""

    def keys(q: Any, k: Any, v: Any, i: Any) -> Any:
        def run(c: Any) -> Any:
            j, *carry = c
            return (j + by, *step(q, *block(k, v, j), tuple(carry), i, j))

        return lax.while_loop(lambda c: test(c[0], i), run, (0, *begin()))[1:]

    return over_queries(keys)


def with_bound_carried(q: Any, k: Any, v: Any, i: Any) -> Any:
    def run(c: Any) -> Any:
        *carry, j, last = c
        return (*step(q, *block(k, v, j), tuple(carry), i, j), j + 1, last)

    return lax.while_loop(lambda c: c[4] > c[3], run, (*begin(), 0, i + 1))


FOUND = {
    "dynamic bound": bounded(lambda i: i + 1),
    "dynamic bound, checkpoint": bounded(jax.checkpoint(lambda i: 1 + i)),
    "bound of all": bounded(lambda i: jnp.int32(COUNT)),
    "while at most": going_on(lambda j, i: j <= i),
    "while below": going_on(lambda j, i: j < i + 1),
    "while above": going_on(lambda j, i: i > j - 1),
    "while below a number": going_on(lambda j, i: j < COUNT),
    "while the bound is carried": over_queries(with_bound_carried),
    "cond": skipping(lambda c, run, i, j: lax.cond(j <= i, run, same, c)),
    "exchanged": skipping(lambda c, run, i, j: lax.cond(i < j, same, run, c)),
    "negated": skipping(lambda c, run, i, j: lax.cond(~(j > i), run, same, c)),
    "by keys": skipping(
        lambda c, run, i, j: lax.cond(j * BLOCK < (i + 1) * BLOCK, run, same, c)
    ),
    "by the last query": skipping(
        lambda c, run, i, j: lax.cond(j * BLOCK <= i * BLOCK + 3, run, same, c)
    ),
    "checkpoint": skipping(
        lambda c, run, i, j: lax.cond(j <= i, jax.checkpoint(run), same, c)
    ),
    "operands closed over": skipping(
        lambda c, run, i, j: lax.cond(j <= i, lambda: run(c), lambda: c)
    ),
    "a choice": skipping(chosen),
    "begun at infinity": skipping(
        lambda c, run, i, j: lax.cond(j <= i, run, same, c), lambda: begin(-jnp.inf)
    ),
    "fori_loop": over_queries(looped),
}
OTHERS = {
    "dynamic bound too low": bounded(lambda i: i),
    "dynamic bound too high": bounded(lambda i: 2 * i + 1),
    "one block left out at first": bounded(lambda i: i + 1, 1),
    "every other block": going_on(lambda j, i: j < COUNT, 2),
    "while unlike": going_on(lambda j, i: j != i + 1),
    "while both": going_on(lambda j, i: (j <= i) & (j < COUNT)),
    "one block too few": skipping(lambda c, run, i, j: lax.cond(j < i, run, same, c)),
    "told by earlier sums": skipping(
        lambda c, run, i, j: lax.cond(c[1].sum() < 20, run, same, c)
    ),
    "sums that decay": skipping(
        lambda c, run, i, j: lax.cond(
            j <= i, run, lambda c: (c[0] * 0.5, c[1], c[2]), c
        )
    ),
    "sums alone are skipped": skipping(
        lambda c, run, i, j: (
            run(c)[0], *lax.cond(j <= i, lambda: run(c)[1:], lambda: c[1:])
        )
    ),
}  # fmt: skip


def whole_blocks(seen: Callable) -> Callable:
    """Blocks of keys that all rows of a block of queries see, or none."""

    def keys(q: Any, k: Any, v: Any, i: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            run = lambda c: unmasked(q, x[0], x[1], c)
            return lax.cond(seen(i, x[2]), run, same, carry), None

        xs = blocks(k), blocks(v), jnp.arange(COUNT)
        return lax.scan(body, begin(), xs)[0]

    return over_queries(keys)


LENGTHS = {
    "up to its own": lambda i, j: j <= i,
    "by the next": lambda i, j: j < i + 1,
    "not above": lambda i, j: ~(i < j),
    "one more": lambda i, j: i + 1 >= j,
    "all but the last": lambda i, j: j < COUNT - 1 + 0 * i,
    "twice as many": lambda i, j: j <= 2 * i,
    "in keys": lambda i, j: j * BLOCK <= i * BLOCK + BLOCK - 1,
}
NO_LENGTHS = {
    "its own": lambda i, j: j == i,
    "the last two": lambda i, j: (j <= i) & (j >= i - 1),
    "from its own on": lambda i, j: j >= i,
    "every other": lambda i, j: (i - j) % 2 == 0,
}


def exact(q: Any, k: Any, v: Any, seen: Callable | None = None) -> np.ndarray:
    q, k, v = (x.astype(float) for x in (q, k, v))
    s = np.einsum("btnh,bsnh->bnts", q, k) / H**0.5
    t, n = np.arange(T)[:, None], np.arange(T)
    mask = t >= n if seen is None else seen(t // BLOCK, n // BLOCK)
    s = np.where(mask, s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", p / p.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("name", FOUND)
def test_it_is_causal_attention(name: str) -> None:
    fast = rewriter.optimize(FOUND[name], implementation=FORCED)
    (site,) = fast.report(Q, K, V).sites
    assert site.op == "attention"
    assert "cond" not in str(fast.report(Q, K, V).after)
    np.testing.assert_allclose(fast(Q, K, V), exact(Q, K, V), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LENGTHS)
def test_whole_blocks_are_lengths_of_keys(name: str) -> None:
    fast = rewriter.optimize(whole_blocks(LENGTHS[name]), implementation=FORCED)
    (site,) = fast.report(Q, K, V).sites
    assert "kv_lengths" in site.shapes
    assert "mask" not in site.shapes
    want = exact(Q, K, V, LENGTHS[name])
    np.testing.assert_allclose(fast(Q, K, V), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NO_LENGTHS)
def test_other_blocks_keep_their_numbers(name: str) -> None:
    fast = rewriter.optimize(whole_blocks(NO_LENGTHS[name]), implementation=FORCED)
    want = exact(Q, K, V, NO_LENGTHS[name])
    np.testing.assert_allclose(fast(Q, K, V), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay_as_written(name: str) -> None:
    report = rewriter.explain(OTHERS[name])(Q, K, V)
    assert (report.sites, report.failures) == ((), ())


def test_a_condition_of_earlier_sums_is_told() -> None:
    report = rewriter.explain(OTHERS["told by earlier sums"])(Q, K, V)
    assert "lax.cond" in str([m.reasons for m in report.misses])


def test_a_while_that_does_not_count_is_told() -> None:
    report = rewriter.explain(OTHERS["while unlike"])(Q, K, V)
    assert "while loop" in str([m.reasons for m in report.misses])


def dense(q: Any, k: Any, v: Any) -> Any:
    s = jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5
    s = jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -1e30)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)


def test_a_gradient_that_jax_cannot_take_of_a_while() -> None:
    fast = rewriter.optimize(FOUND["dynamic bound"], implementation=FORCED)

    def gradients(f: Callable) -> Any:
        return jax.jit(jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2)))(Q, K, V)

    for a, b in zip(gradients(fast), gradients(dense), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
