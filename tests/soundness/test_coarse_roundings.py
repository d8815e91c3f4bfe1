"""Roundings to 8 bits, to integers and to booleans inside of an op are its own steps.

A kernel keeps intermediates in float32 where the program rounds them to 16 bits. What a
program rounds to fewer bits is another number, or NaN where that is too large: such
programs simulate quantization. They are left as written, or the rounding stays outside.
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
from tests.soundness.passes import KERNELS

pytestmark = pytest.mark.once

DRAW = np.random.default_rng(0)
E4, E5 = jnp.float8_e4m3fn, jnp.float8_e5m2


def normal(*shape: int) -> np.ndarray:
    return DRAW.normal(size=shape).astype("f4")


Q, K, V, Q2, K2 = (normal(1, 12, 2, 8) for _ in range(5))
X, G, W1, W2 = normal(12, 32), normal(32), normal(32, 16), normal(32, 16)
LABELS = DRAW.integers(0, 16, 12)


def scores(q: Any, k: Any) -> Any:
    return jnp.einsum("btnh,bsnh->bnts", q, k) / 3


def mix(w: Any, v: Any) -> Any:
    return jnp.einsum("bnts,bsnh->btnh", w, v)


def attend(r: Any, at: str) -> Callable[..., Any]:
    """Attention with a rounding at one of its steps."""
    step = {name: r if name == at else lambda x: x for name in "smexwo"}

    def f(q: Any, k: Any, v: Any) -> Any:
        s = step["s"](scores(q, k))
        e = step["e"](jnp.exp(step["x"](s - step["m"](s.max(-1, keepdims=True)))))
        return step["o"](mix(step["w"](e / e.sum(-1, keepdims=True)), v)) * 2

    return f


def subtracted(r: Any) -> Callable[..., Any]:
    """A difference of two softmaxes that is rounded, beside an attention."""

    def f(q: Any, k: Any, v: Any, q2: Any, k2: Any) -> Any:
        one, two = jax.nn.softmax(scores(q, k)), jax.nn.softmax(scores(q2, k2))
        return mix(r(one - two), v), mix(one, v)

    return f


def mean_square(x: Any) -> Any:
    return (x * x).mean(-1, keepdims=True)


def root(x: Any) -> Any:
    return x * lax.rsqrt(mean_square(x) + 1e-6)


def centred(x: Any, of: Any = lambda m: m) -> Any:
    return x - of(x.mean(-1, keepdims=True))


def groups(r: Any, x: Any) -> Any:
    y = x.reshape(2, 6, 4, 8)
    y = y - y.mean((1, 3), keepdims=True)
    root = lax.rsqrt((y * y).mean((1, 3), keepdims=True) + 1e-5)
    return r(y * root).reshape(2, 6, 32)


def loss(logs: Any) -> Any:
    return -jnp.take_along_axis(logs, LABELS[:, None], -1)


def others(r: Any) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Norms, units and losses with a rounding at one of their steps."""
    silu, rsqrt, logs = jax.nn.silu, lax.rsqrt, jax.nn.log_softmax
    norm = {
        "normalized": lambda x, g: r(x * rsqrt(mean_square(x) + 1e-6)) * g,
        "mean square": lambda x, g: x * rsqrt(r(mean_square(x)) + 1e-6) * g,
        "square": lambda x, g: x * rsqrt(r(x * x).mean(-1, keepdims=True) + 1e-6) * g,
        "centred": lambda x, g: (
            r(centred(x)) * rsqrt(mean_square(centred(x)) + 1e-6) * g
        ),
        "mean": lambda x, g: root(centred(x, r)) * g,
        "norm": lambda x, g: r(x * rsqrt(mean_square(x) + 1e-6) * g) * 2,
        "too large": lambda x, g: r(x * rsqrt(mean_square(x) + 1e-6) * 400) * g,
        "groups": lambda x, g: groups(r, x) * g,
        "row": lambda x, g: root(r(x)) * g,
    }
    unit = {
        "gate": lambda x, a, b: silu(r(x @ a)) * (x @ b),
        "activation": lambda x, a, b: r(silu(x @ a)) * (x @ b),
        "up": lambda x, a, b: silu(x @ a) * r(x @ b),
        "unit": lambda x, a, b: r(silu(x @ a) * (x @ b)) * 2,
    }
    losses = {
        "logits": lambda x, w: loss(logs(r(x @ w))),
        "logarithms": lambda x, w: loss(r(logs(x @ w))),
        "sum": lambda x, w: r(jax.nn.logsumexp(x @ w, -1)) + loss(x @ w)[:, 0],
    }
    return {
        **{n: (f, (X, G)) for n, f in norm.items()},
        **{n: (f, (X, W1, W2)) for n, f in unit.items()},
        **{n: (f, (X, W1)) for n, f in losses.items()},
    }


def through(dtype: Any) -> Callable[[Any], Any]:
    return lambda x: x.astype(dtype).astype(jnp.float32)


PROGRAMS = {
    **{
        f"attention {at} {d.__name__}": (attend(through(d), at), (Q, K, V))
        for at in "smexwo"
        for d in (E4, E5)
    },
    **{
        f"difference {d.__name__}": (subtracted(through(d)), (Q, K, V, Q2, K2))
        for d in (E4, E5, bool)
    },
    "difference in integers": (
        subtracted(lambda w: (w * 60).astype(jnp.int8).astype(jnp.float32)),
        (Q, K, V, Q2, K2),
    ),
    **{f"{n} {d.__name__}": f for d in (E4, E5) for n, f in others(through(d)).items()},
}


def gradients(f: Callable[..., Any]) -> Callable[..., Any]:
    def g(*given: Any) -> Any:
        out, pull = jax.vjp(f, *given)
        wave = lambda o: jnp.cos(jnp.arange(o.size, dtype="f4") * 0.4).reshape(o.shape)
        return pull(jax.tree.map(wave, out))

    return g


def optimized(f: Callable[..., Any]) -> Callable[..., Any]:
    return rewriter.optimize(f, implementation=KERNELS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_is_as_written(name: str) -> None:
    f, given = PROGRAMS[name]
    wanted = jax.jit(lambda *x: (f(*x), gradients(f)(*x), gradients(f)(*x)))(*given)
    got = jax.jit(
        lambda *x: (
            optimized(f)(*x), gradients(optimized(f))(*x), optimized(gradients(f))(*x),
        )
    )(*given)  # fmt: skip
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
        assert (np.isfinite(a) == np.isfinite(b)).all()
        kept = np.isfinite(a)
        largest = np.abs(np.where(kept, a, 0)).max(initial=0)
        # A number at the middle between two is rounded either way.
        off = np.abs(np.where(kept, a - b, 0)) > 1e-5 * largest
        assert off.mean() <= 0.01, (off.sum(), np.abs(np.where(kept, a - b, 0)).max())


BEHIND = {
    "attention": (attend(through(E4), "o"), (Q, K, V)),
    "norm": others(through(E4))["norm"],
    "unit": others(through(E4))["unit"],
    "operand": (lambda q, k, v: attend(None, "")(through(E4)(q), k, v), (Q, K, V)),
}


@pytest.mark.parametrize("name", BEHIND)
def test_rounding_beside_a_site_keeps_it(name: str) -> None:
    f, given = BEHIND[name]
    assert any(s.replaced for s in optimized(f).report(*given).sites)
