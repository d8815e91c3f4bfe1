"""Losses of rows with two labels: one product, and gradients where it is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rewriter
from tests.patterns.cross_entropy.pieces import (
    BIAS,
    FORCED,
    KEEP,
    LABELS,
    V,
    W,
    X,
    integer_loss,
)

OTHER = np.roll(LABELS, 1, 1)
OTHER[0, :2] = LABELS[0, :2]
SHARE = np.float32(0.3)
LINEAR = "linear_cross_entropy"
Program = Callable[..., jax.Array]
PROGRAMS: dict[str, Program] = {}
LOOK_ALIKES: dict[str, Program] = {}


def program(fn: Program) -> Program:
    """A loss of one product, with its gradients."""
    PROGRAMS[fn.__name__] = fn
    return fn


def look_alike(fn: Program) -> Program:
    """A loss that is not one of two labels."""
    LOOK_ALIKES[fn.__name__] = fn
    return fn


def both(y: Any) -> tuple[Any, Any]:
    return integer_loss(y, LABELS), integer_loss(y, OTHER)


def hot(labels: Any) -> Any:
    return jax.nn.one_hot(labels, V)


@program
def weighted_means(x, w, q):
    """As every example of mixup has it."""
    first, second = both(x @ w)
    return q * first.mean() + (1 - q) * second.mean()


@program
def weighted_sums_swapped(x, w, q):
    first, second = both(x @ w)
    return (1 - q) * first.sum() + q * second.sum()


@program
def numbers(x, w, q):
    first, second = both(x @ w)
    return 0.3 * first.mean() + 0.7 * second.mean()


@program
def one_beside_the_other(x, w, q):
    first, second = both(x @ w)
    return first.mean() + 0.5 * second.mean()


@program
def difference(x, w, q):
    first, second = both(x @ w)
    return (first - 0.5 * second).mean()


@program
def rows(x, w, q):
    first, second = both(x @ w)
    return (q * first + (1 - q) * second).mean()


@program
def interpolated(x, w, q):
    first, second = both(x @ w)
    return (second + q * (first - second)).mean()


@program
def shares_of_rows(x, w, q):
    """Each row has its own share, as cutmix of images may have."""
    first, second = both(x @ w)
    q = q * jnp.asarray(KEEP)
    return (q * first + (1 - q) * second).mean()


@program
def mixed_one_hot_rows(x, w, q):
    target = q * hot(LABELS) + (1 - q) * hot(OTHER)
    return optax.softmax_cross_entropy(x @ w, target).mean()


@program
def mixed_rows_with_shares(x, w, q):
    q = (q * jnp.asarray(KEEP))[..., None]
    logs = jax.nn.log_softmax(x @ w)
    return -((q * hot(LABELS) + (1 - q) * hot(OTHER)) * logs).sum(-1).mean()


@program
def smoothed(x, w, q):
    target = optax.smooth_labels(q * hot(LABELS) + (1 - q) * hot(OTHER), 0.1)
    return optax.softmax_cross_entropy(x @ w, target).mean()


@program
def log_probabilities(x, w, q):
    logs = jax.nn.log_softmax((x @ w).reshape(-1, V))
    place = jnp.arange(LABELS.size)
    first, second = (logs[place, jnp.asarray(a).ravel()] for a in (LABELS, OTHER))
    return -(q * first + (1 - q) * second).mean()


@program
def kept_rows(x, w, q):
    first, second = both(x @ w)
    return ((q * first + (1 - q) * second) * KEEP).sum() / KEEP.sum()


@program
def chosen_rows(x, w, q):
    first, second = both(x @ w)
    each = jnp.where(KEEP > 0, q * first + (1 - q) * second, 0)
    return each.sum() / KEEP.sum()


@program
def with_a_z_loss(x, w, q):
    y = x @ w
    first, second = both(y)
    return (q * first + (1 - q) * second + 1e-2 * jax.nn.logsumexp(y, -1) ** 2).mean()


@program
def bias_and_temperature(x, w, q):
    first, second = both((x @ w + BIAS) * jnp.exp(q))
    return (0.3 * first + 0.7 * second).mean()


@program
def soft_cap(x, w, q):
    first, second = both(5 * jnp.tanh(x @ w / 5))
    return (0.3 * first + 0.7 * second).mean()


@program
def labels_behind(x, w, q):
    """The second label is that of the other rows."""
    y, labels = x @ w, jnp.asarray(LABELS)
    first, second = integer_loss(y, labels), integer_loss(y, labels[::-1])
    return q * first.mean() + (1 - q) * second.mean()


@look_alike
def shares_of_no_sum(x, w, q):
    first, second = both(x @ w)
    return (q * first + jnp.sin(q) * second).mean()


@look_alike
def other_logits(x, w, q):
    first, second = integer_loss(x @ w, LABELS), integer_loss(jnp.sin(x) @ w, OTHER)
    return q * first.mean() + (1 - q) * second.mean()


@look_alike
def three(x, w, q):
    y = x @ w
    return sum(integer_loss(y, np.roll(LABELS, k, 1)).mean() for k in range(3))


@look_alike
def more_than_the_target(x, w, q):
    target = q * hot(LABELS) + (1 - q) * hot(OTHER) * q
    return optax.softmax_cross_entropy(x @ w, target).mean()


@look_alike
def either(x, w, q):
    """Where both labels are one class, it counts once."""
    target = jnp.maximum(hot(LABELS), hot(OTHER))
    return -(target * jax.nn.log_softmax(x @ w)).sum(-1).mean()


def taken(fn: Program) -> Any:
    return jax.value_and_grad(fn, (0, 1))


def sites(fn: Program) -> list[Any]:
    report = rewriter.explain(taken(fn), implementation=FORCED)(X, W, SHARE)
    return [s for s in report.sites if "cross" in s.op]


USUAL = ("weighted_means", "rows", "mixed_one_hot_rows")
"""Programs that run by default; the others run once."""


def each() -> list[Any]:
    once = pytest.mark.once
    return [n if n in USUAL else pytest.param(n, marks=once) for n in PROGRAMS]


@pytest.mark.parametrize("name", each())
def test_one_site_with_its_gradients(name: str) -> None:
    (site,) = sites(PROGRAMS[name])
    assert site.op == LINEAR
    assert site.backward
    assert "share" in site.shapes


@pytest.mark.once
@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes(name: str) -> None:
    assert not any("share" in site.shapes for site in sites(LOOK_ALIKES[name]))


@pytest.mark.once
def test_numbers_agree_with_float64() -> None:
    fns = list((PROGRAMS | LOOK_ALIKES).values())
    first = [rewriter.optimize(taken(f), implementation=FORCED) for f in fns]
    later = [taken(rewriter.optimize(f, implementation=FORCED)) for f in fns]
    run = lambda fs: jax.jit(lambda *a: [jax.tree.leaves(f(*a)) for f in fs])
    with jax.enable_x64(True):
        wide = [jnp.asarray(a, "float64") for a in (X, W, SHARE)]
        true = run([taken(f) for f in fns])(*wide)
    for some in (first, later):
        for got, want in zip(run(some)(X, W, SHARE), true, strict=True):
            for g, t in zip(got, want, strict=True):
                np.testing.assert_allclose(g, t, rtol=1e-5, atol=2e-6)


@pytest.mark.once
@pytest.mark.parametrize("name", ["rows", "mixed_one_hot_rows", "smoothed"])
def test_the_gradient_of_the_share(name: str) -> None:
    """By JAX, of the optimized loss: the op gives it to its operand."""
    fn = PROGRAMS[name]
    fast = rewriter.optimize(fn, implementation=FORCED)
    with jax.enable_x64(True):
        wide = [jnp.asarray(a, "float64") for a in (X, W, SHARE)]
        want = jax.grad(fn, 2)(*wide)
    np.testing.assert_allclose(jax.grad(fast, 2)(X, W, SHARE), want, rtol=2e-4)


UNKNOWN = {
    "not a number": np.nan, "infinite": np.inf, "negative": -np.inf, "large": 3e38
}  # fmt: skip
"""Shares that do not add up to 1 with the other label's."""


