"""Attention over blocks of keys, as by hand: online softmax, chunks, merged parts."""

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
from rewriter.measure.oracle import in_float64
from tests import slow
from tests.support.arrays import normal

B, N, T, H, S, BLOCK = 2, 2, 16, 8, 24, 8
SCALE = H**-0.5
LOWEST = -1e30


Q, K, V = (normal(B, N, n, H, seed=i) for i, n in enumerate((T, S, S)))
BIAS = normal(N, T, S, seed=3)
LENGTHS = jnp.asarray(np.array([24, 0], np.int32))
CAUSAL = np.arange(T)[:, None] >= np.arange(S)


def at_once(q, k, v, mask: Any = True, bias: Any = 0.0):
    """The softmax of all keys; rows without keys give the mean."""
    scores = jnp.where(mask, dots(q, k) + bias, LOWEST)
    weights = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
    return (weights / weights.sum(-1, keepdims=True)) @ v


def dots(q, k):
    return jnp.einsum("bnth,bsnh->bnts", q, k.swapaxes(1, 2)) * SCALE


def begin(lowest: float = -jnp.inf, queries: int = T):
    row = B, N, queries
    return jnp.full(row, lowest), jnp.zeros(row), jnp.zeros((*row, H))


def step(carry, s, v, *, rescaled=True, weights=jnp.exp, kept=lambda x: x):
    """One step of an online softmax, and mistakes that one may make in it."""
    m, total, acc = carry
    new = jnp.maximum(m, s.max(-1))
    p, alpha = weights(s - new[..., None]), jnp.exp(m - new)
    acc = acc * alpha[..., None] if rescaled else acc
    total = kept(total * alpha + p.sum(-1))
    return new, total, acc + jnp.einsum("bnts,bnsh->bnth", p, v)


def divided(carry):
    _, total, acc = carry
    return acc / total[..., None]


