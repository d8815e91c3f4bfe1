"""Scores as low as the finite fill of a mask: the program weighs the hidden keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter

B, T, N, H = 2, 24, 4, 8
RANDOM = np.random.default_rng(0)
Q, K, V, UP = (
    (RANDOM.normal(size=(B, T, N, H)) * 2).round().astype(np.float32) / 2
    for _ in range(4)
)
"""Halves, so that products are exact."""
LOW = float(jnp.finfo(jnp.float32).min)
FORCED = dict.fromkeys(("attention", "scored_attention"), "memory_bounded")
I, J = np.arange(T)[:, None], np.arange(T)  # noqa: E741
RUNS = np.repeat([0, 1, 2], T // 3)[None] + np.zeros((B, 1), int)
TABLE = (RANDOM.random((B, 1, T, T)) < 0.7) | np.eye(T, dtype=bool)

MASKS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "causal": (lambda x: jnp.tril(jnp.ones((T, T), bool)), 0.0),
    "window": (lambda x: (J <= I) & (I - J < 7), 0.0),
    "lengths": (lambda x: (x[:, None] > J)[:, None, None], np.array([20, 5])),
    "segments": (lambda x: (x[:, :, None] == x[:, None])[:, None], RUNS),
    "a table": (lambda x: x, TABLE),
}
FILLS: dict[str, Callable[[Any, Any, float], Any]] = {
    "chosen": lambda s, m, fill: jnp.where(m, s, fill),
    "added": lambda s, m, fill: s + jnp.where(m, 0.0, fill),
    "a product": lambda s, m, fill: s * m + (1 - m) * fill,
}


def some_low(q: Any, k: Any) -> tuple[Any, Any]:
    """One row of one head, far below all fills but -1e9."""
    q, k = q.copy(), np.abs(k)
    q[0, 5, 1] = -(2.0**16)
    return q, k


def infinite(q: Any, k: Any) -> tuple[Any, Any]:
    q, k = q.copy(), k.copy()
    q[0, 5, 1, 0], k[..., 0] = -np.inf, np.abs(k[..., 0]) + 0.1
    return q, k


NUMBERS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "small": lambda q, k: (q, k),
    "large": lambda q, k: (300 * q, 30 * k),
    "low in a row": some_low,
    "-inf in a row": infinite,
}


def attention(mask: Any, fill: Any, number: float, weigh: Any = None) -> Any:
    def attend(q: Any, k: Any, v: Any, x: Any) -> Any:
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 4
        m = mask(x)
        weights = (weigh or (lambda s, m: jax.nn.softmax(s)))(
            fill(scores, m, number), m
        )
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    return attend


def total(f: Any) -> Any:
    return lambda *given: (f(*given) * UP).sum()


def check(f: Any, x: Any, *numbers: str, **how: Any) -> Any:
    """Compares values and both kinds of gradients; returns the site, if any."""
    fast = rewriter.optimize(f, implementation=FORCED, **how)
    grad = lambda f: jax.grad(total(f), (0, 1, 2))
    inside = rewriter.optimize(grad(f), implementation=FORCED, **how)
    theirs, ours = (
        jax.jit(lambda *given: (f(*given), *grad(f)(*given))),
        [
            jax.jit(lambda *given: (fast(*given), *grad(fast)(*given))),
            lambda *given: (fast(*given), *inside(*given)),
        ],
    )
    for name in numbers:
        given = *NUMBERS[name](Q, K), V, x
        want = theirs(*given)
        for a, b in (
            (a, b) for g in ours for a, b in zip(g(*given), want, strict=True)
        ):
            scale = max(1.0, float(np.nan_to_num(abs(b)).max()))
            np.testing.assert_allclose(a / scale, b / scale, rtol=2e-3, atol=5e-3)
    sites = fast.report().sites
    return sites[0] if sites else None


@pytest.mark.parametrize("fill", ["chosen", "added"])
def test_hidden_keys_are_weighed(fill: str) -> None:
    mask, x = MASKS["causal"]
    site = check(attention(mask, FILLS[fill], -1e4), x, "low in a row")
    assert site.params["window"] == (None, 0)
    assert site.params["fill"] == -1e4


@pytest.mark.once
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("number", [-1e3, -1e4, -3e4, -1e9, LOW])
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("mask", MASKS)
def test_values_and_gradients_are_as_written(
    mask: str, fill: str, number: float
) -> None:
    make, x = MASKS[mask]
    f = attention(make, FILLS[fill], number)
    for numbers in NUMBERS:
        if (fill, numbers) != (
            "a product",
            "-inf in a row",
        ):  # 0 * inf: see numerics.md
            check(f, x, numbers)


@pytest.mark.once
@pytest.mark.parametrize("number", [-1e3, -1e4, -1e9])
@pytest.mark.parametrize("fill", ["chosen", "added"])
def test_operands_of_16_bits(fill: str, number: float) -> None:
    """Scores are float32, so that their rounding hides nothing."""

    def f(q: Any, k: Any, v: Any) -> Any:
        s = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
        m = jnp.tril(jnp.ones((T, T), bool))
        w = jax.nn.softmax(FILLS[fill](s / 4, m, number))
        return jnp.einsum("bnts,bsnh->btnh", w.astype(v.dtype), v)

    fast = rewriter.optimize(f, implementation=FORCED)
    for numbers in ("small", "low in a row"):
        q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (*NUMBERS[numbers](Q, K), V))
        want = jax.jit(f)(q, k, v).astype(jnp.float32)
        got = fast(q, k, v).astype(jnp.float32)
        np.testing.assert_allclose(got, want, rtol=0, atol=4e-2)
    assert fast.report().sites[0].params["fill"] == number


IN_LAYERS: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda f: (
        lambda q, k, v, x: jax.vmap(lambda q, k, v: f(q[None], k[None], v[None], x)[0])(
            q, k, v
        )
    ),
    "scan": lambda f: (
        lambda q, k, v, x: jax.lax.scan(
            lambda c, _: (f(c, k, v, x), None), q, None, length=1
        )[0]
    ),
    "checkpoint": jax.checkpoint,
}


@pytest.mark.once
@pytest.mark.parametrize("where", IN_LAYERS)
@pytest.mark.parametrize("fill", ["chosen", "added"])
def test_in_layers(fill: str, where: str) -> None:
    mask, x = MASKS["causal"]
    f = IN_LAYERS[where](attention(mask, FILLS[fill], -1e4))
    assert check(f, x, "large", "low in a row").params["fill"] == -1e4


@pytest.mark.once
def test_second_derivatives() -> None:
    mask, x = MASKS["causal"]
    f = attention(mask, FILLS["chosen"], -1e3)
    fast = rewriter.optimize(f, implementation=FORCED)
    given = *some_low(Q, K), V, x
    twice = lambda f: jax.grad(lambda v: (jax.grad(total(f))(*given[:2], v, x)).sum())
    want = twice(f)(V)
    np.testing.assert_allclose(twice(fast)(V), want, rtol=1e-3, atol=1e-3)


ALIKE: dict[str, Any] = {
    "two near fills": attention(
        MASKS["causal"][0],
        lambda s, m, fill: jnp.where(m, s, fill) + jnp.where(J < I + 3, 0.0, -2e4),
        -1e4,
    ),
    "weights chosen again": attention(
        MASKS["causal"][0],
        FILLS["chosen"],
        -1e4,
        lambda s, m: jnp.where(m, jax.nn.softmax(s), 0.0),
    ),
    "weights times the mask": attention(
        MASKS["causal"][0], FILLS["added"], -1e4, lambda s, m: jax.nn.softmax(s) * m
    ),
    "a bias behind the choice": attention(
        MASKS["causal"][0],
        lambda s, m, fill: jnp.where(m, s, fill) - 2.0 * (I - J),
        -1e4,
    ),
    "-inf for others": attention(
        MASKS["causal"][0],
        lambda s, m, fill: jnp.where(J < I - 9, -jnp.inf, jnp.where(m, s, fill)),
        -1e4,
    ),
}


@pytest.mark.once
@pytest.mark.parametrize("name", ALIKE)
def test_near_fills_that_are_no_single_number_hide_nothing(name: str) -> None:
    """They are left as written, or stay a part of the scores."""
    site = check(ALIKE[name], 0.0, "small", "low in a row")
    assert site is None or not site.replaced or "fill" not in site.params


@pytest.mark.once
def test_the_user_may_say_that_scores_are_above() -> None:
    mask, x = MASKS["causal"]
    f = attention(mask, FILLS["added"], -1e4)
    assert "fill" not in check(f, x, "small", assume=("finite",)).params
    assert check(ALIKE["weights chosen again"], x, "small", assume=("finite",)).replaced


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("number", [-1e4, -1e9, -1e30])
def test_a_few_numbers_of_a_bias_as_low_as_the_fill(fill: str, number: float) -> None:
    """Each row sees usual scores too: its gradients are divided by their own sum."""
    bias = RANDOM.normal(size=(B, N, T, T)).astype("f4")
    low = (RANDOM.random(bias.shape) < 0.2) & (I != J)
    bias[low] = number / 2

    def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 4 + bias
        scores = FILLS[fill](scores, I >= J, number)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)

    fast = rewriter.optimize(attend, implementation=FORCED)
    given = Q, K, V, bias
    for way in (lambda f: f, lambda f: jax.grad(total(f), (0, 1, 2, 3))):
        wanted = jax.tree.leaves(jax.jit(way(attend))(*given))
        for a, b in zip(jax.tree.leaves(way(fast)(*given)), wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
