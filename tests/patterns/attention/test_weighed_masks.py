"""An argument's bias of -inf beside a mask with a finite fill: masked keys are weighed.

Each head has numbers of its own, as a learned bias has. They are looked at when the
program runs.
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
Q, K, V, UP = (RANDOM.normal(size=(B, T, N, H)).astype(np.float32) for _ in range(4))
KEPT = np.array([[1] * 5 + [0] * 3, [1] * T], bool)
SEGMENTS = np.array([[0] * 3 + [1] * 5, [0] * 6 + [1] * 2])
BIAS = RANDOM.normal(size=(1, N, T, T)).astype(np.float32)
BIAS[:, 0, 3, :4] = BIAS[:, 0, 3, 6] = BIAS[:, 0, 5] = -np.inf
TABLE = RANDOM.normal(size=(2 * T, N)).astype(np.float32)
TABLE[: T + 1, 0] = -np.inf  # of a query's own key, and of those before it
BUCKETS = np.arange(T) - np.arange(T)[:, None] + T

MASKS: dict[str, Callable[[Any], Any]] = {
    "causal": lambda kept: jnp.tril(jnp.ones((T, T), bool)),
    "padding": lambda kept: kept[:, None, None],
    "both": lambda kept: jnp.tril(kept[:, None, None] & jnp.ones((T, T), bool)),
    "a window": lambda kept: jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T)) < 3,
    "segments": lambda kept: SEGMENTS[:, None, :, None] == SEGMENTS[:, None, None],
}
FILLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "chosen": lambda s, b, m: jnp.where(m, s + b, -1e9),
    "chosen lowest": lambda s, b, m: jnp.where(m, s + b, jnp.finfo(s.dtype).min),
    "added": lambda s, b, m: s + b + jnp.where(m, 0.0, -1e9),
    "added lowest": lambda s, b, m: (
        s + (b + jnp.where(m, 0.0, float(jnp.finfo(s.dtype).min)).astype(s.dtype))
    ),
    "by a product": lambda s, b, m: s + b + (1.0 - m) * -1e10,
    "chosen before": lambda s, b, m: jnp.where(m, s, -1e9) + b,
}
BIASES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "an argument": (lambda x: x, BIAS),
    "a table": (lambda x: x[BUCKETS].transpose(2, 0, 1)[None], TABLE),
    "set": (lambda x: x.at[:, 0, 3, :4].set(-jnp.inf), np.nan_to_num(BIAS, neginf=0)),
    "as low as the fill": (lambda x: x, np.where(np.isinf(BIAS), -1e9, BIAS)),
    "finite": (lambda x: x, np.where(np.isinf(BIAS), 0, BIAS)),
}
BIASES["of the batch"] = (lambda x: x, np.concatenate([np.zeros_like(BIAS), BIAS]))


def attention(mask: Any, fill: Any, bias: Any = lambda x: x) -> Callable[..., Any]:
    def attend(q: Any, k: Any, v: Any, x: Any, kept: Any) -> Any:
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5
        scores = fill(scores, bias(x), mask(kept))
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)

    return attend


def total(f: Callable[..., Any]) -> Callable[..., Any]:
    """A sum without rows that are NaN: cotangents of others would be NaN too."""
    return lambda *a: jnp.where(jnp.isfinite(o := f(*a)), o * UP, 0).sum()


def check(f: Callable[..., Any], x: Any, inside: bool = True) -> Any:
    """Compares results and all gradients with the program's own; returns the site."""
    given = Q, K, V, np.asarray(x, np.float32), KEPT
    close = {"rtol": 1e-4, "atol": 1e-5}
    fast = rewriter.optimize(f, implementation=FORCED)
    np.testing.assert_allclose(fast(*given), jax.jit(f)(*given), **close)
    argnums = 0, 1, 2, 3
    theirs = jax.jit(jax.grad(total(f), argnums))(*given)
    both = [jax.jit(jax.grad(total(fast), argnums))]
    if inside:
        grad = jax.grad(total(f), argnums)
        both.append(rewriter.optimize(grad, implementation=FORCED))
    for ours in both:
        for a, b in zip(ours(*given), theirs, strict=True):
            np.testing.assert_allclose(a, b, **close)
    sites = fast.report().sites
    return sites[0] if sites else None


