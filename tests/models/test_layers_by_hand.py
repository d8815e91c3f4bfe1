"""Layers as authors of public models write them, as they are trained.

Each is found with its gradients in a scan over checkpointed layers, and in a loop over
plain ones, whatever the mask is made of.
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

B, T, D, N, H, F, LAYERS = 2, 16, 16, 4, 8, 24, 2
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(B, T, D)).astype(np.float32)
PADDED = np.arange(T) < np.array([[T], [T - 5]])
LENGTHS = np.array([T, 9], np.int32)
PACKED = np.stack([np.arange(T) // 6, np.arange(T) // 9]).astype(np.int32)
FORCED = dict.fromkeys(
    ("attention", "rms_norm", "layer_norm", "gated_linear_unit"), "memory_bounded"
)
Case = tuple[Callable[..., Any], dict[str, tuple[int, ...]], Any, dict[str, int]]
CASES: dict[str, Case] = {}


def layer(data: Any, weights: dict[str, tuple[int, ...]], **wanted: int) -> Any:
    """Adds a layer: its data, the shapes of its weights, and what is in it."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        CASES[fn.__name__] = fn, weights, data, wanted
        return fn

    return add


QKV = {"q": (D, N * H), "k": (D, N * H), "v": (D, N * H), "o": (N * H, D)}


def heads(y: Any, n: int = N) -> Any:
    return y.reshape(*y.shape[:2], n, -1)


def flat(y: Any) -> Any:
    return y.reshape(*y.shape[:2], -1)


def causal() -> Any:
    return jnp.tril(jnp.ones((T, T), bool))


def rms(x: Any, g: Any, plus: float = 0.0) -> Any:
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return (x * lax.rsqrt(mean + 1e-6)).astype(x.dtype) * (plus + g)


def norm(x: Any, g: Any, b: Any) -> Any:
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(var + 1e-5) * g + b


@layer(
    PADDED,
    {**QKV, "k": (D, 2 * H), "v": (D, 2 * H), "w": (2, D, F), "d": (F, D), "g": (4, D)},
    attention=1,
    rms_norm=4,
    gated_linear_unit=1,
)
def capped_groups(p: Any, x: Any, m: Any) -> Any:
    """Grouped heads between both axes of the scores, a soft cap, norms around."""
    h = rms(x, p["g"][0], 1.0)
    q = heads(h @ p["q"]).reshape(B, T, 2, 2, H) * H**-0.5
    k, v = heads(h @ p["k"], 2), heads(h @ p["v"], 2)
    s = jnp.einsum("BTKGH,BSKH->BTKGS", q, k).reshape(B, T, N, T)
    s = jnp.tanh(s / 50.0) * 50.0
    s = jnp.where((m[:, None, :] & causal())[:, :, None, :], s, -2.3819763e38)
    w = jax.nn.softmax(s, -1).reshape(B, T, 2, 2, T)
    y = flat(jnp.einsum("BTKGS,BSKH->BTKGH", w, v)) @ p["o"]
    x = x + rms(y, p["g"][1], 1.0)
    both = jnp.einsum("btd,cdf->cbtf", rms(x, p["g"][2], 1.0), p["w"])
    return x + rms((jax.nn.gelu(both[0]) * both[1]) @ p["d"], p["g"][3], 1.0)


@layer(
    PADDED,
    {"w": (D, N * H + 2 * H + 2 * F), "o": (N * H, D), "d": (F, D), "g": (2, D)},
    attention=1,
    rms_norm=2,
    gated_linear_unit=1,
)
def all_in_one_product(p: Any, x: Any, m: Any) -> Any:
    """Queries, one head of keys and values, a gate and an up branch."""
    cuts = np.cumsum([N * H, H, H, F])
    q, k, v, gate, up = jnp.split(rms(x, p["g"][0]) @ p["w"], cuts, -1)
    s = jnp.einsum("btnh,bsh->bnts", heads(q), k) * H**-0.5
    s = jnp.where(causal() & m[:, None, None], s, -1e10)
    y = flat(jnp.einsum("bnts,bsh->btnh", jax.nn.softmax(s), v)) @ p["o"]
    return rms(x + y + (jax.nn.silu(gate) * up) @ p["d"], p["g"][1])


@layer(PADDED, {**QKV, "r": (2 * T, N * H), "g": (2, D)}, attention=1, layer_norm=1)
def disentangled(p: Any, x: Any, m: Any) -> Any:
    """Scores of contents, of queries with distances and of keys with distances."""
    q, k, v = (heads(x @ p[name]) for name in "qkv")
    far = p["r"].reshape(2 * T, N, H)
    at = jnp.arange(T)[:, None] - jnp.arange(T) + T
    at = jnp.broadcast_to(at, (B, N, T, T))
    c2p = jnp.take_along_axis(jnp.einsum("btnh,rnh->bntr", q, far), at, -1)
    p2c = jnp.take_along_axis(jnp.einsum("bsnh,rnh->bnsr", k, far), at, -1)
    s = jnp.einsum("btnh,bsnh->bnts", q, k) + c2p + p2c.swapaxes(-1, -2)
    seen = m[:, None, None] & m[:, None, :, None]
    w = jax.nn.softmax(jnp.where(seen, s / (3 * H) ** 0.5, -1e9))
    y = flat(jnp.einsum("bnts,bsnh->btnh", jnp.where(seen, w, 0), v))
    return norm(x + y @ p["o"], *p["g"])


