"""Biases that may hold -inf, beside a mask with a finite fill.

Where both hide all keys of a row, the program weighs those of the mask. A site that
takes the mask apart cannot: it stays in the function of the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter

B, T, N, H = 2, 8, 2, 4
FORCED = dict.fromkeys(("attention", "scored_attention"), "memory_bounded")
LOW = float(jnp.finfo(jnp.float32).min)
RANDOM = np.random.default_rng(0)
Q, K, V = (RANDOM.normal(size=(B, T, N, H)).astype(np.float32) for _ in "qkv")
SEEN = np.tril(np.ones((1, 1, T, T), bool))
HIDES = np.where(SEEN, 0, -np.inf).astype(np.float32)
OF_HEADS = RANDOM.normal(size=(1, N, T, T)).astype(np.float32)
LEFT = np.array([[0] * 3 + [1] * 5, [1] * T], bool)
"""The first sequence is padded on the left: its first rows see no key at all."""

MASKS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "chosen -1e9": lambda s, b, m: jnp.where(m, s + b, -1e9),
    "chosen lowest": lambda s, b, m: jnp.where(m, s + b, LOW),
    "added lowest": lambda s, b, m: s + b + jnp.where(m, 0.0, LOW),
    "added before": lambda s, b, m: s + jnp.where(m, 0.0, LOW) + b,
    "added -1e9": lambda s, b, m: s + b + jnp.where(m, 0.0, -1e9),
}
BIASES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "an argument": (lambda x: x, HIDES),
    "in 16 bits": (lambda x: x.astype(jnp.float32), HIDES.astype(jnp.bfloat16)),
    "of keys": (lambda x: x[:, None, None], np.where(LEFT, -np.inf, 0)[:1]),
    "a part of it": (lambda x: jnp.concatenate([x, x], -1)[..., :T], HIDES),
    "taken by rows": (lambda x: x[:, :, jnp.arange(T)[::-1]], HIDES[:, :, ::-1]),
    "scaled": (lambda x: 0.5 * x + 1, HIDES),
    "of two": (lambda x: x + OF_HEADS, HIDES),
    "a logarithm": (jnp.log, SEEN.astype(np.float32)),
    "in a helper": (jax.jit(lambda x: 2 * jnp.log(x)), SEEN.astype(np.float32)),
    "a quotient": (lambda x: 1 - 1 / x, SEEN.astype(np.float32)),
    "a constant": (lambda x: HIDES + x, np.zeros((1, N, T, T), np.float32)),
    "chosen": (lambda x: jnp.where(x, OF_HEADS, -jnp.inf), SEEN),
}


def attention(mask: Any, bias: Any = lambda x: x) -> Callable[..., Any]:
    def attend(q: Any, k: Any, v: Any, x: Any, kept: Any) -> Any:
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5
        scores = mask(scores, bias(x), kept[:, None, None])
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)

    return attend


def check(f: Callable[..., Any], x: Any, of: int = 3) -> Any:
    """Compares results and gradients with the program's own; returns the site."""
    x = np.asarray(x, np.float32) if np.asarray(x).dtype == np.float64 else x
    given = Q, K, V, x, LEFT
    # Other rows pass numbers back: cotangents of those of padding would be NaN too.
    total = lambda g: lambda *a: jnp.where(jnp.isfinite(o := g(*a)), o, 0).sum()
    fast = rewriter.optimize(f, implementation=FORCED)
    np.testing.assert_allclose(fast(*given), jax.jit(f)(*given), rtol=1e-5, atol=1e-5)
    argnums = tuple(range(of))
    ours = jax.grad(total(fast), argnums)(*given)
    theirs = jax.jit(jax.grad(total(f), argnums))(*given)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    sites = fast.report().sites
    return sites[0] if sites else None


@pytest.mark.parametrize("mask", ["chosen -1e9", "added lowest"])
@pytest.mark.parametrize("bias", ["an argument", "a logarithm"])
def test_masks_stay_in_the_scores(bias: str, mask: str) -> None:
    make, x = BIASES[bias]
    site = check(attention(MASKS[mask], make), x)
    assert site.replaced
    assert site.form == "scored_attention"


