"""Keys and values that a choice hides may hold NaN or infinities.

The program as written may multiply them by 0 and give NaN. What is rewritten does so,
too, or gives what the program gives for numbers in their place. Nothing else is NaN.
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

T, N, H, HIDDEN = 24, 2, 8, 5
DRAW = np.random.default_rng(0)
Q, K, V = (DRAW.normal(size=(1, T, N, H)).astype("f4") for _ in range(3))
AT = np.arange(T)
HELD = AT < T - HIDDEN
CAUSAL = AT[:, None] >= AT
DENSE = (DRAW.random((1, N, T, T)) < 0.5) | (AT == 0)
FORCED = {"attention": ["memory_bounded"]}
Mask = Callable[[Any], Any]

MASKS: dict[str, Mask] = {
    "padding": lambda s: jnp.where(HELD, s, -jnp.inf),
    "number": lambda s: jnp.where(HELD, s, -1e30),
    "least number": lambda s: jnp.where(HELD, s, jnp.finfo("float32").min),
    "inverse": lambda s: jnp.where(~HELD, -jnp.inf, s),
    "select": lambda s: lax.select(
        jnp.broadcast_to(HELD, s.shape), s, jnp.full_like(s, -1e30)
    ),
    "length": lambda s: jnp.where(jnp.arange(T) < T - HIDDEN, s, -jnp.inf),
    "causal": lambda s: jnp.where(CAUSAL & HELD, s, -jnp.inf),
    "window": lambda s: jnp.where(HELD & (AT[:, None] - AT < 20), s, -jnp.inf),
    "two choices": lambda s: jnp.where(HELD, jnp.where(CAUSAL, s, -1e30), -1e30),
    "with a bias": lambda s: jnp.where(HELD, s + 0.1 * AT, -jnp.inf),
    "bias behind": lambda s: jnp.where(HELD, s, -jnp.inf) + 0.1 * AT,
    "dense": lambda s: jnp.where(DENSE & HELD, s, -jnp.inf),
}


def attention(mask: Mask) -> Callable[..., Any]:
    def f(q: Any, k: Any, v: Any) -> Any:
        s = mask(jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)

    return f


def gradients(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gives a result and its gradients."""

    def run(*given: Any) -> Any:
        out, pull = jax.vjp(f, *given)
        return out, *pull(jnp.cos(jnp.arange(out.size).reshape(out.shape) * 0.37))

    return run


CHOSEN: dict[str, Mask] = {
    "where=": lambda s: jax.nn.softmax(s, where=HELD),
    "where= of rows": lambda s: jax.nn.softmax(s, where=CAUSAL & HELD),
    "-inf": lambda s: jnp.where(
        HELD, jax.nn.softmax(jnp.where(HELD, s, -jnp.inf)), 0.0
    ),
    "number": lambda s: jnp.where(HELD, jax.nn.softmax(jnp.where(HELD, s, -1e9)), 0.0),
    "causal": lambda s: jnp.where(
        CAUSAL, jax.nn.softmax(jnp.where(CAUSAL, s, -jnp.inf)), 0.0
    ),
    "inverse": lambda s: jnp.where(
        ~HELD, 0.0, jax.nn.softmax(jnp.where(~HELD, -jnp.inf, s))
    ),
    "dense": lambda s: jax.nn.softmax(s, where=DENSE & HELD),
    "window": lambda s: jax.nn.softmax(s, where=HELD & (AT[:, None] - AT < 20)),
    "stable by hand": lambda s: (
        lambda e: jnp.where(HELD, e / e.sum(-1, keepdims=True), 0.0)
    )(jnp.exp((x := jnp.where(HELD, s, -jnp.inf)) - x.max(-1, keepdims=True))),
    "select": lambda s: lax.select(
        jnp.broadcast_to(HELD, s.shape),
        jax.nn.softmax(jnp.where(HELD, s, -jnp.inf)),
        jnp.zeros_like(s),
    ),
}
"""Weights of which a choice behind the softmax makes 0."""


@pytest.mark.parametrize("broken", ["q", "k", "v", "v hidden"])
def test_weights_that_are_chosen_pass_what_the_program_passes(broken: str) -> None:
    """NaN in a row reaches no value of a key that the row does not see."""
    given = {n: x.copy() for n, x in zip("qkv", (Q, K, V), strict=True)}
    given[broken[0]][0, -1 if "hidden" in broken else 3] = np.nan

    def of(mask: Mask) -> Callable[..., Any]:
        def f(q: Any, k: Any, v: Any) -> Any:
            w = mask(jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5)
            return jnp.einsum("bnts,bsnh->btnh", w, v)

        return f

    fast = lambda f: rewriter.optimize(f, implementation=FORCED, strict=True)
    run = lambda way: jax.jit(
        lambda *a: {n: way(of(mask))(*a) for n, mask in CHOSEN.items()}
    )(*given.values())
    want = run(gradients)
    assert any(np.isfinite(x).any() for x in want["-inf"][1:])
    for way in (lambda f: gradients(fast(f)), lambda f: fast(gradients(f))):
        got = run(way)
        for name in CHOSEN:
            for x, y in zip(want[name], got[name], strict=True):
                np.testing.assert_allclose(y, x, 1e-4, 1e-5, err_msg=name)


@pytest.mark.parametrize(("broken", "value"), [("k", np.nan), ("v", np.inf)])
def test_what_a_choice_hides_may_be_anything(broken: str, value: float) -> None:
    """Numbers stay these numbers; what is NaN as written may be those for numbers."""
    fast = lambda f: rewriter.optimize(f, implementation=FORCED, strict=True)
    fill = lambda number: [
        np.where(HELD[:, None, None], x, number if name in broken else x).astype("f4")
        for name, x in zip("kv", (K, V), strict=True)
    ]
    run = lambda of, given: jax.jit(
        lambda *a: {n: of(attention(mask))(*a) for n, mask in MASKS.items()}
    )(Q, *given)
    written, want = run(gradients, fill(value)), run(gradients, fill(0.5))
    for way in (lambda f: gradients(fast(f)), lambda f: fast(gradients(f))):
        got = run(way, fill(value))
        for name in MASKS:
            for old, x, y in zip(written[name], want[name], got[name], strict=True):
                lost = np.isnan(y) & ~np.isfinite(old)
                np.testing.assert_allclose(
                    np.where(lost, x, y), x, 1e-4, 1e-5, err_msg=name
                )
