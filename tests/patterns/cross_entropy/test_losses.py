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

B, T, K, V = 2, 5, 4, 12
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, T, K)).astype(np.float32)
W = RNG.normal(size=(K, V)).astype(np.float32)
BIAS = RNG.normal(size=V).astype(np.float32)
LABELS = RNG.integers(0, V, (B, T)).astype(np.int32)
KEEP = (RNG.random((B, T)) > 0.3).astype(np.float32)
IGNORED = np.where(KEEP > 0, LABELS, -100).astype(np.int32)
FORCED = {
    "linear_cross_entropy": "memory_bounded",
    "cross_entropy": "memory_bounded",
}
PROGRAMS: dict[str, Callable[..., jax.Array]] = {}
integer_loss = optax.softmax_cross_entropy_with_integer_labels


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


@jax.custom_vjp
def with_rule(logits, targets, z_loss):
    """A loss with a rule of its own, as training libraries write it."""
    return _ruled_forward(logits, targets, z_loss)[0]


def _ruled_forward(logits, targets, z_loss):
    top = logits.max(axis=-1, keepdims=True)
    exponentials = jnp.exp(logits - top)
    total = exponentials.sum(axis=-1, keepdims=True)
    logs = logits - top - jnp.log(total)
    log_z = jnp.squeeze(jnp.log(total) + top, axis=-1)
    out = -jnp.sum(targets * logs, axis=-1) + z_loss * lax.square(log_z)
    return out, (targets, z_loss, exponentials, total, logs, log_z)


def _ruled_backward(saved, g):
    targets, z_loss, exponentials, total, logs, log_z = saved
    own = (1 + 2 * z_loss * log_z)[..., None] * exponentials / total - targets
    return g[..., None] * own, -g[..., None] * logs, jnp.zeros(())


with_rule.defvjp(_ruled_forward, _ruled_backward)


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


def _taken_apart(fn: Callable[..., jax.Array]) -> Any:
    return jax.value_and_grad(fn, (0, 1, 2))


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_found(name: str) -> None:
    report = rewriter.explain(_taken_apart(PROGRAMS[name]))(X, W, BIAS)
    assert report.counts(False, True)["linear_cross_entropy"] == 1
    assert report.counts()["attention"] == 0