def blocks(x, axis: int = 2, size: int = BLOCK):
    shape = (*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def scanned(q, k, v, *, first=None, keys=blocks, reverse=False, scale=None, **how):
    def body(carry, x):
        i, kb, vb = x
        s = dots(q, kb) * (1 if scale is None else scale(i))
        return step(carry, s, vb, **how), None

    count = S // BLOCK
    xs = jnp.arange(count), keys(k), blocks(v)
    return divided(lax.scan(body, first or begin(), xs, reverse=reverse)[0])


def looped(q, k, v, *, count=S // BLOCK, stride=BLOCK, size=BLOCK, at=0, seen=None):
    def body(i, carry):
        kb, vb = (lax.dynamic_slice_in_dim(x, at + i * stride, size, 2) for x in (k, v))
        s = dots(q, kb)
        if seen is not None:
            s = jnp.where(seen(i * stride + jnp.arange(size)), s, -jnp.inf)
        return step(carry, s, vb)

    return divided(lax.fori_loop(0, count, body, begin(LOWEST)))


def unrolled(q, k, v, *, of=((0, 8), (8, 16), (16, 24)), values=None, **how):
    carry = begin()
    for (lo, hi), (first, last) in zip(of, values or of, strict=True):
        carry = step(carry, dots(q, k[:, :, lo:hi]), v[:, :, first:last], **how)
    return divided(carry)


FOUND: dict[str, tuple[Callable[..., Any], dict[str, Any], tuple[Any, ...]]] = {}


def case(mask: Any = True, bias: Any = 0.0, **params: Any):
    def register(fn):
        FOUND[fn.__name__] = fn, params, (mask, bias)
        return fn

    return register


case()(scanned)
case()(looped)
case()(unrolled)


@case()
def scanned_backwards(q, k, v):
    return scanned(q, k, v, reverse=True)


@case(CAUSAL, window=(None, 0))
def looped_causal(q, k, v):
    return looped(q, k, v, seen=lambda s: jnp.arange(T)[:, None] >= s)


@case(CAUSAL, window=(None, 0))
def unrolled_causal(q, k, v):
    carry = begin(LOWEST)
    for i in range(0, S, BLOCK):
        seen = jnp.arange(T)[:, None] >= i + jnp.arange(BLOCK)
        s = jnp.where(seen, dots(q, k[:, :, i : i + BLOCK]), LOWEST)
        carry = step(carry, s, v[:, :, i : i + BLOCK])
    return divided(carry)


@case(bias=BIAS)
def scanned_with_bias(q, k, v):
    def body(carry, x):
        kb, vb, bias = x
        return step(carry, dots(q, kb) + bias, vb), None

    xs = blocks(k), blocks(v), blocks(BIAS)
    return divided(lax.scan(body, begin(LOWEST), xs)[0])


@case()
def unrolled_out_of_order(q, k, v):
    return unrolled(q, k, v, of=((8, 16), (0, 8), (16, 24)))


@case()
def unrolled_in_unequal_blocks(q, k, v):
    return unrolled(q, k, v, of=((0, 4), (4, 20), (20, 24)))


@case()
def divided_at_each_step(q, k, v):
    """FlashAttention's first version keeps the result divided."""

    def body(carry, x):
        (m, old, out), (kb, vb) = carry, x
        s = dots(q, kb)
        mine = s.max(-1)
        p = jnp.exp(s - mine[..., None])
        new = jnp.maximum(m, mine)
        a, b = jnp.exp(m - new), jnp.exp(mine - new)
        total = a * old + b * p.sum(-1)
        more = jnp.einsum("bnts,bnsh->bnth", p, vb)
        out = (old / total * a)[..., None] * out + (b / total)[..., None] * more
        return (new, total, out), None

    return lax.scan(body, begin(LOWEST), (blocks(k), blocks(v)))[0][2]


@case()
def logarithm_of_the_sum_carried(q, k, v):
    """As attention over devices in a ring merges its parts."""

    def body(carry, x):
        (lse, out), (kb, vb) = carry, x
        s = dots(q, kb)
        mine = jax.nn.logsumexp(s, -1)
        more = jnp.einsum("bnts,bnsh->bnth", jnp.exp(s - mine[..., None]), vb)
        new = jnp.logaddexp(lse, mine)
        out *= jnp.exp(lse - new)[..., None]
        return (new, out + more * jnp.exp(mine - new)[..., None]), None

    first = jnp.full((B, N, T), -jnp.inf), jnp.zeros((B, N, T, H))
    return lax.scan(body, first, (blocks(k), blocks(v)))[0][1]


@case()
def two_parts_merged(q, k, v):
    """As a model merges what two halves of its cache give."""

    def part(lo, hi):
        s = dots(q, k[:, :, lo:hi])
        m = s.max(-1, keepdims=True)
        e = jnp.exp(s - m)
        return jnp.einsum("bnts,bnsh->bnth", e, v[:, :, lo:hi]), m, e.sum(-1)[..., None]

    (o1, m1, l1), (o2, m2, l2) = part(0, 20), part(20, 24)
    m = jnp.maximum(m1, m2)
    a, b = jnp.exp(m1 - m), jnp.exp(m2 - m)
    total = a * l1 + b * l2
    return o1 * a / total + o2 * b / total


def parts_merged(q, k, v, size: int):
    """Rabe and Staats' algorithm: chunks of queries, in each a map over keys."""

    def chunk(start, _):
        qc = lax.dynamic_slice_in_dim(q, start, BLOCK, 2)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def summary(kb, vb):
            s = dots(qc, kb)
            m = lax.stop_gradient(s.max(-1, keepdims=True))
            e = jnp.exp(s - m)
            return jnp.einsum("bnts,bnsh->bnth", e, vb), e.sum(-1), m[..., 0]

        def part(i):
            kb, vb = (lax.dynamic_slice_in_dim(x, i, size, 2) for x in (k, v))
            return summary(kb, vb)

        values, weights, m = lax.map(part, jnp.arange(0, S, size))
        most = m.max(0, keepdims=True)
        values *= jnp.exp(m - most)[..., None]
        weights *= jnp.exp(m - most)
        return start + BLOCK, values.sum(0) / weights[..., None].sum(0)

    _, out = lax.scan(chunk, 0, None, length=T // BLOCK)
    return jnp.moveaxis(out, 0, 2).reshape(B, N, T, H)


@case()
def parts_stacked_and_merged(q, k, v):
    return parts_merged(q, k, v, 12)


@case()
def one_part_merged(q, k, v):
    """A loop of a single step, whose number is no index."""
    return parts_merged(q, k, v, S)


@case(CAUSAL, window=(None, 0))
def blocks_of_queries_and_keys(q, k, v):
    def queries(i):
        qb = lax.dynamic_slice_in_dim(q, i * BLOCK, BLOCK, 2)

        def body(j, carry):
            kb, vb = (lax.dynamic_slice_in_dim(x, j * 12, 12, 2) for x in (k, v))
            t, s = i * BLOCK + jnp.arange(BLOCK), j * 12 + jnp.arange(12)
            return step(carry, jnp.where(t[:, None] >= s, dots(qb, kb), -jnp.inf), vb)

        return divided(lax.fori_loop(0, 2, body, begin(LOWEST, BLOCK)))

    out = lax.map(queries, jnp.arange(T // BLOCK))
    return jnp.moveaxis(out, 0, 2).reshape(B, N, T, H)


@case((np.arange(S) < np.array([24, 0])[:, None])[:, None, None], empty_rows="mean")
def scanned_with_padding(q, k, v):
    """The second sequence is all padding: the mean over the keys of all blocks."""

    def body(carry, x):
        kb, vb, seen = x
        s = jnp.where(seen[:, None, None], dots(q, kb), LOWEST)
        return step(carry, s, vb), None

    seen = jnp.arange(S) < LENGTHS[:, None]
    xs = blocks(k), blocks(v), blocks(seen, 1)
    return divided(lax.scan(body, begin(LOWEST), xs)[0])


def steps(q, k, v, score, lowest=LOWEST, guard=lambda m: m, exp=jnp.exp):
    """An online softmax with what is done to each block's scores."""

    def body(carry, x):
        (m, total, acc), (i, kb, vb) = carry, x
        s = score(dots(q, kb), i * BLOCK + jnp.arange(BLOCK))
        new = jnp.maximum(m, s.max(-1))
        p, alpha = exp(s - guard(new)[..., None]), exp(m - guard(new))
        more = jnp.einsum("bnts,bnsh->bnth", p, vb)
        return (new, total * alpha + p.sum(-1), acc * alpha[..., None] + more), None

    xs = jnp.arange(S // BLOCK), blocks(k), blocks(v)
    return divided(lax.scan(body, begin(lowest), xs)[0])


NEAR = CAUSAL & (np.arange(T)[:, None] - np.arange(S) < 5)
SEGMENTS = jnp.asarray(np.arange(S, dtype=np.int32) // 5)


@case(NEAR, window=(4, 0))
def window_at_each_step(q, k, v):
    t = jnp.arange(T)[:, None]
    seen = lambda s: (t >= s) & (t - s < 5)
    return steps(q, k, v, lambda x, s: jnp.where(seen(s), x, LOWEST))


SAME = np.arange(T)[:, None] // 5 == np.arange(S) // 5


@case(SAME & CAUSAL, window=(None, 0))
def segments_at_each_step(q, k, v):
    def score(x, s):
        mine = lax.dynamic_slice_in_dim(SEGMENTS, s[0], BLOCK)
        seen = (SEGMENTS[:T, None] == mine) & (jnp.arange(T)[:, None] >= s)
        return jnp.where(seen, x, LOWEST)

    return steps(q, k, v, score)


@case()
def powers_of_two(q, k, v):
    scaled = lambda x, _: x * np.log2(np.e)
    return steps(q, k, v, scaled, -jnp.inf, exp=jnp.exp2)


@case(CAUSAL, window=(None, 0))
def infinite_maximum_guarded(q, k, v):
    guard = lambda m: jnp.where(jnp.isneginf(m), 0.0, m)
    seen = lambda s: jnp.arange(T)[:, None] >= s
    score = lambda x, s: jnp.where(seen(s), x, -jnp.inf)
    return steps(q, k, v, score, -jnp.inf, guard)


@case()
def one_head_mapped(q, k, v):
    """Under `jax.vmap` a slice of the keys at a step is a gather."""

    def head(q, k, v):
        def body(i, carry):
            m, total, acc = carry
            kb, vb = (lax.dynamic_slice_in_dim(x, i * BLOCK, BLOCK) for x in (k, v))
            s = q @ kb.T * SCALE
            new = jnp.maximum(m, s.max(1))
            p, alpha = jnp.exp(s - new[:, None]), jnp.exp(m - new)
            return new, total * alpha + p.sum(1), acc * alpha[:, None] + p @ vb

        first = jnp.full(T, -jnp.inf), jnp.zeros(T), jnp.zeros((T, H))
        _, total, acc = lax.fori_loop(0, S // BLOCK, body, first)
        return acc / total[:, None]

    return jax.vmap(jax.vmap(head))(q, k, v)


@case()
def keys_split_and_merged(q, k, v):
    """Flash decoding: parts of the keys side by side, merged by their sums."""
    kb, vb = (x.reshape(B, N, -1, BLOCK, H) for x in (k, v))
    s = jnp.einsum("bnth,bncsh->bntcs", q, kb) * SCALE
    out = jnp.einsum("bntcs,bncsh->bntch", jax.nn.softmax(s), vb)
    weights = jax.nn.softmax(jax.nn.logsumexp(s, -1), -1)
    return (out * weights[..., None]).sum(3)


@case()
def queries_in_a_map(q, k, v):
    def queries(qb):
        return jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(dots(qb, k)), v)

    out = lax.map(queries, blocks(q))
    return jnp.moveaxis(out, 0, 2).reshape(B, N, T, H)


@case()
def queries_updated_in_a_loop(q, k, v):
    def body(i, out):
        qb = lax.dynamic_slice_in_dim(q, i * BLOCK, BLOCK, 2)
        new = jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(dots(qb, k)), v)
        return lax.dynamic_update_slice_in_dim(out, new, i * BLOCK, 2)

    return lax.fori_loop(0, T // BLOCK, body, jnp.zeros_like(q))


def forced(fn: Callable[..., Any]) -> Callable[..., Any]:
    return rewriter.optimize(fn, implementation={"attention": "reference"}, strict=True)


def loss(fn: Callable[..., Any]) -> Callable[..., Any]:
    weights = jnp.cos(jnp.arange(B * N * T * H)).reshape(B, N, T, H)
    return lambda *args: (fn(*args) * weights).sum()


def gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(loss(fn), (0, 1, 2))


def truth(mask: Any = True, bias: Any = 0.0) -> tuple[Any, list[Any]]:
    """The softmax of all keys and the gradients of its loss, by NumPy in float64."""
    q, k, v, more = (np.asarray(x, np.float64) for x in (Q, K, V, bias))
    scores = np.where(mask, q @ k.swapaxes(2, 3) * SCALE + more, LOWEST)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    up = np.cos(np.arange(B * N * T * H)).reshape(B, N, T, H)
    share = up @ v.swapaxes(2, 3)
    share -= (weights * share).sum(-1, keepdims=True)
    back = np.where(mask, weights * share, 0) * SCALE
    grads = [back @ k, back.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ up]
    return weights @ v, grads


def both(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: (fn(*args), gradients(fn)(*args))


def exact(fn: Callable[..., Any]) -> list[np.ndarray]:
    """What a function gives in float64."""
    return in_float64(jax.make_jaxpr(fn)(Q, K, V), (Q, K, V))[0]


def near(new: Any, wanted: Any, limit: float = 2e-6) -> None:
    for a, b in zip(jax.tree.leaves(new), wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=limit * np.abs(b).max(), rtol=0)


DIFFERENTIATED = {
    "scanned", "looped_causal", "scanned_with_bias", "divided_at_each_step",
    "two_parts_merged", "parts_stacked_and_merged", "one_head_mapped",
}  # fmt: skip


@pytest.mark.parametrize("name", slow.first(12, FOUND))
def test_found(name: str) -> None:
    fn, params, (mask, bias) = FOUND[name]
    report = rewriter.explain(fn)(Q, K, V)
    assert not report.failures
    assert [s.op for s in report.sites] == ["attention"]
    found = dict(report.sites[0].params)
    assert found["scale"] == pytest.approx(SCALE)
    wanted = {"window": None, "empty_rows": None, **params}
    assert {key: found.get(key) for key in wanted} == wanted
    assert not report.misses
    out, grads = truth(mask, bias)
    near(jax.jit(fn)(Q, K, V), [out])
    near(forced(fn)(Q, K, V), [out])
    if name in DIFFERENTIATED:
        near(gradients(forced(fn))(Q, K, V), grads, 2e-5)


def test_loop_is_gone() -> None:
    program = str(jax.make_jaxpr(forced(scanned))(Q, K, V))
    assert "scan" in str(jax.make_jaxpr(scanned)(Q, K, V))
    assert program.count("dot_general") == 0
    assert "rewriter_site" in program
    assert "reduce_max" not in program


@pytest.mark.parametrize("fn", [scanned, looped, unrolled], ids=lambda f: f.__name__)
def test_found_in_a_model(fn: Callable[..., Any]) -> None:
    """Queries, keys and values are products too, and so is what becomes of it."""
    x, w = normal(B, S, N * H, seed=4), normal(4, N * H, N * H, seed=5)

    def model(x, w):
        q, k, v = (
            (x @ w[i]).reshape(B, S, N, H).transpose(0, 2, 1, 3) for i in range(3)
        )
        out = fn(q[:, :, :T], k, v).transpose(0, 2, 1, 3)
        return x[:, :T] + out.reshape(B, T, N * H) @ w[3]

    report = rewriter.explain(model)(x, w)
    assert report.counts()["attention"] == 1
    new, want = forced(model)(x, w), model(x, w)
    np.testing.assert_allclose(new, want, atol=1e-5 * np.abs(want).max())


REFUSED: dict[str, Callable[..., Any]] = {
    "sum_not_rescaled": lambda q, k, v: scanned(q, k, v, rescaled=False),
    "sum_begins_at_one": lambda q, k, v: scanned(
        q, k, v, first=(begin()[0] * 0, begin()[1] + 1, begin()[2])
    ),
    "accumulator_begins_at_one": lambda q, k, v: scanned(
        q, k, v, first=(begin()[0] * 0, begin()[1], begin()[2] + 1)
    ),
    "weights_squared": lambda q, k, v: scanned(
        q, k, v, weights=lambda x: jnp.exp(x) ** 2
    ),
    "sum_stopped": lambda q, k, v: scanned(q, k, v, kept=lax.stop_gradient),
    "sum_decays": lambda q, k, v: scanned(q, k, v, kept=lambda x: 0.9 * x),
    "scale_of_each_step": lambda q, k, v: scanned(q, k, v, scale=lambda i: 1.0 + i),
    "blocks_overlap": lambda q, k, v: looped(q, k, v, stride=4),
    "last_block_moved_inside": lambda q, k, v: looped(q, k, v, count=4),
    "block_read_twice": lambda q, k, v: unrolled(q, k, v, of=((0, 8), (0, 8), (8, 16))),
    "values_of_another_block": lambda q, k, v: unrolled(
        q, k, v, values=((8, 16), (0, 8), (16, 24))
    ),
    "unrolled_not_rescaled": lambda q, k, v: unrolled(q, k, v, rescaled=False),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    report = rewriter.explain(REFUSED[name])(Q, K, V)
    assert not report.failures
    assert not report.sites


CAREFUL: dict[str, tuple[Callable[..., Any], str]] = {
    "begins_later": (lambda q, k, v: looped(q, k, v, count=2, at=4), "2,16,2,8"),
    "some_keys_of_each_block": (lambda q, k, v: looped(q, k, v, size=4), "2,12,2,8"),
    "block_left_out_between": (
        lambda q, k, v: unrolled(q, k, v, of=((0, 8), (16, 24))),
        "2,16,2,8",
    ),
    "keys_of_other_blocks": (
        lambda q, k, v: scanned(
            q, k, v, keys=lambda x: jnp.moveaxis(x.reshape(B, N, BLOCK, -1, H), 3, 0)
        ),
        "2,24,2,8",
    ),
    "two_softmaxes": (
        lambda q, k, v: unrolled(q, k, v, of=((0, 12),)) + unrolled(q, k, v),
        "2,12,2,8",
    ),
}


@pytest.mark.parametrize("name", CAREFUL)
def test_keeps_its_numbers(name: str) -> None:
    fn, shape = CAREFUL[name]
    report = rewriter.explain(fn)(Q, K, V)
    assert f"k f32[{shape}]" in report.sites[0].shapes
    out, *grads = exact(both(fn))
    near(forced(fn)(Q, K, V), [out])
    near(gradients(forced(fn))(Q, K, V), grads, 2e-5)


@pytest.mark.parametrize("returned", [False, True])
def test_left_where_the_loop_stays(returned: bool) -> None:
    """The logarithm of the sum is returned: the loop is run anyway."""
    x = jax.ShapeDtypeStruct((2, 4, 2048, 64), jnp.float32)

    def fn(q, k, v):
        def body(carry, x):
            return step(carry, dots(q, x[0]), x[1]), None

        row = q.shape[:-1]
        first = jnp.full(row, -jnp.inf), jnp.zeros(row), jnp.zeros(q.shape)
        carry = lax.scan(body, first, (blocks(k, size=256), blocks(v, size=256)))[0]
        return (divided(carry), carry[0] + jnp.log(carry[1]))[: 1 + returned]

    (site,) = rewriter.explain(fn)(x, x, x).sites
    assert site.replaced != returned
    assert returned == any("computed twice" in why for _, why in site.not_chosen)


def test_other_platforms_do_not_hold_the_scores() -> None:
    """What is left to XLA elsewhere would be the softmax at once."""
    x = jax.ShapeDtypeStruct((2, 4, 1024, 64), jnp.float32)

    def online(q, k, v):
        def body(carry, x):
            return step(carry, dots(q, x[0]), x[1]), None

        row = q.shape[:-1]
        first = jnp.full(row, -jnp.inf), jnp.zeros(row), jnp.zeros(q.shape)
        xs = blocks(k, size=256), blocks(v, size=256)
        return divided(lax.scan(body, first, xs)[0])

    def kernels(fn):
        program = jax.make_jaxpr(rewriter.optimize(fn, target="cpu"))(x, x, x)
        (use,) = (e.params["use"] for e in equations(program) if "use" in e.params)
        return {platform for platform, kernel in use.kernels if kernel is None}

    assert "cuda" in kernels(at_once)
    assert not kernels(online)


def equations(program: Any) -> list[Any]:
    """Equations at any depth."""
    found = []
    for e in program.eqns:
        found.append(e)
        for body in jax.tree.leaves(e.params, is_leaf=lambda x: hasattr(x, "eqns")):
            found += equations(body) if hasattr(body, "eqns") else []
    return found


@pytest.mark.parametrize(
    "fn", slow.first(1, [scanned, looped, unrolled]), ids=lambda f: f.__name__
)
def test_differentiated_before(fn: Callable[..., Any]) -> None:
    """Where the gradients are in the program, it gives the same numbers."""
    new = rewriter.optimize(
        gradients(fn), implementation={"attention": "reference"}, strict=True
    )
    near(new(Q, K, V), truth()[1], 2e-5)