@pytest.mark.parametrize("fill", ["chosen", "added lowest"])
def test_masked_keys_are_weighed(fill: str) -> None:
    site = check(attention(MASKS["causal"], FILLS[fill]), BIAS)
    assert site.params["window"] == (None, 0)
    assert site.params["fill"] in (-1e9, LOW)


@pytest.mark.once
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("mask", MASKS)
def test_values_and_gradients_are_as_written(mask: str, fill: str, bias: str) -> None:
    make, x = BIASES[bias]
    check(attention(MASKS[mask], FILLS[fill], make), x, inside=mask == "causal")


IN_LAYERS: dict[str, Callable[[Any], Any]] = {
    "checkpoint": jax.checkpoint,
    "jit": jax.jit,
    "a loop": lambda f: (
        lambda q, k, v, x, kept: jax.lax.scan(
            lambda c, own: (c + f(c, k, v, own, kept), None), q, jnp.stack([x, 2 * x])
        )[0]
    ),
    "checkpoints in a loop": lambda f: (
        lambda q, k, v, x, kept: jax.lax.scan(
            jax.checkpoint(lambda c, _: (c + f(c, k, v, x, kept), None)), q, None, 2
        )[0]
    ),
    "vmap": lambda f: (
        lambda q, k, v, x, kept: jax.vmap(
            lambda q, k, v, m: f(q[None], k[None], v[None], x, m[None])[0]
        )(q, k, v, kept)
    ),
}


@pytest.mark.once
@pytest.mark.parametrize("fill", ["chosen", "added lowest"])
@pytest.mark.parametrize("way", IN_LAYERS)
def test_in_layers(way: str, fill: str) -> None:
    finite = np.array(BIAS)
    finite[:, 0, 5] = 0  # in a loop such a row would make all later ones NaN
    check(IN_LAYERS[way](attention(MASKS["causal"], FILLS[fill])), finite)


@pytest.mark.once
@pytest.mark.parametrize("name", ["sinks", "rows set to zero", "weights chosen"])
def test_beside_other_guards(name: str) -> None:
    def f(q: Any, k: Any, v: Any, x: Any, kept: Any) -> Any:
        s = jnp.einsum("btnh,bsnh->bnts", q, k) + x
        m = MASKS["both"](kept)
        s = jnp.where(m, s, -1e9)
        if name == "sinks":
            more = jnp.zeros((B, N, T, 1))
            p = jax.nn.softmax(jnp.concatenate([s, more], -1))[..., :-1]
        else:
            p = jax.nn.softmax(s)
        p = jnp.where(m, p, 0) if name == "weights chosen" else p
        out = jnp.einsum("bnts,bsnh->btnh", p, v)
        if name == "rows set to zero":
            out = jnp.where(m.any(-1)[:, 0, :, None, None], out, 0)
        return out

    finite = np.array(BIAS)
    finite[:, 0, 5] = 0
    check(f, finite, inside=False)


@pytest.mark.once
@pytest.mark.parametrize("fill", FILLS)
def test_in_16_bits(fill: str) -> None:
    f = attention(MASKS["causal"], FILLS[fill])
    x = np.array(BIAS)
    x[:, 0, 5] = 0
    given = *(jnp.asarray(a, jnp.bfloat16) for a in (Q, K, V, x)), KEPT
    fast = rewriter.optimize(f, implementation=FORCED)
    argnums = 0, 1, 2, 3
    close = {"rtol": 0, "atol": 5e-2}
    got, want = fast(*given), jax.jit(f)(*given)
    np.testing.assert_allclose(np.float32(got), np.float32(want), **close)
    ours = jax.jit(jax.grad(total(fast), argnums))(*given)
    theirs = jax.jit(jax.grad(total(f), argnums))(*given)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), **close)


def test_a_bias_that_is_assumed_to_be_finite_has_no_fill() -> None:
    f = attention(MASKS["causal"], FILLS["chosen"])
    x = np.where(np.isinf(BIAS), 0, BIAS)
    fast = rewriter.optimize(f, implementation=FORCED, assume=("finite",))
    np.testing.assert_allclose(fast(Q, K, V, x, KEPT), f(Q, K, V, x, KEPT), atol=1e-5)
    assert "fill" not in fast.report().sites[0].params
