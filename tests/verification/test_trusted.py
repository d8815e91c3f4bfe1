"""verify: what is right is never off, whatever its precision, and what is wrong is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.verification.judge import judged
from rewriter.verification.probes import draws, with_numbers
from tests.support.swapped import swapped

pytestmark = pytest.mark.once

rng = np.random.default_rng(0)
B, T, D, V = 2, 8, 16, 32
X = rng.normal(size=(B, T, D)).astype("f4")
W = (rng.normal(size=(D, V)) / 4).astype("f4")
SCALE = np.ones(D, "f4")
LABELS = rng.integers(0, V, (B, T))
FORCED = {
    "attention": "memory_bounded", "rms_norm": "memory_bounded",
    "linear_cross_entropy": "memory_bounded",
}  # fmt: skip


def norm(x, scale):
    wide = x.astype(jnp.float32)
    square = jnp.mean(wide * wide, -1, keepdims=True)
    return (wide * jax.lax.rsqrt(square + 1e-6)).astype(x.dtype) * scale.astype(x.dtype)


def attend(x):
    scores = jnp.einsum("btd,bsd->bts", x, x) / 4
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), x)


def logits(x, w, scale, dtype):
    x = x.astype(dtype)
    x = x + attend(norm(x, scale))
    return (norm(x, scale) @ w.astype(dtype)).astype(jnp.float32)


def rows(x, w, scale, labels, dtype=jnp.bfloat16):
    z = logits(x, w, scale, dtype)
    picked = jnp.take_along_axis(z, labels[..., None], -1)[..., 0]
    return jax.nn.logsumexp(z, -1) - picked


def of(reduce, dtype=jnp.bfloat16):
    return lambda *args: reduce(rows(*args, dtype))


LOSSES = {
    "mean": of(jnp.mean),
    "sum": of(jnp.sum),
    "each token": of(lambda r: r),
    "float16": of(jnp.mean, jnp.float16),
    "in bfloat16": of(lambda r: r.mean().astype(jnp.bfloat16)),
    "scaled": of(lambda r: 2.0**15 * r.mean()),
    "small": of(lambda r: 1e-6 * r.mean()),
    "masked": of(lambda r: (r * (jnp.arange(T) > 2)).sum() / (B * (T - 3))),
    "spread": of(jnp.var),
    "difference": of(lambda r: r[0].mean() - r[1].mean()),
    "exponential": of(lambda r: jnp.exp(r.mean())),
    "above the mean": of(lambda r: (r - r.mean()).mean()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_right_loss_is_never_off(name):
    result = rewriter.verify(LOSSES[name], implementation=FORCED)(X, W, SCALE, LABELS)
    assert any(s.replaced for s in result.report.sites)
    assert result.ok, str(result)


def sums(x):
    return jax.nn.softmax(x).sum(-1) - 1


ZEROS = {
    "sums of weights": (sums, lambda x: sums(x) + 1e-7),
    "centred": (lambda x: (x - x.mean()).mean(), lambda x: x.mean() * 0 + 3e-8),
    "the same": (lambda x: x - x, lambda x: x * 0 + 1e-8),
    "bfloat16": (
        lambda x: (x.astype(jnp.bfloat16) - x.astype(jnp.bfloat16)).astype("f4"),
        lambda x: x * 0 + 1e-3,
    ),
}


@pytest.mark.parametrize("name", ZEROS)
def test_zero_may_be_off_by_a_rounding_of_the_arguments(name, monkeypatch):
    written, other = ZEROS[name]
    swapped(monkeypatch, other)
    result = rewriter.verify(written)(X)
    assert result.ok, str(result)


WRONG = {
    "one entry": (lambda x: x * 2, lambda x: (x * 2).at[1, 3, 5].add(0.5), (1, 3, 5)),
    "a share": (jnp.sin, lambda x: jnp.sin(x) * 1.001, None),
    "not zero": (lambda x: x - x, lambda x: x * 0 + 1e-2, None),
    "bfloat16": (
        lambda x: (x.astype(jnp.bfloat16) * 2).astype("f4"),
        lambda x: x * 2.2,
        None,
    ),
    "a sum": (lambda x: x.sum(0), lambda x: x.sum(0) * 1.1, None),
    "tiny": (
        lambda x: jnp.exp(-40 - x * x),
        lambda x: 1.1 * jnp.exp(-40 - x * x),
        None,
    ),
    "small": (lambda x: x * 1e-12, lambda x: x * 1.01e-12, None),
}


FIRST = np.arange(D) < D - 3


@pytest.mark.parametrize(
    ("written", "other", "right"),
    [
        (lambda x: jnp.where(FIRST, x, 0), lambda x: x * FIRST, False),
        (lambda x: x * FIRST, lambda x: jnp.where(FIRST, x, 0), True),
        (lambda x: x + 1, lambda x: x + x.sum() * 0 + 1, False),
        (lambda x: x[..., :-1], lambda x: x[..., :-1] + 0 * x[..., -1:], False),
        (lambda x: x @ W, lambda x: x @ W + 0 * x.sum(), False),
        (lambda x: x @ W, lambda x: jnp.einsum("btd,dv->btv", x, W), True),
    ],
)
def test_what_was_finite_stays_so(written, other, right, monkeypatch):
    """Beside an infinity that no comparison reads; what was not finite may be left."""
    swapped(monkeypatch, other)
    result = rewriter.verify(written)(X)
    assert result.ok == right, str(result)
    assert right or "finite" in str(result)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_off_and_named(name, monkeypatch):
    written, other, place = WRONG[name]
    swapped(monkeypatch, other)
    result = rewriter.verify(written)(X)
    assert not result.ok
    if place is not None:
        assert result.rows[0].worst == place
        assert f"worst at {[*place]}" in str(result)


def test_a_draw_shows_what_your_numbers_hide(monkeypatch):
    ordered = np.sort(X[0, 0])
    swapped(monkeypatch, lambda x: jax.lax.cummax(x))
    result = rewriter.verify(lambda x: x * 1.0)(ordered)
    assert "on draw 1" in str(result)
    kept = draws(
        [X, np.array([0.0, -np.inf]), LABELS, ordered], [False] * 3 + [True], 2
    )
    assert [[*p.changed] for p in kept] == [[0], [0]]
    assert sorted(kept[0].changed[0].ravel()) == sorted(X.ravel())


def test_shapes_stand_for_arrays():
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (X, W, SCALE, LABELS)
    )
    result = rewriter.verify(LOSSES["mean"], grad=True, implementation=FORCED)(*shapes)
    assert result.ok, str(result)
    assert "drawn arguments" in str(result)
    measured = rewriter.benchmark(norm, mode="forward", pairs=2)(*shapes[::2])
    assert measured.rows[0].speedup > 0


def test_drawn_integers_are_indices():
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((3, 90), "i4"), ((40, 7), "f4"))]
    numbers, floats = with_numbers(shapes)
    assert numbers.max() < 7
    assert floats.dtype == np.float32
    given = with_numbers([X, shapes[0]])
    assert given[0] is X


def test_complex_numbers_have_a_place():
    a = np.ones((2, 3), "c8")
    b = a.copy()
    b[1, 2] += 1
    assert judged(a, b, "float32").worst == (1, 2)


def causal_loss(q, k, v):
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5
    keep = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(keep, scores, -jnp.inf))
    return (jnp.einsum("bnts,bsnh->btnh", weights, v) ** 2).mean()


def test_what_cancels_in_a_gradient_cancels_up_to_rounding():
    """A first query sees one key: its gradient is 0 as written, and 1e-10 by a sum."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 128, 2, 32))
    result = rewriter.verify(causal_loss, grad=True, draws=6, implementation=FORCED)(
        q, k, v
    )
    assert any(s.replaced for s in result.report.sites)
    assert result.ok, str(result)


