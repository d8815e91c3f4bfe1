"""Under jax.set_mesh sites run wherever they stand, and a failure costs one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import rewriter
from rewriter.errors import RewriterError, RewriterWarning
from rewriter.rewrite.fragments import Fragments

KINDS = [AxisType.Auto, AxisType.Explicit]
kinds = pytest.mark.parametrize("kind", KINDS, ids=["auto", "explicit"])
SPLIT = jax.P("x", None, "y", None)
EVERYWHERE = dict.fromkeys(
    ("attention", "rms_norm", "ragged_dot", "gated_linear_unit"), "memory_bounded"
)


@pytest.fixture
def mesh(kind: AxisType) -> Iterator[Any]:
    mesh = jax.make_mesh((1, 1), ("x", "y"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


def attend(q: Any, k: Any, v: Any) -> Any:
    w = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) * 0.25, -1)
    return jnp.einsum("bhts,bshd->bthd", w, v)


def norm(x: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def arrays(mesh: Any, heads: int = 4, kv: int = 4) -> tuple[Any, ...]:
    shapes = [(2, 64, h, 16) for h in (heads, kv, kv)]
    keys = jax.random.split(jax.random.key(0), 3)
    place = NamedSharding(mesh, SPLIT)
    return tuple(
        jax.device_put(jax.random.normal(k, s), place)
        for k, s in zip(keys, shapes, strict=True)
    )


def agrees(f: Callable[..., Any], sites: int, *args: Any, **options: Any) -> Any:
    fast = rewriter.optimize(f, implementation=EVERYWHERE, strict=True, **options)
    got, want = fast(*args), jax.jit(f)(*args)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), got, want
    )
    assert len([s for s in fast.report(*args).sites if s.replaced]) == sites
    assert str(jax.tree.map(jax.typeof, got)) == str(jax.tree.map(jax.typeof, want))
    return fast


def mapped(mesh: Any, **options: Any) -> Callable[..., Any]:
    return jax.shard_map(attend, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, **options)


def auto(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.sharding.auto_axes(f, out_sharding=SPLIT)


@kinds
@pytest.mark.parametrize("typed", [True, False])
def test_inside_of_shard_map(mesh: Any, typed: bool) -> None:
    f = mapped(mesh, check_vma=typed)
    args = arrays(mesh)
    agrees(lambda q, k, v: norm(f(q, k, v)), 2, *args)
    agrees(jax.value_and_grad(lambda q, k, v: (f(q, k, v) ** 2).sum()), 1, *args)
    fast = rewriter.optimize(attend, implementation=EVERYWHERE, strict=True)
    inside = jax.shard_map(fast, in_specs=SPLIT, out_specs=SPLIT, check_vma=typed)
    np.testing.assert_allclose(jax.jit(inside)(*args), f(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Explicit], ids=["explicit"])
def test_inside_of_auto_axes(mesh: Any) -> None:
    args = arrays(mesh)
    agrees(auto(attend), 1, *args)
    agrees(lambda q, k, v: norm(auto(attend)(norm(q), k, v)), 3, *args)
    agrees(jax.grad(lambda q, k, v: (auto(attend)(q, k, v) ** 2).mean()), 1, *args)
    agrees(lambda *a: jax.lax.scan(lambda c, _: (auto(attend)(c, *a[1:]), None),
                                   a[0], length=2)[0], 1, *args)  # fmt: skip


@kinds
@pytest.mark.parametrize("inside", [True, False])
def test_ragged_dots(mesh: Any, kind: AxisType, inside: bool) -> None:
    x = jax.random.normal(jax.random.key(0), (64, 32))
    w, sizes = jnp.ones((4, 32, 16)), jnp.full((4,), 16, jnp.int32)

    def local(x: Any, w: Any, sizes: Any) -> Any:
        return jax.lax.ragged_dot(x, w, sizes)

    specs = (jax.P("x"), jax.P(), jax.P())
    f = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P("x"))
    if inside:
        agrees(f, 1, jax.device_put(x, NamedSharding(mesh, jax.P("x"))), w, sizes)
    elif kind is AxisType.Explicit:
        split = jax.sharding.auto_axes(local, out_sharding=jax.P())
        agrees(split, 1, x, w, sizes)
    else:
        agrees(local, 1, x, w, sizes)


@pytest.mark.parametrize("kind", [AxisType.Explicit], ids=["explicit"])
@pytest.mark.parametrize("way", ["repeat", "broadcast", "group"])
def test_key_heads_under_an_explicit_mesh(mesh: Any, way: str) -> None:
    def repeated(x: Any, n: int) -> Any:
        if way == "repeat":
            return jnp.repeat(x, n, axis=2, out_sharding=SPLIT)
        b, s, k, d = x.shape
        x = jnp.broadcast_to(x[:, :, :, None], (b, s, k, n, d))
        return x.reshape(b, s, k * n, d, out_sharding=SPLIT)

    def f(q: Any, k: Any, v: Any) -> Any:
        q = norm(q)
        if way != "group":
            return attend(q, repeated(k, 2), repeated(v, 2))
        b, t, _, d = q.shape
        grouped = (b, t, k.shape[2], 2, d)
        q = q.reshape(grouped, out_sharding=jax.P("x", None, "y", None, None))
        w = jax.nn.softmax(jnp.einsum("btkgd,bskd->bkgts", q, k) * 0.25, -1)
        return jnp.einsum("bkgts,bskd->btkgd", w, v)

    agrees(f, 2, *arrays(mesh, heads=4, kv=2))


def test_a_replacement_that_fails_costs_one_site(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Fragments._forward

    def fails(self: Any, splice: Any) -> Any:
        if splice.match.op.name == "attention":
            raise TypeError("no such sharding")
        return real(self, splice)

    def f(q: Any, k: Any, v: Any) -> Any:
        return norm(attend(norm(q), k, v))

    q = jax.random.normal(jax.random.key(0), (2, 8, 2, 16))
    monkeypatch.setattr(Fragments, "_forward", fails)
    fast = rewriter.optimize(f, implementation=EVERYWHERE)
    with pytest.warns(RewriterWarning, match="attention: TypeError: no such sharding"):
        got = fast(q, q, q)
    np.testing.assert_allclose(got, f(q, q, q), rtol=1e-4, atol=1e-5)
    report = fast.report()
    kernels = {(s.op, s.replaced) for s in report.sites}
    assert kernels == {("rms_norm", True), ("attention", False)}
    assert "no such sharding" in str([s.not_chosen for s in report.sites])
    with pytest.raises(RewriterError, match="no such sharding"):
        rewriter.optimize(f, implementation=EVERYWHERE, strict=True)(q, q, q)
