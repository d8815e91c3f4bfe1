"""Losses as libraries write them, and programs that only look like one.

Each loss is called with kernels forced: its gradient by JAX, and the program that
computes the gradient. Both are compared with float64.
"""

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
    integer_loss,
)

LINEAR, GIVEN = "linear_cross_entropy", "cross_entropy"
HEADS = (RNG.normal(size=(3, K, V)) * 0.7).astype(np.float32)
MORE = RNG.integers(0, V, (3, B, T)).astype(np.int32)
TEXTS = RNG.normal(size=(V, K)).astype(np.float32)
IMAGES = RNG.normal(size=(V, K)).astype(np.float32)
TABLE = RNG.normal(size=(V, K)).astype(np.float32)
BIAS = RNG.normal(size=V).astype(np.float32)
DEPTHS = RNG.normal(size=(2, B, T, K)).astype(np.float32)
SCALE = np.float32(0.3)

PROGRAMS: dict[
    str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, int], Any]
] = {}
OTHERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}


def program(*args: Any, backward: bool = True, **wanted: int) -> Any:
    """A loss of arrays, and how many sites of each op it has; one linear by default."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[fn.__name__] = fn, args, wanted or {LINEAR: 1}, backward
        return fn

    return add


def other(*args: Any) -> Any:
    """A program that is no such loss, or that may not be replaced."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        OTHERS[fn.__name__] = fn, args
        return fn

    return add


def hot(labels: Any) -> Any:
    return jax.nn.one_hot(labels, V)


def log_softmax(y: Any) -> Any:
    return jax.nn.log_softmax(y, axis=-1)


# ------------------------------------------------------------------------- pairs
@program(IMAGES, TEXTS, linear_cross_entropy=2, backward=False)
def optax_pairs(a, b):
    """CLIP: both axes of one product; its labels count up."""
    logits, own = a @ b.T * 4.0, jnp.arange(V)
    return (integer_loss(logits, own).mean() + integer_loss(logits.T, own).mean()) / 2


@program(IMAGES, TEXTS, SCALE, linear_cross_entropy=2, backward=False)
def pairs_with_temperature(a, b, scale):
    """Hugging Face's hybrid CLIP: the diagonal of log-probabilities, a learnt scale."""
    logits = jnp.matmul(a, b.T) * jnp.exp(scale)

    def cross_entropy(logits, axis):
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits, axis=axis)))

    return (cross_entropy(logits, 0) + cross_entropy(logits, 1)) / 2


@program(IMAGES, TEXTS)
def one_side_of_pairs(a, b):
    """InfoNCE with a fixed temperature."""
    logits = jnp.einsum("ik,jk->ij", a, b) / 0.5
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.diagonal(logits))


@program(IMAGES)
def pairs_of_one_array(a):
    return -jnp.diag(jax.nn.log_softmax(a @ a.T)).mean()


@program(IMAGES, TEXTS)
def pairs_by_an_identity(a, b):
    return -(jnp.eye(V) * log_softmax(a @ b.T)).sum(-1).mean()


@program(IMAGES, TEXTS, SCALE)
def divided_by_temperature(a, b, tau):
    rows = jnp.arange(V)
    return -log_softmax(a @ b.T / tau)[rows, rows].mean()


@program(X, W, SCALE)
def labels_and_temperature(x, w, tau):
    return integer_loss((x @ w) / tau, LABELS).mean()


# --------------------------------------------------------------- several heads
@program(X, W, linear_cross_entropy=2, backward=False)
def next_and_second_next(x, w):
    """Two shifts of the same logits: their gradient is one product."""
    logits = x @ w
    first = integer_loss(logits[:, :-1], LABELS[:, 1:]).mean()
    return first + 0.3 * integer_loss(logits[:, :-2], LABELS[:, 2:]).mean()


@program(X, W, DEPTHS, linear_cross_entropy=3)
def depths_share_weights(x, w, depths):
    """DeepSeek's multi-token prediction: rows for each depth, one output matrix."""
    losses = [integer_loss(x @ w, LABELS).mean()]
    for d in range(2):
        losses.append(0.1 * integer_loss(depths[d] @ w, MORE[d]).mean())
    return sum(losses)