GRADIENT = rng.normal(size=(16, 8)).astype("f4")
GRADIENT[3] = 0


@pytest.mark.parametrize(
    ("size", "moves", "ok"),
    [
        (1e-8, 0.0, True),  # below a rounding of the largest row
        (1e-5, 1.0, True),  # another number whenever a rounding is
        (1e-5, 1e-3, False),  # a number of its own
        (1e-2, 1.0, False),  # too large for a rounding
    ],
)
def test_a_row_of_zeros_may_hold_roundings_alone(size, moves, ok):
    other = GRADIENT.copy()
    other[3] = size

    def again():
        for sign in (1, -1, 1, -1):
            moved = other.copy()
            moved[3] *= 1 + sign * moves
            yield moved

    found = judged(
        GRADIENT, other, "float32", lambda: [GRADIENT] * 4, lambda: GRADIENT,
        again=lambda: list(again()), gradient=True, unit=1.0,
    )  # fmt: skip
    assert (not found.differs) == ok, found


@pytest.mark.parametrize(("factor", "ok"), [(1.0, True), (0.5, False), (1.3, False)])
def test_a_factor_of_a_gradient_is_found_behind_unstable_rows(factor, ok):
    """Each row may be off by 16 times what a rounding changes, and all of them by 4."""
    shakes = [GRADIENT * (1 + 0.05 * rng.normal(size=GRADIENT.shape)) for _ in range(4)]
    found = judged(
        GRADIENT, GRADIENT * np.float32(factor), "bfloat16", lambda: shakes,
        lambda: GRADIENT, gradient=True, together=True, unit=1.0,
    )  # fmt: skip
    assert (not found.differs) == ok, found
    alone = judged(
        GRADIENT, GRADIENT * np.float32(factor), "bfloat16", lambda: shakes,
        lambda: GRADIENT, gradient=True, unit=1.0,
    )  # fmt: skip
    assert not alone.differs