@pytest.mark.once
@pytest.mark.parametrize("share", UNKNOWN)
def test_a_share_that_is_no_number_reaches_the_same_gradients(share: str) -> None:
    """The log-sum-exp has no share as an ideal sum, and NaN in a program of floats."""
    names = ("rows", "weighted_means", "mixed_one_hot_rows", "smoothed")
    fns = [PROGRAMS[name] for name in names]
    grad = lambda f: jax.value_and_grad(f, (0, 1, 2))
    fast = lambda f: rewriter.optimize(f, implementation=FORCED)
    run = lambda way: jax.jit(lambda *a: [jax.tree.leaves(way(f)(*a)) for f in fns])
    given = X, W, np.float32(UNKNOWN[share])
    want = run(grad)(*given)
    for way in (lambda f: grad(fast(f)), lambda f: fast(grad(f))):
        for name, old, new in zip(names, want, run(way)(*given), strict=True):
            for x, y in zip(old, new, strict=True):
                assert (np.isnan(x) == np.isnan(y)).all(), name


@pytest.mark.once
def test_half_of_the_memory() -> None:
    """No logits, of which the program as written holds two arrays."""
    rows, v = 256, 1 << 16
    x, w = (jax.ShapeDtypeStruct(s, "float32") for s in ((rows, 8), (8, v)))
    a, b = (jax.ShapeDtypeStruct((rows,), "int32") for _ in range(2))

    def loss(x, w, a, b, q):
        y = x @ w
        return q * integer_loss(y, a).mean() + (1 - q) * integer_loss(y, b).mean()

    def memory(fn: Any) -> int:
        made = jax.jit(fn).lower(x, w, a, b, SHARE).compile()
        return made.memory_analysis().temp_size_in_bytes

    step = taken(loss)
    assert memory(step) >= 2 * 4 * rows * v
    assert memory(rewriter.optimize(step)) < 4 * rows * v
