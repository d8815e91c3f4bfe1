"""Sums of parts of one softmax that are multiplied by values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.program.prepare.parts_of_softmaxes import multiply_at_once

pytestmark = pytest.mark.once

B, T, N, H = 2, 6, 2, 4
RANDOM = np.random.default_rng(0)
Q, K = (RANDOM.normal(size=(B, T, N, 2, H)).astype(np.float32) for _ in range(2))
V = RANDOM.normal(size=(B, T, N, 2 * H)).astype(np.float32)
L = RANDOM.normal(size=(N,)).astype(np.float32)
FORCED = {"attention": "memory_bounded"}


def stacked(q: Any, k: Any) -> Any:
    """The weights of both maps, on an axis of two."""
    s = jnp.einsum("btnch,bsnch->bncts", q, k) * H**-0.5
    return jax.nn.softmax(jnp.where(jnp.tri(T, dtype=bool), s, -1e9))


def of_heads(q: Any, k: Any, pairs: bool = False) -> Any:
    """The weights of all heads; the second maps are the last ones, or in pairs."""
    q, k = ((x if pairs else x.swapaxes(2, 3)).reshape(B, T, -1, H) for x in (q, k))
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
    return jax.nn.softmax(jnp.where(jnp.tri(T, dtype=bool), s, -1e9))


def weighed(weights: Any, v: Any) -> Any:
    out = jnp.einsum("bnts,bsnh->btnh", weights, v)
    return out * jax.lax.rsqrt((out * out).mean(-1, keepdims=True) + 1e-5)


def on_an_axis(q: Any, k: Any, v: Any, factor: Any) -> Any:
    w = stacked(q, k)
    return weighed(w[:, :, 0] - factor[:, None, None] * w[:, :, 1], v)


def by_number(q: Any, k: Any, v: Any, factor: Any) -> Any:
    w = stacked(q, k)
    return weighed(w[:, :, 0] - jnp.exp(factor[0]) * w[:, :, 1], v)


def exchanged(q: Any, k: Any, v: Any, factor: Any) -> Any:
    w = stacked(q, k)
    return weighed(0.5 * w[:, :, 1] + factor[1] * w[:, :, 0], v)


def first_axis(q: Any, k: Any, v: Any, factor: Any) -> Any:
    s = jnp.einsum("btnch,bsnch->cbnts", q, k)
    a, b = jax.nn.softmax(s)
    return weighed(a - factor[0] * b, v)


def viewed(q: Any, k: Any, v: Any, factor: Any) -> Any:
    w = of_heads(q, k, True).reshape(B, N, 2, T, T)
    return weighed(w[:, :, 0] - factor[None, :, None, None] * w[:, :, 1], v)


def in_halves(q: Any, k: Any, v: Any, factor: Any) -> Any:
    a, b = jnp.split(of_heads(q, k), 2, 1)
    return weighed(a - factor[0] * b, v)


def sliced(q: Any, k: Any, v: Any, factor: Any) -> Any:
    w = of_heads(q, k)
    return weighed(w[:, :N] - factor[:, None, None] * w[:, N:], v)


def every_other(q: Any, k: Any, v: Any, factor: Any) -> Any:
    w = of_heads(q, k, True)
    return weighed(w[:, ::2] - factor[0] * w[:, 1::2], v)


def with_matmul(q: Any, k: Any, v: Any, factor: Any) -> Any:
    w = stacked(q, k)
    w = w[:, :, 0] - factor[None, :, None, None] * w[:, :, 1]
    return jnp.matmul(w, v.swapaxes(1, 2)).swapaxes(1, 2)


def four_parts(q: Any, k: Any, v: Any, factor: Any) -> Any:
    w = stacked(*(x.reshape(B, T, 1, 4, H) for x in (q, k)))
    a, b, c, d = (w[:, :, i] for i in range(4))
    return weighed(a - factor[0] * b + c - factor[1] * d, v[:, :, :1])


FOUND: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        on_an_axis, by_number, exchanged, first_axis, viewed, in_halves, sliced,
        every_other, with_matmul, four_parts,
    )
} | {
    "checkpoint": jax.checkpoint(on_an_axis),
    "saved products": jax.checkpoint(
        viewed, policy=jax.checkpoint_policies.dots_saveable
    ),
}  # fmt: skip


def by_key(q: Any, k: Any, v: Any, factor: Any) -> Any:
    w = stacked(q, k)
    return weighed(w[:, :, 0] - jnp.arange(T) * factor[0] * w[:, :, 1], v)


def one_part(q: Any, k: Any, v: Any, factor: Any) -> Any:
    return weighed(factor[0] * stacked(q, k)[:, :, 0], v)


def twice(q: Any, k: Any, v: Any, factor: Any) -> Any:
    w = stacked(q, k)
    return weighed(w[:, :, 0] - factor[0] * w[:, :, 0], v)


def some(q: Any, k: Any, v: Any, factor: Any) -> Any:
    w = stacked(*(x.reshape(B, T, 1, 4, H) for x in (q, k)))
    return weighed(w[:, :, 0] - factor[0] * w[:, :, 2], v[:, :, :1])


def of_keys(q: Any, k: Any, v: Any, factor: Any) -> Any:
    a, b = jnp.split(stacked(q, k)[:, :, 0], 2, -1)
    return weighed(a - factor[0] * b, v[:, : T // 2])


def unlike(q: Any, k: Any, v: Any, factor: Any) -> Any:
    w = of_heads(q, k)
    return weighed(w[:, :N] - factor[0] * w[:, 1 : N + 1], v)


def of_two(q: Any, k: Any, v: Any, factor: Any) -> Any:
    w, u = stacked(q, k), stacked(k, q)
    return weighed(w[:, :, 0] - factor[0] * u[:, :, 1], v)


def squared(q: Any, k: Any, v: Any, factor: Any) -> Any:
    w = stacked(q, k)
    return weighed(w[:, :, 0] ** 2 - factor[0] * w[:, :, 1], v)


OTHERS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (by_key, one_part, twice, some, of_keys, unlike, of_two, squared)
}


def gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    weights = np.cos(np.arange(V.size).reshape(V.shape)).astype(np.float32)
    loss = lambda *args: (fn(*args) * weights[:, :, : fn(*args).shape[2]]).sum()
    return jax.value_and_grad(loss, (0, 1, 2, 3))


@pytest.mark.parametrize("name", FOUND)
def test_both_maps_are_one_attention(name: str) -> None:
    fn, args = gradients(FOUND[name]), (Q, K, V, L)
    new = rewriter.optimize(fn, implementation=FORCED)
    (site,) = (s for s in new.report(*args).sites if s.op == "attention")
    assert site.replaced
    assert site.backward
    with jax.enable_x64(True):
        wide = jax.jit(fn)(*(a.astype(np.float64) for a in args))
    for a, b in zip(*map(jax.tree.leaves, (new(*args), wide)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(np.abs(b).max(), 0.1))


def test_layers() -> None:
    """Two layers in a loop under a checkpoint, differentiated by their weights."""

    @jax.checkpoint
    def layer(x: Any, w: Any) -> Any:
        q, k = (jnp.einsum("btd,dnch->btnch", x, w[name]) for name in "qk")
        v = jnp.einsum("btd,dnh->btnh", x, w["v"])
        return x + viewed(q, k, v, w["l"]).reshape(x.shape) / 4

    def loss(w: Any, x: Any) -> Any:
        return (jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0] ** 2).mean()

    d = N * 2 * H
    shapes = {"q": (2, d, N, 2, H), "k": (2, d, N, 2, H), "v": (2, d, N, 2 * H)}
    w = {k: RANDOM.normal(size=s).astype(np.float32) / 4 for k, s in shapes.items()}
    w["l"], x = RANDOM.normal(size=(2, B, T, d))[:, 0, :N, 0].astype(np.float32), V
    x = x.reshape(B, T, d)
    new = rewriter.optimize(jax.value_and_grad(loss), implementation=FORCED)
    (site,) = (s for s in new.report(w, x).sites if s.op == "attention")
    assert site.backward
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: a.astype(np.float64), (w, x))
        want = jax.jit(jax.value_and_grad(loss))(*wide)
    for a, b in zip(*map(jax.tree.leaves, (new(w, x), want)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(np.abs(b).max(), 0.1))


@pytest.mark.parametrize("name", OTHERS)
def test_other_sums_stay(name: str) -> None:
    program = jax.make_jaxpr(gradients(OTHERS[name]))(Q, K, V, L)
    assert multiply_at_once(program) is program


@pytest.mark.parametrize("dtype", ["int8", "bool", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("how", ["all", "a part", "the sum"])
def test_roundings_stay(dtype: str, how: str) -> None:
    """Weights that are rounded to few bits are not those of the softmax."""

    def rounded(x: Any) -> Any:
        return x.astype(dtype).astype(jnp.float32)

    def fn(q: Any, k: Any, v: Any, factor: Any) -> Any:
        w = stacked(q, k)
        w = rounded(w) if how == "all" else w
        first = rounded(w[:, :, 0]) if how == "a part" else w[:, :, 0]
        both = first - factor[0] * w[:, :, 1]
        return weighed(rounded(both) if how == "the sum" else both, v)

    program = jax.make_jaxpr(fn)(Q, K, V, L)
    if how != "all":  # its parts are parts of what is rounded
        assert multiply_at_once(program) is program
    fast = rewriter.optimize(fn, implementation=FORCED)
    np.testing.assert_allclose(fast(Q, K, V, L), fn(Q, K, V, L), rtol=1e-5, atol=1e-5)
