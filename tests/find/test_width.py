"""Programs that compute in float64 of float32 arrays are left as they are written."""

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

DRAW = np.random.default_rng(0)
X, Y = (DRAW.normal(size=(12, 16)).astype("f4") for _ in range(2))
W, U = (DRAW.normal(size=(16, 12)).astype("f4") for _ in range(2))
HUGE, FAR = X * np.float32(1e25), X + np.float32(1e6)
AT = np.arange(12)
FORCED = {
    "attention": ["memory_bounded"], "rms_norm": ["memory_bounded"],
    "layer_norm": ["memory_bounded"], "cross_entropy": ["memory_bounded"],
    "linear_cross_entropy": ["memory_bounded"],
    "gated_linear_unit": ["memory_bounded"],
}  # fmt: skip


def wide(x: Any) -> Any:
    return x.astype(jnp.float64)


def narrow(x: Any) -> Any:
    return x.astype(jnp.float32)


def rms(x: Any) -> Any:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def layer(x: Any) -> Any:
    return rms(x - x.mean(-1, keepdims=True))


def attend(s: Any, v: Any) -> Any:
    return jax.nn.softmax(s) @ v


def loss(y: Any) -> Any:
    return jax.nn.logsumexp(y, -1) - y[jnp.arange(12), AT]


def unit(a: Any, b: Any) -> Any:
    return jax.nn.silu(a) * b


WIDER: dict[str, tuple[Callable[..., Any], ...]] = {
    "rms": (lambda x: narrow(rms(wide(x))), HUGE),
    "its root": (
        lambda x: x * narrow(lax.rsqrt((wide(x) ** 2).mean(-1, keepdims=True) + 1e-6)),
        HUGE,
    ),
    "its squares": (
        lambda x: narrow(x * lax.rsqrt(jnp.mean(wide(x) ** 2, -1)[:, None])),
        HUGE,
    ),
    "result": (lambda x: rms(wide(x)), HUGE),
    "layer": (lambda x: narrow(layer(wide(x))), HUGE),
    "other means": (lambda x: narrow(layer(wide(x))), FAR),
    "attention": (
        lambda x, k: narrow(attend(wide(x) @ wide(k).T, wide(k))),
        X * 1000,
        Y,
    ),
    "a bias": (lambda x, k: attend(x @ k.T + wide(k[:, 0]) * 1e9, k), X, Y),
    "one branch": (lambda x, w, u: unit(x @ w, wide(x @ u)), X, W, U),
    "softmax": (lambda x, k: narrow(jax.nn.softmax(wide(x @ k.T))) @ k, X * 9, Y),
    "loss": (lambda y: narrow(loss(wide(y))), X * 0 + np.float32(1e8)),
    "large losses": (lambda y: narrow(loss(wide(y))), X * np.float32(1e6)),
    "unit": (
        lambda x, w, u: narrow(unit(wide(x) @ wide(w), wide(x) @ wide(u))),
        X,
        W,
        U,
    ),
}
"""Their op would compute in float32."""
AS_WIDE: dict[str, tuple[Callable[..., Any], ...]] = {
    "a bias of a loss": (lambda x, w: loss(x @ w + wide(w[0])), X * 900, W),
    "linear loss": (lambda x, w: narrow(loss(wide(x) @ wide(w))), X * 9000, W),
    "float64": (rms, X.astype("f8")),
    "float32": (rms, X),
    "float64 but a bias": (
        lambda x, k, b: attend(x @ k.T + b, k),
        X.astype("f8"),
        Y.astype("f8"),
        Y[:, 0],
    ),
    "a number": (lambda x: rms(x) * narrow(jnp.float64(0.5) ** 2), X),
    "a mask": (
        lambda x, k: attend(
            jnp.where(wide(AT)[:, None] >= wide(AT), x @ k.T, -jnp.inf), k
        ),
        X,
        Y,
    ),
}
"""Their op computes as wide; weights of the loss are operands in float64."""


def test_what_is_computed_in_float64_stays_so() -> None:
    with jax.enable_x64(True):
        for name, (f, *given) in {**WIDER, **AS_WIDE}.items():
            fast = rewriter.optimize(f, implementation=FORCED, strict=True)
            arrays = tuple(map(jnp.asarray, given))
            found = any(s.replaced for s in fast.report(*arrays).sites)
            assert found == (name in AS_WIDE), name
            np.testing.assert_allclose(fast(*arrays), jax.jit(f)(*arrays), 2e-6, 1e-6)
    report = str(rewriter.explain(rms)(X))
    assert "float64" not in report


def test_the_reason_says_so() -> None:
    f, x = WIDER["rms"]
    with jax.enable_x64(True):
        told = str(rewriter.explain(f)(jnp.asarray(x)))
    assert "the program computes in float64, and rms_norm in float32" in told
