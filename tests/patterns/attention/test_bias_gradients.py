"""Biases that hide a whole row key by key, and biases that a mask chooses.

What such a row gives, and the gradients that it passes, are those of the program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter

pytestmark = pytest.mark.once

R = np.random.default_rng(0)
B, T, H, D = 2, 8, 2, 8
Q, K, V, UP = R.normal(size=(4, B, T, H, D)).astype(np.float32)
BIAS = R.normal(size=(B, H, T, T)).astype(np.float32)
SOME = R.random((B, H, T, T)) < 0.3
SOME[:, :, 2] = True
KEEP, CAUSAL = jnp.asarray(~SOME), np.tril(np.ones((T, T), bool))
SEEN = jnp.asarray(np.arange(T) < np.array([0, 5])[:, None, None, None])
PLACES = (np.arange(T) - np.arange(T)[:, None]).astype(np.float32)
FORCED = {"attention": ["memory_bounded", "xla"]}

Scores = Callable[[Any, Any], Any]


def attention(of: Scores) -> Callable[..., Any]:
    def f(q: Any, k: Any, v: Any, bias: Any) -> Any:
        scores = of(jnp.einsum("bthd,bshd->bhts", q, k) * D**-0.5, bias)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)

    return f


INFINITE: dict[str, Scores] = {
    "of a pair": lambda s, x: s + x,
    "of all heads": lambda s, x: s + x[:1, :1],
    "of a key": lambda s, x: s + x[:, :1, 2:3],
    "twice": lambda s, x: s + x + x[:, :1],
    "scaled": lambda s, x: (s + x) * 0.5,
    "limited": lambda s, x: s + jnp.minimum(x, 0.0),
    "in 16 bits": lambda s, x: s + x.astype(jnp.bfloat16).astype(jnp.float32),
    "behind a mask": lambda s, x: jnp.where(CAUSAL, s + x, -jnp.inf),
    "a logarithm": lambda s, x: s + jnp.log(jnp.exp(x)),
    "divided": lambda s, x: (s + x) / 2.0,
}
"""Added numbers, some of which are -inf: all of one row are."""

CHOSEN: dict[str, Scores] = {
    "chosen, -inf": lambda s, x: s + jnp.where(KEEP, x, -jnp.inf),
    "chosen, least": lambda s, x: s + jnp.where(KEEP, x, jnp.finfo(jnp.float32).min),
    "chosen, -1e30": lambda s, x: s + jnp.where(KEEP, x, -1e30),
    "of keys": lambda s, x: s + jnp.where(KEEP, x[:1, :, :1], -jnp.inf),
    "slopes": lambda s, x: s + jnp.where(SEEN, x[0, :, 0, :1, None] * PLACES, -jnp.inf),
    "two": lambda s, x: s + jnp.where(SEEN, x, -jnp.inf) + BIAS[:, :1],
    "added to both": lambda s, x: s + (x + jnp.where(KEEP, 0.0, -jnp.inf)),
    "added, then chosen": lambda s, x: jnp.where(KEEP, s + x, -jnp.inf),
    "added behind -inf": lambda s, x: jnp.where(KEEP, s, -jnp.inf) + x,
    "added behind -1e30": lambda s, x: jnp.where(KEEP, s, -1e30) + x,
    "slopes behind": lambda s, x: (
        jnp.where(SEEN, s, -jnp.inf) + x[0, :, 0, :1, None] * PLACES
    ),
    "without a gradient": lambda s, x: (
        s + jnp.where(KEEP, jax.lax.stop_gradient(x), -1e30)
    ),
}
"""Biases and scores that pass a gradient in rows without keys, or one of both."""


def gradients(of: Scores, wrap: Any, bias: Any, outside: bool) -> Any:
    """The result and its gradients, of a rewritten function or rewritten as one."""

    def both(f: Any) -> Any:
        def run(*args: Any) -> Any:
            out, pull = jax.vjp(f, *args)
            return out, *pull(UP)

        return run

    f = attention(of)
    run = both(wrap(f)) if outside else wrap(both(f))
    return run(Q, K, V, jnp.asarray(bias))


def optimized(f: Any) -> Any:
    return rewriter.optimize(f, implementation=FORCED, strict=True)


@pytest.mark.parametrize(
    ("programs", "bias"),
    [(INFINITE, np.where(SOME, -np.inf, BIAS).astype(np.float32)), (CHOSEN, BIAS)],
    ids=["infinite", "chosen"],
)
def test_gradients(programs: dict[str, Scores], bias: np.ndarray) -> None:
    def all_of(wrap: Any, outside: bool) -> Any:
        of = lambda f: gradients(f, wrap, bias, outside)
        run = lambda: {n: of(f) for n, f in programs.items()}
        return jax.jit(run)()

    want = all_of(lambda f: f, True)
    for outside in (True, False):
        got = all_of(optimized, outside)
        wrong = {n: _differs(want[n], got[n]) for n in programs}
        assert not {n: x for n, x in wrong.items() if x}


def _differs(want: Any, got: Any) -> list[int]:
    """Which results have other numbers, or are NaN in other places."""
    return [
        i
        for i, (x, y) in enumerate(zip(want, got, strict=True))
        if not np.allclose(x, y, 2e-3, 1e-4, equal_nan=True)
    ]


def test_are_found() -> None:
    """All but those that would pass a gradient where the program passes none."""
    left = {n for n in CHOSEN if "behind" in n}
    for name, of in {**INFINITE, **CHOSEN}.items():
        report = optimized(attention(of)).report(Q, K, V, BIAS)
        assert any(s.replaced for s in report.sites) == (name not in left), name
