"""Losses in whole programs: means, masks, shifts, and gradients that JAX has taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import rewriter
from tests.patterns.cross_entropy.pieces import (
    BIAS,
    FORCED,
    IGNORED,
    KEEP,
    LABELS,
    RNG,
    B,
    K,
    T,
    V,
    W,
    X,
    flattened,
    integer_loss,
    with_rule,
)

PROGRAMS: dict[str, Callable[..., jax.Array]] = {}


def program(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A function of rows, weights, bias: a scalar."""
    PROGRAMS[fn.__name__] = fn
    return fn


@program
def mean(x, w, bias):
    return integer_loss(x @ w + bias, LABELS).mean()


@program
def mean_of_taken(x, w, bias):
    logs = jax.nn.log_softmax(x @ w + bias)
    return -jnp.take_along_axis(logs, LABELS[..., None], -1).mean()


@program
def mean_of_one_hot(x, w, bias):
    logs = jax.nn.log_softmax(x @ w + bias)
    return -(jax.nn.one_hot(LABELS, V) * logs).sum(-1).mean()


@program
def mean_of_indexed(x, w, bias):
    logs = jax.nn.log_softmax((x @ w + bias).reshape(-1, V))
    return -logs[jnp.arange(B * T), LABELS.reshape(-1)].mean()


@program
def masked_mean(x, w, bias):
    return (integer_loss(x @ w + bias, LABELS) * KEEP).sum() / KEEP.sum()


@program
def ignored_labels(x, w, bias):
    keep = IGNORED != -100
    losses = integer_loss(x @ w + bias, jnp.where(keep, IGNORED, 0))
    return jnp.where(keep, losses, 0).sum() / keep.sum()


@program
def ignored_one_hot(x, w, bias):
    logs = jax.nn.log_softmax(x @ w + bias)
    return -(jax.nn.one_hot(IGNORED, V) * logs).sum(-1).mean()


@program
def shifted(x, w, bias):
    logits = x @ w + bias
    flat = logits[..., :-1, :].reshape(-1, V)
    return integer_loss(flat, LABELS[..., 1:].reshape(-1)).mean()


@program
def shifted_log_probabilities(x, w, bias):
    logs = jax.nn.log_softmax(x @ w + bias)[:, :-1]
    return -(jax.nn.one_hot(LABELS[:, 1:], V) * logs).sum(-1).mean()


@program
def shifted_and_masked_at_once(x, w, bias):
    logs = jax.nn.log_softmax(x @ w + bias)
    hot = jax.nn.one_hot(LABELS[:, 1:], V) * KEEP[:, 1:, None]
    return -(hot * logs[:, :-1]).sum() / KEEP[:, 1:].sum()


@program
def log_probabilities_backwards(x, w, bias):
    logs = jax.nn.log_softmax(x @ w + bias)[:, ::-1]
    return -(jax.nn.one_hot(LABELS[:, ::-1], V) * logs).sum(-1).mean()


@program
def with_z_loss(x, w, bias):
    logits = x @ w + bias
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    own = -(jax.nn.one_hot(LABELS, V) * (logits - total)).sum(-1)
    return (own + 1e-2 * jnp.square(total[..., 0])).mean()


@program
def total_of_one_hot(x, w, bias):
    return -(jax.nn.one_hot(LABELS, V) * jax.nn.log_softmax(x @ w + bias)).sum()


@program
def mean_of_all(x, w, bias):
    return -V * (jax.nn.one_hot(LABELS, V) * jax.nn.log_softmax(x @ w + bias)).mean()


@program
def weighted_total(x, w, bias):
    targets = jax.nn.one_hot(LABELS, V) * KEEP[..., None]
    return -jnp.sum(targets * jax.nn.log_softmax(x @ w + bias)) / KEEP.sum()


@program
def smoothed_total(x, w, bias):
    targets = optax.smooth_labels(jax.nn.one_hot(LABELS, V), 0.1)
    return -(targets * jax.nn.log_softmax(x @ w + bias)).sum() / (B * T)


@program
def ruled(x, w, bias):
    losses = with_rule(x @ w + bias, jax.nn.one_hot(LABELS, V), 1e-2)
    return (losses * KEEP).sum() / KEEP.sum()


@program
def smoothed(x, w, bias):
    targets = optax.smooth_labels(jax.nn.one_hot(LABELS, V), 0.1)
    return optax.softmax_cross_entropy(x @ w + bias, targets).mean()


@program
def capped(x, w, bias):
    return integer_loss(5 * jnp.tanh((x @ w + bias) / 5), LABELS).mean()


@program
def tied(x, w, bias):
    return integer_loss(jnp.einsum("btk,vk->btv", x, w.T) + bias, LABELS).sum()


@program
def perplexity(x, w, bias):
    return jnp.exp(integer_loss(x @ w + bias, LABELS).mean())