@program(X, HEADS, linear_cross_entropy=3)
def heads_in_a_loop(x, heads):
    return sum(integer_loss(x @ heads[i], MORE[i]).mean() for i in range(3)) / 3


@program(X, HEADS, cross_entropy=1)
def vmapped_heads(x, heads):
    one = lambda w, labels: integer_loss(x @ w, labels).mean()
    return jax.vmap(one)(heads, MORE).mean()


@program(X, HEADS, cross_entropy=1)
def heads_by_einsum(x, heads):
    logits = jnp.einsum("btk,hkv->hbtv", x, heads)
    return integer_loss(logits, MORE).mean()


# ------------------------------------------------------- what else reads logits
@program(X, W, cross_entropy=1)
def with_accuracy(x, w):
    logits = x @ w
    right = (logits.argmax(-1) == LABELS).mean()
    return integer_loss(logits, LABELS).mean() + 0 * lax.stop_gradient(right)


@program(X, W)
def perplexity(x, w):
    return jnp.exp(integer_loss(x @ w, LABELS).mean())


# ----------------------------------------------------------- losses of libraries
@program(X, TABLE)
def flax_lm1b(x, table):
    """Weighted, smoothed, less the entropy of the smoothed target."""
    logits, confidence = x @ table.T, 0.9
    low = (1.0 - confidence) / (V - 1)
    constant = -(confidence * np.log(confidence) + (V - 1) * low * np.log(low + 1e-20))
    soft = jax.nn.one_hot(LABELS, V) * (confidence - low) + low
    loss = -jnp.sum(soft * log_softmax(logits), axis=-1) - constant
    return (loss * KEEP).sum() / KEEP.sum()


@program(X, TABLE)
def hugging_face_summarization(x, table):
    """With a mask of padding; targets by `optax`."""
    low = 0.1 / (V - 1)
    soft = hot(LABELS) * (0.9 - low) + low
    loss = optax.softmax_cross_entropy(x @ table.T, soft) + 0.325
    return (loss * KEEP).sum() / KEEP.sum()


@program(X, W)
def hugging_face_causal(x, w):
    logits = (x @ w)[..., :-1, :]
    loss = optax.softmax_cross_entropy(logits, hot(LABELS[..., 1:]))
    return loss.mean()


@program(X, TABLE)
def hugging_face_masked_lm(x, table):
    """Labels of -100 are ignored."""
    logits = x @ table.T
    mask = jnp.where(IGNORED > -1, 1.0, 0.0)
    loss = optax.softmax_cross_entropy(logits, hot(IGNORED)) * mask
    return loss.sum() / mask.sum()


@program(X, W)
def maxtext(x, w):
    """One-hot targets, a z-loss, segments that count, a small number below."""
    logits, targets = (x @ w).astype(jnp.float32), hot(LABELS)
    total = jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)
    loss = -jnp.sum(targets * (logits - total), axis=-1)
    loss = loss + 1e-3 * lax.square(jnp.squeeze(total, axis=-1))
    loss = loss * (KEEP != 0)
    return jnp.sum(loss) / (jnp.sum(KEEP != 0) + 1e-8)


@program(X, TABLE)
def gemma(x, table):
    """A soft cap, and one-hot rows that are zero in padding."""
    logits = jnp.dot(x, table.T)
    logits = jnp.tanh(logits / 5.0) * 5.0
    target = hot(LABELS) * KEEP[..., None]
    return -jnp.sum(log_softmax(logits) * target) * (1 / (KEEP.sum() + 1e-8))


@program(X, W, BIAS)
def keras_sparse(x, w, bias):
    """`SparseCategoricalCrossentropy(from_logits=True)`."""
    logs = log_softmax(x @ w + bias)
    return -jnp.sum(hot(jnp.squeeze(LABELS[..., None], -1)) * logs, axis=-1).mean()


@program(X, W, BIAS)
def keras_smoothed(x, w, bias):
    target = hot(LABELS) * (1.0 - 0.1) + 0.1 / V
    return -jnp.sum(target * log_softmax(x @ w + bias), axis=-1).mean()


