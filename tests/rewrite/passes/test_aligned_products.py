"""Large 16-bit products of odd sizes are padded on GPUs, and on nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter
from rewriter.ops import device
from rewriter.ops.device import Device
from rewriter.rewrite.passes import aligned_products
from rewriter.rewrite.passes.aligned_products import PASS

pytestmark = pytest.mark.once

H100 = device.named("h100")
N, K, V = 8192, 768, 50257
Case = tuple[Callable[..., Any], tuple[Any, ...]]


def like(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


X, W, TABLE, D = like(N, K), like(K, V), like(V, K), like(N, V)
WIDE = {"preferred_element_type": jnp.float32}


def padded(fn: Callable[..., Any], *args: Any, on: Device = H100) -> list[Any]:
    return [a.sizes for a in PASS(jax.make_jaxpr(fn)(*args), on)[1]]


def stacked(x, w):
    return lax.scan(lambda c, part: (c, (part @ w).sum()), 0.0, x)[1]


PADDED: dict[str, Case] = {
    "product": (lambda x, w: (x @ w).max(-1), (X, W)),
    "wide": (lambda x, w: jnp.matmul(x, w, **WIDE).max(-1), (X, W)),
    "float16": (lambda x, w: (x @ w).max(-1), (like(N, K, dtype="float16"),
                                               like(K, V, dtype="float16"))),
    "of a table": (lambda x, w: (x @ w.T).max(-1), (X, TABLE)),
    "einsum of a table": (lambda x, w: jnp.einsum("bd,vd->bv", x, w).sum(), (X, TABLE)),
    "rows of batches": (lambda x, w: (x @ w).max(-1), (like(8, 1024, K), W)),
    "of rows' gradient": (lambda d, w: jnp.exp(d) @ w.T, (D, W)),
    "of weights' gradient": (lambda x, d: x.T @ jnp.exp(d), (X, D)),
    "of a table's gradient": (lambda x, d: jnp.einsum("nv,nk->vk", jnp.exp(d), x),
                              (X, D)),
    "summed": (lambda x, w: jnp.exp(x) @ w, (like(N, 8191), like(8191, K))),
    "in a loop": (stacked, (like(2, N, K), W)),
    "in a jit": (lambda x, w: jax.jit(lambda x: (x @ w).sum())(x), (X, W)),
    "in a branch": (lambda x, w: lax.cond(x[0, 0] > 0, lambda: (x @ w).sum(),
                                          lambda: x[0, 0]), (X, W)),
    "checkpointed": (lambda x, w: jax.checkpoint(lambda x: (x @ w).sum())(x), (X, W)),
}  # fmt: skip
RETURNED: dict[str, Case] = {
    "logits": (lambda x, w: x @ w, (X, W)),
    "with a bias": (lambda x, w, b: x @ w + b, (X, W, like(V))),
    "wide": (lambda x, w: jnp.matmul(x, w, **WIDE), (X, W)),
    "cast": (lambda x, w: (x @ w).astype("float32") * 2, (X, W)),
    "in another shape": (lambda x, w: (x @ w).reshape(8, -1, V), (X, W)),
    "by a jit inside": (lambda x, w: jax.jit(jnp.dot)(x, w).max(), (X, W)),
    "read by another product": (lambda x, w: (x @ w) @ w.T, (X, W)),
    "of a given cotangent": (lambda d, w: d @ w.T, (D, W)),
    "of given summed rows": (lambda x, w: x @ w, (like(N, 8191), like(8191, K))),
    "of a cotangent that stays": (lambda d, w: ((e := jnp.exp(d)) @ w.T, e), (D, W)),
    "to wide weights": (lambda x, w: (x @ w).sum(-1),
                        (like(N, 2048), like(2048, 3001))),
}  # fmt: skip
"""Padding would take a large array more."""

LEFT: dict[str, Case] = {
    **RETURNED,
    "aligned": (lambda x, w: (x @ w).max(-1), (X, like(K, 50304))),
    "odd rows": (lambda x, w: (x @ w).max(-1), (like(N - 1, K), like(K, 50304))),
    "float32": (lambda x, w: (x @ w).max(-1), (like(N, K, dtype="float32"),
                                               like(K, V, dtype="float32"))),
    "mixed": (lambda x, w: jnp.matmul(x, w).max(-1), (X, like(K, V, dtype="float32"))),
    "small": (lambda x, w: (x @ w).max(-1), (like(64, 64), like(64, 33))),
    "few rows": (lambda x, w: (x @ w).max(-1), (like(8, K), W)),
    "batched": (lambda x, w: (x @ w).max(-1), (like(64, 577, 64), like(64, 64, 577))),
    "heads": (lambda x, w: jnp.einsum("nk,khd->nhd", x, w).max(-1),
              (X, like(K, 48, 20))),
    "integers": (lambda x, w: (x @ w).max(-1), (like(N, K, dtype="int16"),
                                                like(K, V, dtype="int16"))),
}  # fmt: skip


@pytest.mark.parametrize("name", PADDED)
def test_products_that_are_padded(name: str) -> None:
    fn, args = PADDED[name]
    assert padded(fn, *args)


@pytest.mark.parametrize("name", LEFT)
def test_products_that_stay(name: str) -> None:
    fn, args = LEFT[name]
    program = jax.make_jaxpr(fn)(*args)
    after, found = PASS(program, H100)
    assert not found
    assert after is program


@pytest.mark.parametrize("on", [device.named("tpu_v5e"), Device("cpu", "cpu"),
                                Device("some GPU", "cuda")])  # fmt: skip
def test_other_devices_pad_nothing(on: Device) -> None:
    assert not padded(*PADDED["product"][:1], X, W, on=on)


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products are padded too."""
    monkeypatch.setattr(aligned_products, "GAIN", 1e9)
    monkeypatch.setattr(aligned_products, "LEAST_S", -1e9)
    monkeypatch.setattr(aligned_products._Body, "_more_memory", lambda *_: 0.0)