@program
def of_chunks(x, w, bias):
    def step(total, part):
        return total + integer_loss(part[0] @ w + bias, part[1]).sum(), None

    return lax.scan(step, 0.0, (x, LABELS))[0] / (B * T)


@program
def checkpointed(x, w, bias):
    inner = lambda x, w: integer_loss(x @ w + bias, LABELS).mean()
    return jax.checkpoint(inner)(jnp.sin(x), w)


@program
def per_example(x, w, bias):
    one = lambda x, t: integer_loss(x @ w + bias, t).mean()
    return jax.vmap(one)(x, LABELS).mean()


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_found(name: str) -> None:
    report = rewriter.explain(flattened(PROGRAMS[name]))(X, W, BIAS)
    assert report.counts(False, True)["linear_cross_entropy"] == 1
    assert report.counts()["attention"] == 0


@pytest.fixture(scope="module")
def numbers() -> dict[str, list[np.ndarray]]:
    """Values and gradients: in float64, differentiated first, rewritten first."""
    first = [flattened(f) for f in PROGRAMS.values()]
    made = {
        "before": [rewriter.optimize(f, implementation=FORCED) for f in first],
        "after": [
            flattened(rewriter.optimize(f, implementation=FORCED))
            for f in PROGRAMS.values()
        ],
    }
    run = lambda fs: jax.jit(lambda *a: [jax.tree.leaves(f(*a)) for f in fs])
    found = {n: run(fs)(X, W, BIAS) for n, fs in made.items()}
    with jax.enable_x64(True):
        wide = [jnp.asarray(a, "float64") for a in (X, W, BIAS)]
        found["true"] = run(first)(*wide)
    return found


@pytest.mark.once
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_agree_with_float64(name: str, order: str, numbers: Any) -> None:
    at = list(PROGRAMS).index(name)
    for got, true in zip(numbers[order][at], numbers["true"][at], strict=True):
        np.testing.assert_allclose(got, true, rtol=1e-5, atol=1e-6)


def _equations(fn: Callable[..., Any]) -> str:
    fast = rewriter.optimize(fn, implementation=FORCED)
    return str(jax.make_jaxpr(fast)(X, W, BIAS))


@pytest.mark.parametrize("name", ["mean", "masked_mean", "with_z_loss", "shifted"])
def test_logits_are_computed_once(name: str) -> None:
    """One equation gives the losses and gradients: it knows the cotangent."""
    text = _equations(flattened(PROGRAMS[name]))
    assert "rewriter_site_together" in text
    assert "rewriter_site_backward" not in text


def test_a_cotangent_that_depends_on_the_loss_comes_later() -> None:
    text = _equations(flattened(PROGRAMS["perplexity"]))
    assert "rewriter_site_together" not in text
    assert "rewriter_site_backward" in text


@pytest.mark.once
def test_one_equation_can_be_transformed() -> None:
    """Once more differentiated, and under `jax.vmap`."""

    def squares(x, of=None):
        return sum((g**2).sum() for g in jax.tree.leaves(of(x, W, BIAS)))

    taken = flattened(PROGRAMS["mean"])
    fast = rewriter.optimize(taken, implementation=FORCED)
    got = jax.jit(jax.grad(lambda x: squares(x, fast)))(X)
    want = jax.jit(jax.grad(lambda x: squares(x, taken)))(X)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    xs = jnp.stack([X, 2 * X])
    got, want = (jax.jit(jax.vmap(f, (0, None, None)))(xs, W, BIAS)[1]
                 for f in (fast, taken))  # fmt: skip
    for g, t in zip(got, want, strict=True):
        np.testing.assert_allclose(g, t, rtol=1e-4, atol=1e-5)


def test_logits_that_are_read_too_are_operands() -> None:
    def with_accuracy(x, w):
        logits = x @ w
        return integer_loss(logits, LABELS).mean(), (logits.argmax(-1) == LABELS).mean()

    report = rewriter.explain(jax.value_and_grad(with_accuracy, (0, 1), has_aux=True))(
        X, W
    )
    counts = report.counts(backward=True)
    assert counts["cross_entropy"] == 1
    assert counts["linear_cross_entropy"] == 0
    assert "argmax reads them" in str(report)


@pytest.mark.once
@pytest.mark.parametrize("first", [1, 2, 3])
def test_some_rows_of_log_probabilities(first: int) -> None:
    def taken(x, w):
        logs = jax.nn.log_softmax(x @ w)[:, first:]
        return -jnp.take_along_axis(logs, LABELS[:, first:, None], -1).sum()

    fast = rewriter.optimize(taken, implementation=FORCED)
    (site,) = fast.report(X, W).sites
    assert (site.op, site.replaced) == ("linear_cross_entropy", True)
    got, want = (jax.jit(jax.grad(f, (0, 1)))(X, W) for f in (fast, taken))
    for g, t in zip(got, want, strict=True):
        np.testing.assert_allclose(g, t, rtol=1e-4, atol=1e-5)