@layer(None, {**QKV, "h": (7, H), "w": (7, H), "g": (2, D)}, attention=1, layer_norm=1)
def by_rows_and_columns(p: Any, x: Any, m: Any) -> Any:
    """Relative positions of an image, apart for rows and columns; folded heads."""
    h = norm(x, *p["g"])
    q, k, v = (
        heads(h @ p[name]).transpose(0, 2, 1, 3).reshape(B * N, T, H) for name in "qkv"
    )
    near = jnp.arange(4)[:, None] - jnp.arange(4) + 3
    at = q.reshape(B * N, 4, 4, H)
    rows = jnp.einsum("bhwc,hkc->bhwk", at, p["h"][near])
    columns = jnp.einsum("bhwc,wkc->bhwk", at, p["w"][near])
    s = ((q * H**-0.5) @ k.swapaxes(-1, -2)).reshape(B * N, 4, 4, 4, 4)
    s = s + rows[..., :, None] + columns[..., None, :]
    y = jax.nn.softmax(s.reshape(B * N, T, T), -1) @ v
    return x + flat(y.reshape(B, N, T, H).transpose(0, 2, 1, 3)) @ p["o"]


@layer(LENGTHS, {**QKV, "s": (N,), "g": (D,)}, attention=1, rms_norm=1)
def sinks_in_a_window(p: Any, x: Any, m: Any) -> Any:
    """A logit per head beside the scores, a window, and lengths."""
    h = rms(x, p["g"])
    q, k, v = (heads(h @ p[name]) for name in "qkv")
    i, j = jnp.arange(T)[:, None], jnp.arange(T)[None]
    seen = ((j <= i) & (i - j < 6))[None] & (j[None] < m[:, None, None])
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
    s = jnp.where(seen[:, None], s, -1e30)
    sink = jnp.broadcast_to(p["s"][None, :, None, None], (B, N, T, 1))
    w = jax.nn.softmax(jnp.concatenate([s, sink], -1))[..., :-1]
    return x + flat(jnp.einsum("bnts,bsnh->btnh", w, v)) @ p["o"]


@layer(PADDED, {**QKV, "g": (2, D)}, attention=1, layer_norm=1)
def blocks_and_those_before(p: Any, x: Any, m: Any) -> Any:
    """Queries of a block see its keys and those of the block before."""
    h, size = norm(x, *p["g"]), 4

    def block(y: Any) -> Any:
        return y.reshape(B, T // size, size, *y.shape[2:])

    def with_before(y: Any) -> Any:
        before = jnp.pad(y, ((0, 0), (1, 0), *((0, 0),) * (y.ndim - 2)))[:, :-1]
        return jnp.concatenate([before, y], 2)

    q, k, v = (block(heads(h @ p[name])) for name in "qkv")
    k, v, m = with_before(k), with_before(v), with_before(block(m))
    s = jnp.einsum("bctnh,bcsnh->bcnts", q, k) * H**-0.5
    seen = jnp.arange(2 * size) <= jnp.arange(size)[:, None] + size
    s = jnp.where(seen & m[:, :, None, None], s, -1e9)
    y = jnp.einsum("bcnts,bcsnh->bctnh", jax.nn.softmax(s), v)
    return x + flat(y.reshape(B, T, N, H)) @ p["o"]


@layer(PACKED, {**QKV, "g": (D,)}, attention=1, rms_norm=1)
def packed_by_starts(p: Any, x: Any, m: Any) -> Any:
    """Documents told apart by where they start."""
    h = rms(x, p["g"])
    first = jnp.concatenate([jnp.ones((B, 1), bool), m[:, 1:] != m[:, :-1]], 1)
    start = lax.cummax(jnp.where(first, jnp.arange(T), 0), axis=1)
    q, k, v = (heads(h @ p[name]) for name in "qkv")
    seen = (start[:, :, None] == start[:, None]) & causal()
    y = jax.nn.dot_product_attention(q, k, v, mask=seen[:, None])
    return x + flat(y) @ p["o"]


def weights_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    made = {k: RANDOM.normal(size=(LAYERS, *s)) for k, s in shapes.items()}
    return {k: (0.2 * a + (k == "g")).astype(np.float32) for k, a in made.items()}


def step_of(name: str, scanned: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A training step of some layers, and its arguments."""
    fn, shapes, data, _ = CASES[name]

    def loss(p: Any, x: Any, m: Any) -> Any:
        if scanned:
            x, _ = lax.scan(lambda x, p: (jax.checkpoint(fn)(p, x, m), None), x, p)
        else:
            for n in range(LAYERS):
                x = fn(jax.tree.map(lambda a, n=n: a[n], p), x, m)
        return (x**2).mean()

    return jax.value_and_grad(loss, (0, 1)), (weights_of(shapes), X, data)


@pytest.mark.parametrize("scanned", [True, False], ids=["scan", "loop"])
@pytest.mark.parametrize("name", CASES)
def test_everything_is_found_with_its_gradients(name: str, scanned: bool) -> None:
    step, args = step_of(name, scanned)
    report = rewriter.explain(step)(*args)
    found = report.counts(repeats=False, backward=True)
    times = 1 if scanned else LAYERS
    wanted = {op: n * times for op, n in CASES[name][3].items()}
    assert {op: n for op, n in found.items() if n} == wanted
    assert not report.failures


@pytest.mark.parametrize("name", ["all_in_one_product", "packed_by_starts"])
def test_numbers_with_kernels_are_those_of_float64(name: str) -> None:
    step, args = step_of(name, True)
    found = rewriter.optimize(step, implementation=FORCED)(*args)
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda a: a.astype(float) if a.dtype == np.float32 else a, args
        )
        wanted = jax.tree.map(np.asarray, jax.jit(step)(*wide))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