@program(X, TABLE, BIAS)
def bert_positions(x, table, bias):
    """Only rows at masked positions are predicted."""
    place = jnp.asarray([[0, 2, 4], [1, 2, 3]])
    rows = jnp.take_along_axis(x, place[..., None], axis=1)
    labels = jnp.take_along_axis(jnp.asarray(LABELS), place, axis=1)
    logs = log_softmax(rows @ table.T + bias)
    picked = jnp.take_along_axis(logs, labels[..., None], -1)[..., 0]
    weights = jnp.asarray([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    return -(weights * picked).sum() / (weights.sum() + 1e-5)


@program(X, W)
def equinox(x, w):
    """A loss of one token under two `vmap`s."""

    def one(row, label):
        logits = w.T @ row
        return jax.nn.logsumexp(logits) - logits[label]

    return jax.vmap(jax.vmap(one))(x, jnp.asarray(LABELS)).mean()


@program(X, W)
def haiku(x, w):
    logs = log_softmax(jnp.einsum("btk,kv->btv", x, w))
    return -jnp.einsum("btv,btv->", hot(LABELS), logs) / (B * T)


@program(X, W)
def t5x(x, w):
    """Own log-softmax by the maximum, z-loss, weights, a fixed normaliser."""
    logits = x @ w
    top = lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    shifted = logits - top
    total = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1, keepdims=True))
    loss = -jnp.sum(hot(LABELS) * (shifted - total), axis=-1)
    z = jnp.squeeze(total + top, axis=-1)
    return ((loss + 1e-4 * jnp.square(z)) * KEEP).sum() / 100.0


@program(X, W)
def flat_and_indexed(x, w):
    logits = (x @ w).reshape(-1, V)
    logs = jax.nn.log_softmax(logits, axis=1)
    return -jnp.mean(logs[jnp.arange(B * T), jnp.asarray(LABELS).ravel()])


@program(X, W)
def rolled_one_hot(x, w):
    """The next token of each row, around its end."""
    labels = jnp.roll(jnp.sin(x[..., 0] * 9) > 0, -1, 1).astype(jnp.int32)
    return -(hot(labels) * log_softmax(x @ w)).sum(-1).mean()


@program(X, W)
def flattened_log_probabilities(x, w):
    logs = jax.nn.log_softmax(x @ w).reshape(-1, V)
    return -logs[jnp.arange(B * T), jnp.asarray(LABELS).ravel()].mean()


@program(X, W)
def checkpointed_blocks(x, w):
    """A loss that is computed block by block already stays one in a loop."""

    @jax.checkpoint
    def step(total, part):
        return total + integer_loss(part[0] @ w, part[1]).sum(), None

    parts = x.swapaxes(0, 1), jnp.asarray(LABELS).swapaxes(0, 1)
    return lax.scan(step, jnp.zeros((), x.dtype), parts)[0] / (B * T)


@program(X, W)
def log_of_softmax_of_classes_last(x, w):
    logits = jnp.einsum("btk,kv->bvt", x, w)
    logs = jax.nn.log_softmax(logits, axis=1)
    return -jnp.take_along_axis(logs, LABELS[:, None], axis=1).mean()


# -------------------------------------------------------------------- look-alikes
TEACHER = RNG.normal(size=(B, T, V)).astype(np.float32)


@other(X, W)
def distillation(x, w):
    chances = jax.nn.softmax(TEACHER)
    return -(chances * log_softmax(x @ w)).sum(-1).mean()


@other(X, W)
def divergence(x, w):
    teacher = log_softmax(TEACHER)
    return (jnp.exp(teacher) * (teacher - log_softmax(x @ w))).sum(-1).mean()


@other(X, W)
def soft_targets(x, w):
    return optax.softmax_cross_entropy(x @ w, jax.nn.softmax(TEACHER)).mean()


@other(X, W)
def entropy(x, w):
    logs = log_softmax(x @ w)
    return -(jnp.exp(logs) * logs).sum(-1).mean()


@other(X, W)
def binary(x, w):
    return optax.sigmoid_binary_cross_entropy(x @ w, hot(LABELS)).mean()