@pytest.mark.once
def test_two_parts_of_the_same_log_probabilities_are_no_loss() -> None:
    """All of them stay computed for the other part."""

    def both(x, w):
        logs = jax.nn.log_softmax(x @ w)
        first = jnp.take_along_axis(logs[:, :-1], LABELS[:, 1:, None], -1).sum()
        return first + jnp.take_along_axis(logs[:, :-2], LABELS[:, 2:, None], -1).sum()

    assert not rewriter.explain(both)(X, W).counts()["linear_cross_entropy"]


def test_soft_targets_are_named_in_the_report() -> None:
    def distilled(x, w):
        logits = x[jnp.asarray([1, 0])] @ w
        return -(jax.nn.softmax(logits * 2) * jax.nn.log_softmax(logits)).sum(-1).mean()

    report = rewriter.explain(distilled)(X, W)
    assert not sum(report.counts().values())
    assert "targets" in str(report)


@pytest.mark.once
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_labels_of_every_width(dtype: str) -> None:
    """More classes than the labels' dtype can count."""
    w = RNG.normal(size=(K, 300)).astype(np.float32)
    labels = np.array([[0, 1, 100, 127, 5], [7, 9, 120, 3, 2]], dtype)

    def loss(x, labels):
        logs = jax.nn.log_softmax(x @ w)
        return -jnp.take_along_axis(logs, labels[..., None], -1)[..., 0]

    fast = rewriter.optimize(loss, implementation=FORCED)
    assert fast.report(X, labels).counts()["linear_cross_entropy"] == 1
    np.testing.assert_allclose(fast(X, labels), jax.jit(loss)(X, labels), rtol=1e-5)
    odd = labels.astype(np.int64) * 0 - 1
    odd = jnp.asarray(odd.astype(dtype))
    np.testing.assert_allclose(fast(X, odd), jax.jit(loss)(X, odd), rtol=1e-5)


OUTSIDE = jnp.asarray(
    [[0, 11, 12, -1, -13], [3, 100, -100, 2**31 - 1, -(2**31)]], jnp.int32
)


@pytest.mark.once
def test_labels_that_are_no_class() -> None:
    """Values and gradients, each as the program has them."""
    row = jnp.arange(B)[:, None], jnp.arange(T)
    expanded = OUTSIDE[..., None]
    taken = lambda y, **mode: jnp.take_along_axis(y, expanded, -1, **mode)[..., 0]
    ways = {
        "logs": lambda y: -taken(jax.nn.log_softmax(y)),
        "logits": lambda y: jax.nn.logsumexp(y, -1) - taken(y),
        "clip": lambda y: jax.nn.logsumexp(y, -1) - taken(y, mode="clip"),
        "filled": lambda y: -taken(jax.nn.log_softmax(y), fill_value=0, mode="fill"),
        "one_hot": lambda y: (
            -(jax.nn.one_hot(OUTSIDE, V) * jax.nn.log_softmax(y)).sum(-1)
        ),
        "one_hot_of_logits": lambda y: (
            jax.nn.logsumexp(y, -1) - (jax.nn.one_hot(OUTSIDE, V) * y).sum(-1)
        ),
        "got": lambda y: -jax.nn.log_softmax(y).at[(*row, OUTSIDE)].get(mode="fill"),
    }
    weights = jnp.cos(jnp.arange(B * T, dtype=jnp.float32)).reshape(B, T)

    def both(way):
        loss = lambda x, w: way(x @ w)
        total = lambda x, w: jnp.nansum(loss(x, w) * weights)
        return lambda x, w: (loss(x, w), jax.grad(total, (0, 1))(x, w))

    fast = {
        n: rewriter.optimize(both(f), implementation=FORCED) for n, f in ways.items()
    }
    for name, fn in fast.items():
        found = fn.report(X, W).counts(backward=True)["linear_cross_entropy"]
        assert found >= 1, name
    run = lambda fs: jax.jit(lambda x, w: {n: f(x, w) for n, f in fs.items()})(X, W)
    got, want = run(fast), run({n: both(f) for n, f in ways.items()})
    for name in ways:
        pairs = zip(*map(jax.tree.leaves, (got[name], want[name])), strict=True)
        for g, t in pairs:
            np.testing.assert_allclose(g, t, rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_program_may_return_numbers_of_its_own_beside_its_loss() -> None:
    def steps(x, w):
        return integer_loss(x @ w, LABELS).mean(), 0.5, True

    report = rewriter.explain(steps, implementation=FORCED)(X, W)
    assert [s.op for s in report.sites] == ["linear_cross_entropy"]
    assert not report.failures
