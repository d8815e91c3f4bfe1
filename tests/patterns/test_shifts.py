"""A softmax's shift must be the maximum of its own row, or the program stays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter

B, N, T, S, H = 1, 2, 8, 16, 4
Q, K, V = (
    np.random.default_rng(i).standard_normal((B, n, w, H), np.float32)
    for i, (n, w) in enumerate([(N, T), (N, S), (N, S)])
)
MASK = np.arange(T)[:, None] + S - T >= np.arange(S)
BIAS = np.random.default_rng(3).standard_normal((N, T, S), np.float32)


def dots(q, k):
    return jnp.einsum("bnth,bnsh->bnts", q, k)


def top(s, axis=-1):
    return s.max(axis, keepdims=True)


def shifted(s, by, v):
    p = jnp.exp(s - by)
    return jnp.einsum("bnts,bnsh->bnth", p / p.sum(-1, keepdims=True), v)


def hidden(s):
    return jnp.where(MASK, s, -jnp.inf)


def of(by, scores=lambda q, k: dots(q, k)):
    """An attention whose exponents are shifted by some function of the scores."""
    return lambda q, k, v: shifted(scores(q, k), by(scores(q, k)), v)


def stream(first, new, old=lambda m, n: m):
    """An online softmax: what is the largest at first, and after each block."""

    def fn(q, k, v):
        def step(carry, x):
            m, total, out = carry
            s = dots(q, x[0])
            n = new(m, s)
            p, factor = jnp.exp(s - n), jnp.exp(old(m, n) - n)
            total = total * factor + p.sum(-1, keepdims=True)
            return (
                n,
                total,
                out * factor + jnp.einsum("bnts,bnsh->bnth", p, x[1]),
            ), None

        blocks = tuple(jnp.moveaxis(x.reshape(B, N, 4, 4, H), 2, 0) for x in (k, v))
        zero = jnp.zeros((B, N, T, 1))
        carry = (jnp.full_like(zero, first), zero, jnp.zeros((B, N, T, H)))
        _, total, out = lax.scan(step, carry, blocks)[0]
        return out / total

    return fn


def two_blocks(both):
    """Two halves of the keys, merged by the larger of both maxima, or another."""

    def fn(q, k, v):
        parts = []
        for at in (slice(0, 6), slice(6, S)):
            s = dots(q, k[:, :, at])
            m = top(s)
            p = jnp.exp(s - m)
            out = jnp.einsum("bnts,bnsh->bnth", p, v[:, :, at])
            parts.append((m, p.sum(-1, keepdims=True), out))
        (m1, l1, o1), (m2, l2, o2) = parts
        m = both(m1, m2)
        e1, e2 = jnp.exp(m1 - m), jnp.exp(m2 - m)
        return (o1 * e1 + o2 * e2) / (l1 * e1 + l2 * e2)

    return fn


def masked_behind(q, k, v):
    s = dots(q, k)
    p = jnp.where(MASK, jnp.exp(s - top(s)), 0.0)
    return jnp.einsum("bnts,bnsh->bnth", p / p.sum(-1, keepdims=True), v)


def renormalised(q, k, v):
    p = jax.nn.softmax(dots(q, k)) * MASK
    return jnp.einsum("bnts,bnsh->bnth", p / p.sum(-1, keepdims=True), v)


larger = lambda m, s: jnp.maximum(m, top(s))
lse = lambda s: jax.nn.logsumexp(s, -1, keepdims=True)
leaky = lambda s: jnp.where(s >= 0, s, 0.2 * s)
FOUND = {
    "maximum": of(top),
    "stopped": of(lambda s: lax.stop_gradient(top(s))),
    "stopped twice": of(lambda s: lax.stop_gradient(top(lax.stop_gradient(s)))),
    "floor far below": of(lambda s: jnp.maximum(top(s), -1e30)),
    "initial": of(lambda s: s.max(-1, keepdims=True, initial=-jnp.inf)),
    "guarded": of(lambda s: jnp.where(jnp.isfinite(top(s)), top(s), 0.0)),
    "in halves": of(lambda s: jnp.maximum(top(s[..., :6]), top(s[..., 6:]))),
    "of maxima": of(lambda s: top(s.reshape(B, N, T, 4, 4).max(-1))),
    "twice": of(lambda s: top(s) + top(s - top(s))),
    "log-sum-exp": of(lse),
    "scaled": of(top, lambda q, k: 3 * dots(q, k)),
    "rectified": of(top, lambda q, k: jax.nn.relu(0.3 * dots(q, k))),
    "clipped": of(top, lambda q, k: jnp.clip(0.3 * dots(q, k), -1, 1)),
    "cut at zero": of(top, lambda q, k: leaky(0.3 * dots(q, k))),
    "scaled behind": lambda q, k, v: shifted(
        3 * dots(q, k), 3 * top(dots(q, k)), v
    ),
    "masked": of(top, lambda q, k: hidden(dots(q, k))),
    "with a bias": of(top, lambda q, k: dots(q, k) + BIAS),
    "masked twice": lambda q, k, v: shifted(
        hidden(hidden(dots(q, k))), top(hidden(dots(q, k))), v
    ),
    "stream": stream(-jnp.inf, larger),
    "stream from a fill": stream(-1e30, larger),
    "two blocks": two_blocks(jnp.maximum),
}  # fmt: skip

REFUSED = {
    "largest size": of(lambda s: top(jnp.abs(s))),
    "half of it": of(lambda s: top(s) / 2),
    "twice it": of(lambda s: 2 * top(s)),
    "one more": of(lambda s: top(s) + 50),
    "smallest": of(lambda s: s.min(-1, keepdims=True)),
    "mean": of(lambda s: s.mean(-1, keepdims=True)),
    "of fewer keys": of(lambda s: top(s[..., : S // 2])),
    "of one key": of(lambda s: s[..., :1]),
    "of more rows": of(lambda s: top(top(s), -2)),
    "of another row": of(lambda s: jnp.roll(top(s), 1, -2)),
    "of another head": of(lambda s: top(s)[:, ::-1]),
    "of a block each": of(
        lambda s: jnp.repeat(s.reshape(B, N, T, 4, 4).max(-1), 4, -1)
    ),
    "of other scores": lambda q, k, v: shifted(dots(q, k), top(dots(q, k + 1)), v),
    "before the scale": lambda q, k, v: shifted(3 * dots(q, k), top(dots(q, k)), v),
    "before the bias": lambda q, k, v: shifted(
        dots(q, k) + BIAS, top(dots(q, k)), v
    ),
    "before the mask": lambda q, k, v: shifted(
        hidden(dots(q, k)), top(dots(q, k)), v
    ),
    "mask behind": masked_behind,
    "renormalised": renormalised,
    "floor of zero": of(lambda s: jnp.maximum(top(s), 0.0)),
    "ceiling": of(lambda s: jnp.minimum(top(s), 0.0)),
    "log-sum-exp of half": of(lambda s: lse(s / 2)),
    "log-sum-exp of fewer": of(lambda s: lse(s[..., : S // 2])),
    "stream from zero": stream(0.0, larger),
    "rectified, all": of(lambda s: jax.nn.relu(top(s))),
    "all, by rectified": lambda q, k, v: shifted(
        dots(q, k), top(jax.nn.relu(dots(q, k))), v
    ),
    "rectified, by plain": lambda q, k, v: shifted(
        jax.nn.relu(dots(q, k)), top(dots(q, k)), v
    ),
    "stream, the last block's": stream(-1e30, lambda m, s: top(s)),
    "stream, the first": stream(50.0, lambda m, s: m),
    "stream, the sizes'": stream(-1e30, lambda m, s: jnp.maximum(m, top(jnp.abs(s)))),
    "two blocks, the smaller": two_blocks(jnp.minimum),
    "two blocks, the first": two_blocks(lambda a, b: a),
    "two blocks, the sum": two_blocks(lambda a, b: a + b),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    report = rewriter.explain(FOUND[name])(Q, K, V)
    assert [s.op for s in report.sites] == ["attention"], str(report)
    assert "unshifted" not in report.sites[0].params


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    report = rewriter.explain(REFUSED[name])(Q, K, V)
    assert not report.sites
    assert not report.failures


def test_numbers_are_those_of_float64() -> None:
    """Scores of several hundred, which overflow without the maximum."""

    def every(q, k, v):
        return {name: fn(q, k, v) for name, fn in FOUND.items()}

    given = 20 * Q, 20 * K, V
    forced = {"attention": "memory_bounded"}
    ours = jax.jit(rewriter.optimize(every, implementation=forced))(*given)
    with jax.enable_x64(True):
        exact = jax.jit(every)(*(x.astype(np.float64) for x in given))
    for name, out in ours.items():
        np.testing.assert_allclose(out, exact[name], rtol=0, atol=2e-3, err_msg=name)


SOME = np.copy(MASK)
SOME[3], SOME[5, :8] = False, False

MASKS = {
    "none": lambda s: s,
    "added": lambda s: s + jnp.where(SOME, 0.0, -1e4),
    "times": lambda s: s - 1e4 * ~SOME,
    "chosen": lambda s: jnp.where(SOME, s, -1e4),
    "two": lambda s: s + jnp.where(SOME, 0.0, -1e4) + jnp.where(BIAS > 1, -1e4, 0.0),
    "bias": lambda s: s + BIAS,
    "bias and mask": lambda s: s + BIAS + jnp.where(SOME, 0.0, -1e4),
}
"""Scores behind a mask; no maximum of other numbers may stand for their own."""

SHIFTS = {
    "none": lambda s: jnp.zeros(()),
    "first keys": lambda s: top(s[..., :6]),
    "last keys": lambda s: top(s[..., 9:]),
    "first key": lambda s: s[..., :1],
    "half": lambda s: top(s) / 2,
    "of all heads": lambda s: top(s, (1, -1)),
    "own": top,
}


@pytest.mark.parametrize("masked", MASKS)
def test_a_shift_of_a_masked_row_keeps_what_is_finite(masked: str) -> None:
    """Some rows see no key of those whose maximum is subtracted: 0 over 0, or inf."""
    by_shift = {
        n: of(m, lambda q, k: MASKS[masked](dots(q, k))) for n, m in SHIFTS.items()
    }

    def every(q, k, v):
        return {name: fn(q, k, v) for name, fn in by_shift.items()}

    fast = rewriter.optimize(every, implementation={"attention": "memory_bounded"})
    assert len(fast.report(Q, K, V).sites) == 2  # unshifted, and by its own maximum
    got, want = fast(Q, K, V), jax.jit(every)(Q, K, V)
    for name, out in got.items():
        np.testing.assert_allclose(out, want[name], atol=1e-3, err_msg=name)


# ------------------------------------------------------------------------- losses
LOGITS = np.random.default_rng(4).standard_normal((6, 12), np.float32)
LABELS = np.arange(6) % 12
EVEN = np.arange(12) % 2 == 0


def loss(by, scores=lambda y: y, shown=lambda p: p):
    def fn(y):
        y = scores(y)
        total = shown(jnp.exp(y - by(y))).sum(-1, keepdims=True)
        return (jnp.log(total) + by(y))[:, 0] - y[jnp.arange(6), LABELS]

    return fn


LOSSES = {
    "maximum": loss(top),
    "stopped": loss(lambda y: lax.stop_gradient(top(y))),
    "floor far below": loss(lambda y: jnp.maximum(top(y), -1e30)),
    "scaled": loss(top, lambda y: y / 2),
    "library": lambda y: -jax.nn.log_softmax(y)[jnp.arange(6), LABELS],
}
OTHER_LOSSES = {
    "largest size": loss(lambda y: top(jnp.abs(y))),
    "half of it": loss(lambda y: top(y) / 2),
    "of fewer classes": loss(lambda y: top(y[:, :6])),
    "of all rows": loss(lambda y: top(top(y), 0)),
    "of another row": loss(lambda y: jnp.roll(top(y), 1, 0)),
    "smallest": loss(lambda y: y.min(-1, keepdims=True)),
    "mean": loss(lambda y: y.mean(-1, keepdims=True)),
    "floor of zero": loss(lambda y: jnp.maximum(top(y), 0)),
    "one more": loss(lambda y: top(y) + 50),
    "of hidden classes": loss(top, shown=lambda p: jnp.where(EVEN, p, 0)),
}


@pytest.mark.parametrize("name", [*LOSSES, *OTHER_LOSSES])
def test_losses(name: str) -> None:
    report = rewriter.explain({**LOSSES, **OTHER_LOSSES}[name])(LOGITS)
    assert bool(report.sites) == (name in LOSSES), str(report)
    assert not report.failures