@pytest.mark.once
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("bias", BIASES)
def test_numbers_of_each_kind(bias: str, mask: str) -> None:
    make, x = BIASES[bias]
    check(attention(MASKS[mask], make), x)


def test_a_row_of_infinite_scores_beside_rows_that_are_hidden_whole() -> None:
    """Such a row is NaN, and so are gradients of all keys that it weighs."""
    bias = np.where((np.arange(T)[:, None] == 4) & (np.arange(T) == 2), np.inf, HIDES)
    check(attention(MASKS["chosen -1e9"]), bias)


FINITE: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "of heads": (lambda x: x, OF_HEADS),
    "a product": (lambda x: jnp.einsum("tc,sc->ts", x, x)[None, None], OF_HEADS[0, 0]),
    "a maximum": (lambda x: jnp.maximum(x, -1e4), HIDES),
    "of integers": (lambda x: -0.5 * x.astype(jnp.float32), np.arange(T)),
    "a mask of numbers": (lambda x: (1 - x) * -50.0, SEEN.astype(np.float32)),
    "a distance": (
        lambda x: x[:, None, None] * -jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T)),
        np.array([0.5, 0.25], np.float32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("bias", FINITE)
def test_masks_beside_finite_biases_are_read(bias: str) -> None:
    make, x = FINITE[bias]
    causal = lambda s, b, _: jnp.where(SEEN, s + b, -1e9)
    site = check(attention(causal, make), x)
    assert site.params["window"] == (None, 0)


def head(q: Any, k: Any, v: Any, bias: Any) -> Any:
    scores = jnp.where(SEEN[0, 0], q @ k.T + bias, -1e9)
    return jax.nn.softmax(scores) @ v


SLOPED = -jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T))
OF_EACH: dict[str, tuple[Callable[..., Any], Any]] = {
    "vmap": (jax.vmap(head), OF_HEADS[0]),
    "a loop": (lambda *a: jax.lax.map(lambda x: head(*x), a), OF_HEADS[0]),
    "slopes in a loop": (
        lambda *a: jax.lax.map(lambda x: head(*x[:3], x[3] * SLOPED), a),
        OF_HEADS[0, :, 0, 0],
    ),
}


@pytest.mark.parametrize("name", OF_EACH)
def test_biases_of_heads_one_by_one(name: str) -> None:
    f, bias = OF_EACH[name]
    given = *(x[0].swapaxes(0, 1) for x in (Q, K, V)), bias
    fast = rewriter.optimize(f, implementation=FORCED)
    np.testing.assert_allclose(fast(*given), f(*given), rtol=1e-5, atol=1e-5)
    assert fast.report().sites[0].params["window"] == (None, 0)


@pytest.mark.parametrize("way", ["vmap", "a loop"])
def test_biases_that_heads_share_one_by_one(way: str) -> None:
    def f(q: Any, k: Any, v: Any, bias: Any) -> Any:
        if way == "vmap":
            return jax.vmap(head, (0, 0, 0, None))(q, k, v, bias)
        return jax.lax.map(lambda x: head(*x, bias), (q, k, v))

    given = *(x[0].swapaxes(0, 1) for x in (Q, K, V)), HIDES[0, 0]
    fast = rewriter.optimize(f, implementation=FORCED)
    np.testing.assert_allclose(fast(*given), f(*given), rtol=1e-5, atol=1e-5)
    assert fast.report().sites[0].form == "scored_attention"


def test_an_infinite_fill_hides_beside_any_bias() -> None:
    causal = lambda s, b, _: jnp.where(SEEN, s + b, -jnp.inf)
    site = check(attention(causal), HIDES)
    assert site.params["window"] == (None, 0)


def test_the_report_says_what_is_done() -> None:
    causal = attention(lambda s, b, _: jnp.where(SEEN, s + b, -1e9))
    explain = lambda x, **more: str(
        rewriter.explain(causal, implementation=FORCED, **more)(Q, K, V, x, LEFT)
    )
    assert "masked ones are weighed" in explain(OF_HEADS)
    assert "masked ones are weighed" not in explain(OF_HEADS, assume=("finite",))
    assert "causal" in explain(HIDES, assume=("finite",))
    assert "causal" not in explain(HIDES)