@pytest.mark.parametrize(
    ("dtype", "rows", "roundings", "ok"),
    [
        ("bfloat16", 1, 3, True),
        ("float32", 1, 3, True),
        ("bfloat16", 1, 20, False),
        ("bfloat16", 8, 3, False),
        ("float32", 1, 1000, False),
    ],
)
def test_few_rows_that_cancel_hold_roundings_of_larger_ones(dtype, rows, roundings, ok):
    grad = np.random.default_rng(5).normal(size=(40, 16)).astype("f4")
    grad[10:20] *= 1e-3
    other = grad.copy()
    largest = np.linalg.norm(grad, axis=1).max()
    other[10 : 10 + rows, 0] += roundings * float(jnp.finfo(dtype).eps) * largest
    found = judged(
        grad, other, dtype, lambda: [grad] * 4, lambda: grad,
        again=lambda: [other] * 4, gradient=True, together=True, unit=1.0,
    )  # fmt: skip
    assert (not found.differs) == ok, found


def test_a_result_of_16_bits_that_is_nearly_one_value_loses_the_others():
    """The kernel's gradient reads the rounded result, and the program's its weights."""

    def loss(q, k, v):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 4
        scores = jnp.where(jnp.tril(jnp.ones((32, 32), bool)), scores, -1e9)
        weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(q.dtype)
        out = jnp.einsum("bnts,bsnh->btnh", weights, v)
        return jnp.mean(out.astype(jnp.float32) ** 2)

    keys = jax.random.split(jax.random.key(6), 6)[3:]
    args = [jax.random.normal(k, (2, 32, 2, 16), jnp.bfloat16) for k in keys]
    found = rewriter.verify(loss, grad=True, draws=1, implementation=FORCED)(*args)
    assert found.report.sites[0].replaced
    assert found.ok, found