SMALL: dict[str, Case] = {
    "product": (lambda x, w: x @ w, (like(5, 16), like(16, 9))),
    "both odd": (lambda x, w: x @ w, (like(5, 11), like(11, 13))),
    "table": (lambda x, w: x @ w.T, (like(2, 5, 16), like(21, 16))),
    "contracting rows": (lambda x, w: x.T @ w, (like(6, 11), like(6, 13))),
    "two axes": (lambda x, w: jnp.einsum("bsx,bsy->xy", x, w),
                 (like(2, 3, 9), like(2, 3, 17))),
    "vector": (lambda x, w: x @ w, (like(11), like(11, 17))),
    "of a vector": (lambda x, w: x @ w, (like(5, 11), like(11))),
    "scanned": (stacked, (like(3, 4, 16), like(16, 11))),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_numbers_and_gradients(name: str, any_size: None) -> None:
    fn, args = SMALL[name]
    draw = np.random.default_rng(0)
    given = [jnp.asarray(draw.normal(size=a.shape), a.dtype) for a in args]
    closed, found = PASS(jax.make_jaxpr(fn)(*given), H100)
    assert found
    after = lambda *a: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *a)[0]

    def both(f):
        out, back = jax.vjp(f, *given)
        weights = jnp.cos(jnp.arange(out.size, dtype="float32")).reshape(out.shape)
        return [out, *back(weights.astype(out.dtype))]

    got, want = jax.jit(lambda: (both(after), both(fn)))()
    for g, w in zip(got, want, strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        np.testing.assert_allclose(np.float64(g), np.float64(w), rtol=2e-2, atol=2e-2)


def test_what_is_not_finite_stays_where_it_is(any_size: None) -> None:
    x = jnp.ones((4, 11), jnp.bfloat16).at[1, 2].set(jnp.inf).at[2, 3].set(jnp.nan)
    w = jnp.ones((11, 13), jnp.bfloat16).at[5, 6].set(-jnp.inf)
    closed, _ = PASS(jax.make_jaxpr(jnp.dot)(x, w), H100)
    (got,) = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, x, w)
    np.testing.assert_array_equal(np.float32(got), np.float32(x @ w))


def test_whole_programs() -> None:
    """Forward, and a loss with its gradients: three products, told in the report."""

    def model(x, w, v):
        return jnp.tanh(x @ w) @ v

    def loss(x, w, v):
        return (model(x, w, v).astype("float32") ** 2).mean()

    args = like(N, K), like(K, 6001), like(6001, K)
    with rewriter.config(target="h100"):
        report = rewriter.explain(model)(*args)
        assert [a.sizes for a in report.changes] == [((6001, 6016),)] * 2
        assert "padded from 6001 to 6016" in str(report)
        report = rewriter.explain(jax.value_and_grad(loss, (0, 1, 2)))(*args)
        assert len(report.changes) == 4  # two have little memory beside the weights
    off = (
        {"numerics": "strict"},
        {"disable": ("aligned_products",)},
        {"patterns": "none"},
    )
    for options in ({}, *off):
        with rewriter.config(**({"target": "h100"} if options else {}), **options):
            report = rewriter.explain(model)(*args)
        assert not report.changes
        assert report.after is report.before
