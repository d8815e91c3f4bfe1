"""Programs written after the rules that they test, pair by pair against the original.

Masks are as people write them: of floats, of narrow integers, with sentinels, shifts
and casts. Other programs have thresholds, guards, and fills of each kind.
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

B, T, N, H = 2, 12, 2, 8
FORCED = dict.fromkeys(("attention", "scored_attention"), "memory_bounded")
RANDOM = np.random.default_rng(7)
Q, K, V, UP = (RANDOM.normal(size=(B, T, N, H)).astype(np.float32) for _ in range(4))
PAD = np.array([[0] * T, [1] * 7 + [0] * 5], bool)
SOME = PAD | np.array([[1], [0]], bool)
LOW = float(np.finfo(np.float32).min)
pairs = lambda op, x: op(x[..., :, None], x[..., None, :])
at_least = lambda x: pairs(lambda a, b: a >= b, x)
places = lambda dtype=jnp.int32: jnp.arange(T).astype(dtype)
of_rows = lambda x, dtype: np.asarray([x] * B, dtype)

MASKS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "float times": (at_least, of_rows(np.linspace(0, 1, T) ** 2, np.float32)),
    "their difference": (
        lambda p: pairs(lambda a, b: a - b >= 0, p),
        of_rows(np.linspace(0, 1, T) ** 3, np.float32),
    ),
    "floats that overflow": (at_least, of_rows([3e38, -3e38] * 6, np.float32)),
    "sentinels": (at_least, of_rows([0, 1, np.inf, np.inf, *range(8)], np.float32)),
    "saturating casts": (
        lambda p: at_least(p.astype(jnp.int32)),
        of_rows([1e10, -1e10, 1e20, *range(9)], np.float32),
    ),
    "int8 differences": (
        lambda p: pairs(lambda a, b: a - b >= 0, p),
        RANDOM.integers(-128, 127, (B, T)).astype(np.int8),
    ),
    "uint8 differences": (
        lambda p: pairs(lambda a, b: a - b < 100, p),
        RANDOM.integers(0, 255, (B, T)).astype(np.uint8),
    ),
    "sums that wrap": (
        lambda p: pairs(lambda a, b: a + b >= 0, p),
        RANDOM.integers(0, 2**31 - 1, (B, T)).astype(np.int32),
    ),
    "products that wrap": (
        lambda p: pairs(lambda a, b: a == b, p * jnp.int16(20000)),
        RANDOM.integers(0, 4, (B, T)).astype(np.int16),
    ),
    "nearly three": (
        lambda p: jnp.abs(pairs(lambda a, b: a - b, places(jnp.float32))) <= 2.999999,
        PAD,
    ),
    "tenths": (lambda p: pairs(lambda a, b: a - b, places()) * 0.1 >= 0.30000001, PAD),
    "thirds": (
        lambda p: (jnp.arange(T, dtype=jnp.float32) / 3)[:, None] * 3 >= places(),
        PAD,
    ),
    "quotients": (
        lambda p: lax.div(places(), 3)[:, None] * 3 >= lax.div(places(), 2) * 2,
        PAD,
    ),
    "remainders": (lambda p: lax.rem(pairs(lambda a, b: a - b, places()), 3) <= 0, PAD),
    "floors": (lambda p: pairs(lambda a, b: a - b, places()) // 4 >= 0, PAD),
    "squares that wrap": (
        lambda p: (
            ((places() + 65530).astype(jnp.uint16) ** 2)[:, None]
            >= (places() + 65530).astype(jnp.uint16)
        ),
        PAD,
    ),
    "int8 products": (lambda p: at_least(places(jnp.int8) * jnp.int8(20)), PAD),
    "shifts": (lambda p: at_least(places() >> 1), PAD),
    "unsigned": (lambda p: pairs(lambda a, b: a - b < 5, places(jnp.uint32)), PAD),
    "bfloat16": (lambda p: at_least((places() * 57).astype(jnp.bfloat16)), PAD),
    "sums of bfloat16": (lambda p: at_least(jnp.cumsum(0.3 * p, -1) < 1), PAD * 1.0),
    "a softmax": (
        lambda g: (jax.nn.softmax(g) > 1e-6)[:, None],
        RANDOM.normal(size=(B, T)).astype(np.float32) * 50,
    ),
}


def weighed(s: Any, v: Any) -> Any:
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)


def scores(q: Any, k: Any) -> Any:
    return jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5


def masked(fill: float, mask: Callable[[Any], Any]) -> Callable[..., Any]:
    def f(q: Any, k: Any, v: Any, p: Any) -> Any:
        m = mask(p)
        m = m[:, None] if m.ndim == 3 else m
        return weighed(jnp.where(m, scores(q, k), fill), v)

    return f


def check(f: Callable[..., Any], *given: Any) -> None:
    """Compares results and gradients by floats, of and in the rewritten program."""
    argnums = [i for i, x in enumerate(given) if x.dtype == np.float32]
    fast = rewriter.optimize(f, implementation=FORCED)
    want = np.asarray(jax.jit(f)(*given))
    np.testing.assert_allclose(fast(*given), want, rtol=1e-4, atol=2e-5)
    there = np.isfinite(want)
    total = lambda g: lambda *a: jnp.where(there, g(*a) * UP, 0).sum()
    theirs = jax.jit(jax.grad(total(f), argnums))(*given)
    inside = rewriter.optimize(jax.grad(total(f), argnums), implementation=FORCED)
    for ours in (jax.jit(jax.grad(total(fast), argnums)), inside):
        for a, b in zip(ours(*given), theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-4)


@pytest.mark.once
@pytest.mark.parametrize("fill", [-1e9, -np.inf])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, fill: float) -> None:
    mask, p = MASKS[name]
    check(masked(fill, mask), Q, K, V, p)


FILLS: dict[str, Callable[[Any, Any, float], Any]] = {
    "added": lambda s, m, fill: s + jnp.where(m, 0.0, fill),
    "chosen": lambda s, m, fill: jnp.where(m, s, fill),
    "a product": lambda s, m, fill: s + (1 - m.astype(s.dtype)) * fill,
}


@pytest.mark.once
@pytest.mark.parametrize("fill", [-1e4, -1e9, -1e10, LOW])
@pytest.mark.parametrize("how", FILLS)
def test_rows_without_keys(how: str, fill: float) -> None:
    check(
        lambda q, k, v, m: weighed(FILLS[how](scores(q, k), m[:, None, None], fill), v),
        Q, K, V, PAD,
    )  # fmt: skip


def top_of_weights(q: Any, k: Any, v: Any) -> Any:
    p = jax.nn.softmax(scores(q, k))
    return jnp.einsum("bnts,bsnh->btnh", p * (p >= lax.top_k(p, 3)[0][..., -1:]), v)


def guarded_total(q: Any, k: Any, v: Any, m: Any) -> Any:
    e = jnp.exp(jnp.where(m[:, None, None], scores(q, k), -jnp.inf) - 5)
    t = e.sum(-1, keepdims=True)
    p = jnp.where(t > 0, e / jnp.where(t > 0, t, 1), 0)
    return jnp.einsum("bnts,bsnh->btnh", p, v)


def sloped(q: Any, k: Any, v: Any, slopes: Any) -> Any:
    d = pairs(lambda a, b: a - b, places())
    s = scores(q, k) + slopes[:, None, None] * (d + 20.0)
    return weighed(jnp.where(d > 0, s, -1e9), v)


INFINITE = np.array(Q)
INFINITE[0, 2, 0, 0] = np.inf
BIAS = np.where(RANDOM.random((1, N, T, T)) > 0.3, 0, -np.inf).astype(np.float32)
NAN = np.where(np.arange(T) == 9, np.nan, np.ones((1, N, T, T))).astype(np.float32)
OTHERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "weights below a number": (
        lambda q, k, v: jnp.einsum(
            "bnts,bsnh->btnh",
            (lambda p: jnp.where(p > 0.05, p, 0))(jax.nn.softmax(scores(q, k))),
            v,
        ),
        (Q, K, V),
    ),
    "the largest weights": (top_of_weights, (Q, K, V)),
    "the largest scores": (
        lambda q, k, v: weighed(
            (lambda s: jnp.where(s >= jnp.sort(s)[..., -4:-3], s, -1e9))(scores(q, k)),
            v,
        ),
        (Q, K, V),
    ),
    "finite scores": (
        lambda q, k, v: weighed(
            (lambda s: jnp.where(jnp.isfinite(s), s, -1e9))(scores(q, k)), v
        ),
        (INFINITE, K, V),
    ),
    "numbers for scores": (
        lambda q, k, v: weighed(
            jnp.nan_to_num(scores(q, k), posinf=50.0, neginf=-50.0), v
        ),
        (INFINITE, K, V),
    ),
    "a guarded total": (guarded_total, (Q, K, V, PAD)),
    "a large bias that shrinks": (
        lambda q, k, v, z: weighed(
            scores(q, k) + jax.nn.log_sigmoid(z)[:, None, None], v
        ),
        (Q, K, V, RANDOM.normal(size=(B, T)).astype(np.float32) * 1e3),
    ),
    "infinite biases of heads": (
        lambda q, k, v, m, b: weighed(
            jnp.where(m[:, None, None], scores(q, k) + b, -1e9), v
        ),
        (Q, K, V, PAD, BIAS),
    ),
    "with a fill that is added": (
        lambda q, k, v, m, b: weighed(
            scores(q, k) + b + jnp.where(m[:, None, None], 0.0, -1e9), v
        ),
        (Q, K, V, PAD, BIAS),
    ),
    "infinite slopes": (sloped, (Q, K, V, np.array([-np.inf, 0.5], np.float32))),
    "slopes as low as the fill": (sloped, (Q, K, V, np.float32([-1e8, 0.5]))),
    "NaN of a bias behind a mask": (
        lambda q, k, v, m, b: weighed(
            jnp.where(m[:, None, None], scores(q, k) + b, -1e9), v
        ),
        (Q, K, V, SOME, NAN),
    ),
}


@pytest.mark.once
@pytest.mark.parametrize("name", OTHERS)
def test_other_programs(name: str) -> None:
    f, given = OTHERS[name]
    check(f, *given)