@other(IMAGES, TEXTS)
def pairs_by_sigmoid(a, b):
    logits = a @ b.T
    return -jax.nn.log_sigmoid((2 * jnp.eye(V) - 1) * logits).sum(-1).mean()


@other(IMAGES, TEXTS)
def pairs_off_the_diagonal(a, b):
    logits = a @ b.T
    others = jax.nn.logsumexp(jnp.where(jnp.eye(V) > 0, -jnp.inf, logits), axis=-1)
    return (others - jnp.diagonal(logits)).mean()


@other(IMAGES, TEXTS)
def pairs_of_another_product(a, b):
    """The picked numbers are not those of the log-sum-exp."""
    return (jax.nn.logsumexp(a @ b.T, -1) - jnp.diagonal(b @ b.T)).mean()


@other(IMAGES, TEXTS)
def pairs_reversed(a, b):
    logits = a @ b.T
    return (jax.nn.logsumexp(logits, -1) - jnp.diagonal(logits[:, ::-1])).mean()


@other(X, W)
def poly_loss(x, w):
    return optax.losses.poly_loss_cross_entropy(x @ w, hot(LABELS), epsilon=2.0).mean()


@other(X, W)
def focal(x, w):
    logs = log_softmax(x @ w)
    picked = jnp.take_along_axis(logs, LABELS[..., None], -1)[..., 0]
    return -((1 - jnp.exp(picked)) ** 2 * picked).mean()


@other(X, W)
def another_axis(x, w):
    logs = jax.nn.log_softmax(x @ w, axis=1)
    return -jnp.take_along_axis(logs, LABELS[..., None], -1).mean()


@other(X, W)
def three_labels(x, w):
    """Mixed labels of the same logits: the product would be computed twice."""
    logits, labels = x @ w, (LABELS, MORE[0], MORE[1])
    return sum(integer_loss(logits, one).mean() for one in labels)


@other(X, W)
def rows_hide_classes(x, w):
    logits = jnp.where(TEACHER > 1.5, -1e30, x @ w)
    return integer_loss(logits, LABELS).mean()


@other(X, W)
def noise_on_logits(x, w):
    return integer_loss(x @ w + TEACHER, LABELS).mean()


@other(X, W)
def margin(x, w):
    """The label's logit is lowered before the softmax."""
    return integer_loss(x @ w - 0.3 * hot(LABELS), LABELS).mean()


@other(X, W)
def weights_of_classes(x, w):
    share = jnp.arange(1.0, V + 1)
    return -(share * hot(LABELS) * log_softmax(x @ w)).sum(-1).mean()


@other(X, W)
def other_label_for_the_total(x, w):
    logits = x @ w
    picked = jnp.take_along_axis(logits, LABELS[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits[:, ::-1], -1) - picked).mean()


# --------------------------------------------------------------------------- tests
def floats(args: Any) -> tuple[int, ...]:
    return tuple(i for i, a in enumerate(args) if a.dtype == np.float32)


def exact(fn: Any, args: Any) -> Any:
    """Value and gradients in float64."""
    with jax.enable_x64(True):
        wide = [a.astype(np.float64) for a in args]
        found = jax.jit(jax.value_and_grad(fn, floats(args)))(*wide)
        return [np.asarray(a) for a in jax.tree.leaves(found)]


def check(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), want, strict=True):
        size = max(1.0, float(np.abs(b).max()))
        assert np.abs(np.asarray(a, np.float64) - b).max() <= 2e-5 * size


def counted(report: Any, **how: Any) -> dict[str, int]:
    return {n: c for n, c in report.counts(**how).items() if c and "cross" in n}


USUAL = {
    "optax_pairs", "pairs_with_temperature", "one_side_of_pairs", "pairs_of_one_array",
    "pairs_by_an_identity", "labels_and_temperature", "vmapped_heads", "haiku",
    "distillation", "pairs_off_the_diagonal", "pairs_of_another_product",
    "pairs_reversed", "margin", "three_labels",
}  # fmt: skip
"""Programs that run by default; the others run once."""


