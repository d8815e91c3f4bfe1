"""A power is a root only if its exponent is, as exactly as its dtype says.

In float64, `v ** -0.4999999` differs from `rsqrt(v)` by more than rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from tests.soundness.passes import KERNELS

DRAW = np.random.default_rng(0)
X, G = DRAW.normal(size=(8, 32)) * 30, DRAW.normal(size=32)
NEAR = (-0.5 + 1e-7, -0.5 - 1e-7, -0.5 + 1e-9, -0.5 - 1e-12, -0.4999)


def mean_square(x: Any) -> Any:
    return (x * x).mean(-1, keepdims=True)


def root_mean_square(x: Any, g: Any, e: float) -> Any:
    return x * (mean_square(x) + 1e-6) ** e * g


def divided(x: Any, g: Any, e: float) -> Any:
    return x / (mean_square(x) + 1e-6) ** -e * g


def centred(x: Any, g: Any, e: float) -> Any:
    return root_mean_square(x - x.mean(-1, keepdims=True), g, e)


def groups(x: Any, g: Any, e: float) -> Any:
    y = x.reshape(2, 4, 4, 8)
    y = y - y.mean((1, 3), keepdims=True)
    v = (y * y).mean((1, 3), keepdims=True) + 1e-6
    return (y * v**e).reshape(2, 4, 32) * g


NORMS = (root_mean_square, divided, centred, groups)


def test_one_exponent_near_a_root() -> None:
    with jax.enable_x64(True):
        f = lambda x, g: root_mean_square(x, g, NEAR[0])
        fast = rewriter.optimize(f, implementation=KERNELS)
        np.testing.assert_allclose(fast(X, G), f(X, G), 1e-13)


def ways(f: Callable[..., Any]) -> Any:
    value = f(X, G)
    return value, jax.grad(lambda x: jnp.sin(f(x, G)).sum())(X)


@pytest.mark.once
@pytest.mark.parametrize("norm", NORMS)
def test_exponents_near_a_root(norm: Callable[..., Any]) -> None:
    with jax.enable_x64(True):
        for e in NEAR:
            f = lambda x, g, e=e: norm(x, g, e)
            for a, b in zip(
                ways(f), ways(rewriter.optimize(f, implementation=KERNELS)), strict=True
            ):
                np.testing.assert_allclose(b, a, 1e-13, 1e-13 * np.abs(a).max())


@pytest.mark.once
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("wide", [False, True])
def test_roots_are_found(norm: Callable[..., Any], wide: bool) -> None:
    with jax.enable_x64(wide):
        f = rewriter.optimize(lambda x, g: norm(x, g, -0.5), implementation=KERNELS)
        assert any(s.replaced for s in f.report(jnp.asarray(X), jnp.asarray(G)).sites)
