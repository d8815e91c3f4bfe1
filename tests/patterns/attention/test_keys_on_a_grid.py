"""Keys and values that come from images: one of them on a grid, the other one not."""

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

B, SIDE, N, H = 2, 4, 2, 4
D, T = N * H, SIDE * SIDE
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(B, SIDE, SIDE, D)).astype(np.float32)
Y = RANDOM.normal(size=(B, SIDE, SIDE, D)).astype(np.float32)
KERNEL = (RANDOM.normal(size=(3, 3, 1, D)) / 3).astype(np.float32)
SCALE = RANDOM.normal(size=(H,)).astype(np.float32)
KEPT = jnp.arange(T) < T - 3
FORCED = {"attention": "memory_bounded"}


def normal(x: Any, scale: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def heads(x: Any) -> Any:
    return x.reshape(B, -1, N, H)


def filtered(x: Any, kernel: Any, stride: int = 1) -> Any:
    names = "NHWC", "HWIO", "NHWC"
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=names,
        feature_group_count=D,
    )  # fmt: skip


def attend(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    s = jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5
    s = s if mask is None else jnp.where(mask, s, -1e30)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)


def keys_normalised(x: Any, y: Any, kernel: Any, scale: Any) -> Any:
    k = normal(heads(filtered(y, kernel)), scale)
    return attend(heads(x), k, heads(filtered(y, kernel)))


def pooled(x: Any, y: Any, kernel: Any, scale: Any) -> Any:
    k, v = (heads(filtered(a, kernel, 2)) for a in (y, jnp.sin(y)))
    return attend(heads(x), normal(k, scale), v) + heads(x)


def values_normalised(x: Any, y: Any, kernel: Any, scale: Any) -> Any:
    v = normal(heads(filtered(y, kernel)), scale)
    return attend(heads(x), heads(filtered(y, kernel)), v)


def both_normalised(x: Any, y: Any, kernel: Any, scale: Any) -> Any:
    k, v = (heads(filtered(a, kernel)) for a in (y, x))
    return attend(heads(x), normal(k, scale), normal(v, scale + 1))


def keys_without_a_grid(x: Any, y: Any, kernel: Any, scale: Any) -> Any:
    k = normal(heads(y), scale)
    return attend(heads(x), k, heads(filtered(y, kernel)))


def values_without_a_grid(x: Any, y: Any, kernel: Any, scale: Any) -> Any:
    v = normal(heads(y), scale)
    return attend(heads(x), heads(filtered(y, kernel)), v)


def masked(x: Any, y: Any, kernel: Any, scale: Any) -> Any:
    k = normal(heads(filtered(y, kernel)), scale)
    return attend(heads(x), k, heads(filtered(y, kernel)), KEPT)


def causal(x: Any, y: Any, kernel: Any, scale: Any) -> Any:
    k = normal(heads(filtered(y, kernel)), scale)
    seen = jnp.tri(T, dtype=bool)
    return attend(heads(x), k, heads(filtered(y, kernel)), seen)


def in_frames(x: Any, y: Any, kernel: Any, scale: Any) -> Any:
    """Values on a grid of three axes."""
    v = jnp.sin(y.reshape(B, 2, 2, SIDE, D) * jnp.arange(1, 3)[:, None, None, None])
    return attend(heads(x), normal(heads(y), scale), heads(v))


def averaged(x: Any, y: Any, kernel: Any, scale: Any) -> Any:
    window = (1, 2, 2, 1)
    v = lax.reduce_window(y, 0.0, lax.add, window, window, "SAME") / 4
    k = normal(heads(v), scale)
    return attend(heads(x), k, heads(v))


FOUND: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        keys_normalised, pooled, values_normalised, both_normalised,
        keys_without_a_grid, values_without_a_grid, masked, causal, in_frames, averaged,
    )
} | {"checkpoint": jax.checkpoint(pooled)}  # fmt: skip


def turned(x: Any, y: Any, kernel: Any, scale: Any) -> Any:
    """Values in the order of columns: each key has the value of another place."""
    v = heads(filtered(y, kernel).swapaxes(1, 2))
    return attend(heads(x), normal(heads(filtered(y, kernel)), scale), v)


def summed_over_rows(x: Any, y: Any, kernel: Any, scale: Any) -> Any:
    k, v = normal(heads(filtered(y, kernel)), scale), filtered(y, kernel)
    s = jnp.einsum("btnh,bsnh->bnts", heads(x), k)
    w = jax.nn.softmax(s).reshape(B, N, T, SIDE, SIDE)
    v = v.reshape(B, SIDE, SIDE, N, H)
    return jnp.einsum("bntij,bijnh->btnh", w[..., ::-1], v)


OTHERS = {f.__name__: f for f in (turned, summed_over_rows)}


def gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    loss = lambda *args: (jnp.sin(fn(*args)) * jnp.arange(H)).sum()
    return jax.value_and_grad(loss, (0, 1, 2, 3))


@pytest.mark.parametrize("name", [*FOUND, *OTHERS])
def test_numbers_and_gradients(name: str) -> None:
    fn, args = gradients((FOUND | OTHERS)[name]), (X, Y, KERNEL, SCALE)
    new = rewriter.optimize(fn, implementation=FORCED)
    sites = [s for s in new.report(*args).sites if s.op == "attention"]
    if name in FOUND:
        assert [s.replaced and s.backward for s in sites] == [True]
    with jax.enable_x64(True):
        wide = jax.jit(fn)(*(a.astype(np.float64) for a in args))
    for a, b in zip(*map(jax.tree.leaves, (new(*args), wide)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(np.abs(b).max(), 0.1))