def each(names: Any) -> list[Any]:
    once = pytest.mark.once
    return [n if n in USUAL else pytest.param(n, marks=once) for n in names]


@pytest.mark.parametrize("name", each(PROGRAMS))
def test_losses_of_libraries(name: str) -> None:
    fn, args, wanted, backward = PROGRAMS[name]
    fast = rewriter.optimize(fn, implementation=FORCED)
    sites = counted(fast.report(*args))
    if name == "checkpointed_blocks":
        assert set(sites) == {LINEAR}
    else:
        assert sites == wanted
    want = exact(fn, args)
    taken = jax.value_and_grad(fast, floats(args))
    check(jax.jit(taken)(*args), want)
    both = rewriter.optimize(
        jax.value_and_grad(fn, floats(args)), implementation=FORCED
    )
    check(both(*args), want)
    assert bool(counted(both.report(*args), backward=True)) == backward


@pytest.mark.parametrize("name", each(OTHERS))
def test_look_alikes(name: str) -> None:
    fn, args = OTHERS[name]
    forced = rewriter.optimize(fn, implementation=FORCED)
    found = counted(forced.report(*args))
    assert name in WITH_MORE or found == ({GIVEN: 1} if name in OF_ARRAYS else {})
    check(jax.jit(jax.value_and_grad(forced, floats(args)))(*args), exact(fn, args))


WITH_MORE = ("poly_loss", "focal", "three_labels")
"""They hold a loss, and read its logits once more."""

OF_ARRAYS = ("rows_hide_classes", "noise_on_logits", "margin")
"""They are losses of an array that they compute, and of no product with a matrix."""


@pytest.mark.parametrize("name", ["focal", "three_labels"])
def test_what_reads_logits_twice_is_kept(name: str) -> None:
    """Else the product would be computed twice, and its logits held all the same."""
    fn, (x, _) = OTHERS[name]
    report = rewriter.explain(jax.value_and_grad(fn, (0, 1)))(
        jax.ShapeDtypeStruct(x.shape, "float32"),
        jax.ShapeDtypeStruct((K, 1 << 21), "float32"),
    )
    kept = [s for s in report.sites if "cross" in s.op]
    assert [s.kernel for s in kept] == ["xla"]
    assert "computed twice" in str(report)


@pytest.mark.once
@pytest.mark.parametrize("name", ["pairs_with_temperature", "labels_and_temperature"])
def test_transforms(name: str) -> None:
    """Forward and second derivatives, batches, checkpoints and loops."""
    fn, args, *_ = PROGRAMS[name]
    fast = rewriter.optimize(fn, implementation=FORCED)
    ones = tuple(jnp.ones_like(a) for a in args)
    several = jnp.stack([args[0], 2 * args[0]])
    of = {
        "jvp": lambda f: jax.jvp(f, args, ones),
        "second": lambda f: jax.jvp(jax.grad(f, (0, 1)), args, ones),
        "vmap": lambda f: jax.vmap(lambda a: jax.grad(f)(a, *args[1:]))(several),
        "remat": lambda f: jax.grad(jax.checkpoint(f))(*args),
        "scan": lambda f: lax.map(lambda a: f(a, *args[1:]), several),
    }
    for how in of.values():
        got, want = jax.jit(lambda how=how: (how(fast), how(fn)))()
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5),
            got,
            want,
        )


def test_a_temperature_is_no_factor_of_narrow_rows() -> None:
    fn, args, *_ = PROGRAMS["labels_and_temperature"]
    for dtype, sites in (("float16", 0), ("bfloat16", 1)):
        x, w, tau = (jax.ShapeDtypeStruct(a.shape, dtype) for a in args)
        tau = jax.ShapeDtypeStruct((), "float32")
        report = rewriter.explain(fn, implementation=FORCED)(x, w, tau)
        assert report.counts()[LINEAR] == sites
        assert report.counts()[GIVEN] == 1 - sites


def test_soft_targets_are_refused_with_the_reason() -> None:
    for name in ("distillation", "soft_targets"):
        fn, args = OTHERS[name]
        assert "no labels that pick one logit" in str(rewriter.explain(fn)(*args))
