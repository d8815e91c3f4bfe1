"""Maxima of hidden keys that a guard replaces by 0, in sums over parts of the keys.

A larger maximum may be that 0. Where all scores of a row are far below it, the program
gives 0 / 0, and a kernel, which subtracts the row's own maximum, a number.
"""

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

T, H, PART = 16, 4, 4
DRAW = np.random.default_rng(0)
Q, K, V = (DRAW.normal(size=(T, H)).astype("f4") for _ in range(3))
LOW = np.concatenate([Q, np.full((T, 1), -300.0, "f4")], 1)
ONES = np.concatenate([K, np.ones((T, 1), "f4")], 1)
SEEN = np.arange(T)[:, None] >= np.arange(T)
FORCED = {"attention": ["memory_bounded"]}
Guard = Callable[[Any], Any]

FLOORS: dict[str, Guard] = {
    "is finite": lambda m: jnp.where(jnp.isfinite(m), m, 0.0),
    "is -inf": lambda m: jnp.where(m == -jnp.inf, 0.0, m),
    "isneginf": lambda m: jnp.where(jnp.isneginf(m), 0.0, m),
    "above -inf": lambda m: jnp.where(m > -jnp.inf, m, 0.0),
    "not equal": lambda m: jnp.where(m != -jnp.inf, m, 0.0),
    "another number": lambda m: jnp.where(jnp.isfinite(m), m, -1.0),
    "isinf": lambda m: jnp.where(jnp.isinf(m), 0.0, m),
    "select": lambda m: lax.select(jnp.isfinite(m), m, jnp.zeros_like(m)),
    "inverse": lambda m: jnp.where(~jnp.isfinite(m), 0.0, m),
    "maximum": lambda m: jnp.maximum(m, 0.0),
}
HARMLESS: dict[str, Guard] = {
    "far below": lambda m: jnp.where(jnp.isfinite(m), m, -1e30),
    "nan_to_num": jnp.nan_to_num,
}


def part(
    q: Any, k: Any, v: Any, seen: Any, guard: Guard, stopped: bool = True
) -> tuple[Any, Any, Any]:
    s = jnp.where(seen, q @ k.T, -jnp.inf)
    top = guard(s.max(1, keepdims=True))
    top = lax.stop_gradient(top) if stopped else top
    weights = jnp.exp(s - top)
    return weights @ v, weights.sum(1, keepdims=True), top


def unrolled(guard: Guard) -> Callable[..., Any]:
    """Parts of the keys, merged by the largest of their maxima."""

    def f(q: Any, k: Any, v: Any) -> Any:
        at = [slice(i, i + PART) for i in range(0, T, PART)]
        parts = [part(q, k[i], v[i], SEEN[:, i], guard) for i in at]
        top = parts[0][2]
        for _, _, m in parts[1:]:
            top = jnp.maximum(top, m)
        shares = [jnp.exp(m - top) for _, _, m in parts]
        out = sum(o * x for (o, _, _), x in zip(parts, shares, strict=True))
        return out / sum(n * x for (_, n, _), x in zip(parts, shares, strict=True))

    return f


def carried(guard: Guard) -> Callable[..., Any]:
    """A loop over parts from the last to the first, that keeps the replaced maximum."""

    def f(q: Any, k: Any, v: Any) -> Any:
        split = lambda x: x.reshape(-1, PART, x.shape[-1])[::-1]
        masks = jnp.asarray(SEEN).reshape(T, -1, PART).swapaxes(0, 1)[::-1]

        def step(carry: Any, given: Any) -> Any:
            (out, total, top), (kb, vb, seen) = carry, given
            s = jnp.where(seen, q @ kb.T, -jnp.inf)
            new = guard(jnp.maximum(top, s.max(1, keepdims=True)))
            weights, share = jnp.exp(s - new), jnp.exp(top - new)
            total = total * share + weights.sum(1, keepdims=True)
            return (out * share + weights @ vb, total, new), None

        first = jnp.zeros((T, H)), jnp.zeros((T, 1)), jnp.full((T, 1), -jnp.inf)
        (out, total, _), _ = lax.scan(step, first, (split(k), split(v), masks))
        return out / total

    return f


FORMS = {"unrolled": unrolled, "carried": carried}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FLOORS)
def test_a_floor_is_kept(form: str, name: str) -> None:
    """Rows whose exponentials vanish are NaN, as written."""
    f = FORMS[form](FLOORS[name])
    want = jax.jit(f)(LOW, ONES, V)
    assert np.isnan(want).any()
    got = rewriter.optimize(f, implementation=FORCED)(LOW, ONES, V)
    np.testing.assert_allclose(got, want, 1e-5, 1e-5)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_far_below_is_found(name: str) -> None:
    f = unrolled(HARMLESS[name])
    fast = rewriter.optimize(f, implementation=FORCED)
    for q, k in ((Q, K), (LOW, ONES)):
        want = jax.jit(f)(q, k, V)
        np.testing.assert_allclose(fast(q, k, V), want, 1e-4, 1e-4)
    assert [s.op for s in fast.report(Q, K, V).sites if s.replaced]


def test_floors_that_are_said_not_to_act() -> None:
    f = unrolled(FLOORS["is finite"])
    report = rewriter.explain(f, assume=("finite",))(Q, K, V)
    assert [s.op for s in report.sites] == ["attention"]


def test_a_maximum_of_a_stack_is_no_failure() -> None:
    """Its gradient divides by a choice among constants."""
    guard = FLOORS["is finite"]

    def f(q: Any, k: Any, v: Any) -> Any:
        cuts = (slice(None, 8), slice(8, None))
        (o, n, a), (p, m, b) = (
            part(q, k[i], v[i], SEEN[:, i], guard, False) for i in cuts
        )
        top = jnp.stack([a, b]).max(0)
        a, b = jnp.exp2((a - top) * 1.442695), jnp.exp2((b - top) * 1.442695)
        return (o * a + p * b) / (n * a + m * b)

    gradients = jax.grad(lambda *x: jnp.sin(f(*x)).sum(), (0, 1, 2))
    fast = rewriter.optimize(gradients, implementation=FORCED)
    assert not fast.report(Q, K, V).failures
    for x, y in zip(fast(Q, K, V), gradients(Q, K, V), strict=True):
        np.testing.assert_allclose(x, y, 1e-4, 1e-5)