@pytest.fixture(scope="module")
def numbers() -> dict[str, list[np.ndarray]]:
    """Values and gradients: in float64, differentiated first, rewritten first."""
    first = [_taken_apart(f) for f in PROGRAMS.values()]
    made = {
        "before": [rewriter.optimize(f, implementation=FORCED) for f in first],
        "after": [
            _taken_apart(rewriter.optimize(f, implementation=FORCED))
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


USED = 9
INSIDE = np.minimum(LABELS, USED - 1)


def _first(y, fill):
    """Logits, and a fill for the classes that pad the vocabulary."""
    return jnp.where(jnp.arange(V) < USED, y, fill)


def _picked(logs, labels):
    return -jnp.take_along_axis(logs, labels[..., None], -1)[..., 0]


PADDED = {
    "optax": lambda y, c: integer_loss(_first(y, -jnp.inf), c),
    "far below": lambda y, c: integer_loss(_first(y, -1e9), c),
    "log_softmax": lambda y, c: _picked(jax.nn.log_softmax(_first(y, -jnp.inf)), c),
    "least": lambda y, c: _picked(
        jax.nn.log_softmax(jnp.where(np.arange(V) > 8, jnp.finfo(y.dtype).min, y)), c
    ),
    "one_hot": lambda y, c: (
        -(jax.nn.one_hot(c, V) * jax.nn.log_softmax(_first(y, -1e9))).sum(-1)
    ),
    "z_loss": lambda y, c: (
        integer_loss(_first(y, -1e9), c)
        + 0.01 * jax.nn.logsumexp(_first(y, -1e9), -1) ** 2
    ),
    "scaled": lambda y, c: integer_loss(_first(y / 2, -jnp.inf), c),
    "capped": lambda y, c: integer_loss(_first(5 * jnp.tanh(y / 5), -1e9), c),
    "ruled": lambda y, c: with_rule(_first(y, -1e9), jax.nn.one_hot(c, V), 1e-2),
    "at most": lambda y, c: integer_loss(
        jnp.where(jnp.arange(V) <= USED - 1, y, -jnp.inf), c
    ),
    "concatenated": lambda y, c: integer_loss(
        jnp.where(jnp.arange(V)[None, None] >= USED, -jnp.inf, y), c
    ),
}


@pytest.mark.once
@pytest.mark.parametrize("name", PADDED)
def test_classes_that_only_pad_the_vocabulary(name: str) -> None:
    """They have no logits, and no gradients; a label among them picks the fill."""
    weights = jnp.cos(jnp.arange(B * T, dtype=jnp.float32)).reshape(B, T)

    def loss(x, w, bias, labels=INSIDE):
        losses = PADDED[name](x @ w + bias, labels)
        return (losses * weights).sum(), losses

    taken = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    fast = rewriter.optimize(taken, implementation=FORCED)
    (site,) = fast.report(X, W, BIAS).sites
    assert (site.op, site.backward) == ("linear_cross_entropy", True)
    assert site.params["used"] == USED
    odd = jnp.asarray([[0, 8, 9, 11, 12], [3, -1, 100, 10, -12]], jnp.int32)
    for labels in (INSIDE, odd):
        got, want = (f(X, W, BIAS, labels) for f in (fast, jax.jit(taken)))
        for g, t in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            np.testing.assert_allclose(g, t, rtol=1e-4, atol=1e-5)


NOT_PADDED = {
    "last": lambda y: jnp.where(jnp.arange(V) > 2, y, -jnp.inf),
    "some": lambda y: jnp.where(jnp.arange(V) % 2 == 0, y, -jnp.inf),
    "by an array": lambda y: jnp.where(jnp.asarray(KEEP[0, 0] > BIAS), y, -jnp.inf),
    "near": lambda y: jnp.where(jnp.arange(V) < USED, y, -3.0),
    "by row": lambda y: jnp.where(jnp.arange(V) < 5 + jnp.arange(T)[:, None], y, -1e9),
    "positive": lambda y: jnp.where(jnp.arange(V) < USED, y, 1e9),
}


@pytest.mark.once
@pytest.mark.parametrize("name", NOT_PADDED)
def test_other_masks_of_classes(name: str) -> None:
    def loss(x, w, bias):
        losses = integer_loss(NOT_PADDED[name](x @ w + bias), jnp.full((B, T), 4))
        return losses.mean(), losses

    taken = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    fast = rewriter.optimize(taken, implementation=FORCED)
    sites = fast.report(X, W, BIAS).sites
    assert not any(s.params.get("used") for s in sites)
    got, want = fast(X, W, BIAS), jax.jit(taken)(X, W, BIAS)
    for g, t in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(g, t, rtol=1e-4, atol=1e-5)


@pytest.mark.once
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_a_rule_for_labels_that_are_no_class(z_loss: float) -> None:
    """Such a label has no loss, and by the rule still moves its logits."""

    def loss(x, w, bias):
        losses = with_rule(x @ w + bias, jax.nn.one_hot(IGNORED, V), z_loss)
        return losses.sum(), losses

    taken = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    fast = rewriter.optimize(taken, implementation=FORCED)
    (site,) = fast.report(X, W, BIAS).sites
    assert site.backward
    assert site.params["whole_slopes"]
    for got, want in zip(
        jax.tree.leaves(fast(X, W, BIAS)),
        jax.tree.leaves(jax.jit(taken)(X, W, BIAS)),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    plain = rewriter.explain(_taken_apart(PROGRAMS["ignored_one_hot"]))(X, W, BIAS)
    assert not dict(plain.sites[0].params).get("whole_slopes")


@pytest.mark.once
@pytest.mark.parametrize("wrong", ["sign", "scale", "no targets", "other exponentials"])
def test_other_rules_are_no_gradients(wrong: str) -> None:
    def rule(saved, g):
        targets, z_loss, exponentials, total, logs, log_z = saved
        if wrong == "other exponentials":
            total = total + 1
        own = (1 + 2 * z_loss * log_z)[..., None] * exponentials / total
        own = own if wrong == "no targets" else own - targets
        own = {"sign": -own, "scale": 1.01 * own}.get(wrong, own)
        return g[..., None] * own, -g[..., None] * logs, jnp.zeros(())

    other = jax.custom_vjp(lambda *given: _ruled_forward(*given)[0])
    other.defvjp(_ruled_forward, rule)
    hot = jax.nn.one_hot(LABELS, V)
    loss = lambda x, w, bias: other(x @ w + bias, hot, 1e-2).mean()
    taken = _taken_apart(loss)
    report = rewriter.explain(taken)(X, W, BIAS)
    assert report.counts(backward=True)["linear_cross_entropy"] == 0
    got = rewriter.optimize(taken, implementation=FORCED)(X, W, BIAS)
    for g, t in zip(
        *map(jax.tree.leaves, (got, jax.jit(taken)(X, W, BIAS))), strict=True
    ):
        np.testing.assert_allclose(g, t, rtol=1e-4, atol=1e-5)


def _equations(fn: Callable[..., Any]) -> str:
    fast = rewriter.optimize(fn, implementation=FORCED)
    return str(jax.make_jaxpr(fast)(X, W, BIAS))


@pytest.mark.parametrize("name", ["mean", "masked_mean", "with_z_loss", "shifted"])
def test_logits_are_computed_once(name: str) -> None:
    """One equation gives the losses and gradients: it knows the cotangent."""
    text = _equations(_taken_apart(PROGRAMS[name]))
    assert "rewriter_site_together" in text
    assert "rewriter_site_backward" not in text


def test_a_cotangent_that_depends_on_the_loss_comes_later() -> None:
    text = _equations(_taken_apart(PROGRAMS["perplexity"]))
    assert "rewriter_site_together" not in text
    assert "rewriter_site_backward" in text


@pytest.mark.once
def test_one_equation_can_be_transformed() -> None:
    """Once more differentiated, and under `jax.vmap`."""

    def squares(x, of=None):
        return sum((g**2).sum() for g in jax.tree.leaves(of(x, W, BIAS)))

    taken = _taken_apart(PROGRAMS["mean"])
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


TOTALS = {
    "soft": lambda y: (jax.nn.softmax(y[::-1]) * jax.nn.log_softmax(y)).sum(),
    "weighted classes": lambda y: (
        jax.nn.one_hot(LABELS, V) * jnp.arange(V) * jax.nn.log_softmax(y)
    ).sum(),
    "over positions": lambda y: (
        jax.nn.one_hot(LABELS, V) * jax.nn.log_softmax(y, axis=1)
    ).sum(),
    "squared": lambda y: (
        jax.nn.one_hot(LABELS, V) * jnp.square(jax.nn.log_softmax(y))
    ).sum(),
    "of probabilities": lambda y: (jax.nn.one_hot(LABELS, V) * jax.nn.softmax(y)).sum(),
    "log-sum-exps": lambda y: jax.nn.log_softmax(y).sum(),
    "two labels": lambda y: (
        (jax.nn.one_hot(LABELS, V) + jax.nn.one_hot(LABELS[::-1], V))
        * jax.nn.log_softmax(y)
    ).sum(),
}


@pytest.mark.once
@pytest.mark.parametrize("name", TOTALS)
def test_other_totals_are_left_alone(name: str) -> None:
    total = lambda x, w, bias: TOTALS[name](x @ w + bias)
    report = rewriter.explain(total)(X, W, BIAS)
    assert not any(s.op.endswith("cross_entropy") for s in report.sites)
    assert report.after is report.before


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
