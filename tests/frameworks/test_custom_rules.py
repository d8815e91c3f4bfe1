"""Rules of derivatives around and inside of sites: proved, or told of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_batching import custom_vmap

import rewriter
from rewriter.algebra import custom_rules

EVERYWHERE = dict.fromkeys(
    ("attention", "rms_norm", "gated_linear_unit"), "memory_bounded"
)
Function = Callable[..., Any]


def x_of(*shape: int, seed: int = 0) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


def softmax(scale: float = 1.0, stopped: bool = False) -> Function:
    """A softmax that also gives what it is made of, as libraries write it."""

    @jax.custom_jvp
    def f(s: Any) -> Any:
        m = s.max(-1, keepdims=True)
        e = jnp.exp(s - (jax.lax.stop_gradient(m) if stopped else m))
        z = e.sum(-1, keepdims=True)
        return e / z, m[..., 0], z[..., 0]

    @f.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        y, m, z = f(*primals)
        t = tangents[0]
        along = scale * y * (t - (y * t).sum(-1, keepdims=True))
        return (y, m, z), (along, jnp.zeros_like(m), jnp.zeros_like(z))

    return f


def attention(inner: Function) -> Function:
    def f(q: Any, k: Any, v: Any) -> Any:
        w = inner(jnp.einsum("bthd,bshd->bhts", q, k) * 0.25)[0]
        return jnp.einsum("bhts,bshd->bthd", w, v)

    return f


def silu(right: bool) -> Function:
    @jax.custom_jvp
    def f(x: Any) -> Any:
        return x * jax.nn.sigmoid(x)

    @f.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (x,) = primals
        s = jax.nn.sigmoid(x)
        return f(x), tangents[0] * (s * (1 + x * (1 - s)) if right else s)

    return f


def norm(x: Any, gain: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * gain


def ruled_norm(right: bool, again: bool = False, says: bool = False) -> Function:
    """A norm whose backward pass is written by hand."""
    f = jax.custom_vjp(norm)

    def forward(x: Any, gain: Any) -> Any:
        r = jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        return x * r * gain, (x, r, gain)

    def backward(saved: Any, t: Any) -> Any:
        x, r, gain = saved
        if says:
            jax.debug.print("back {}", t.sum())
        n, tg = x * r, t * gain
        along = tg - n * (tg * n).mean(-1, keepdims=True) if right else tg
        return r * along, (t * n).sum(tuple(range(t.ndim - 1)))

    f.defvjp(forward, backward, optimize_remat=again)
    return f


def doubled(right: bool) -> Function:
    f = jax.custom_vjp(lambda x: 2 * x)
    f.defvjp(lambda x: (2 * x, None), lambda _, t: (2 * t if right else 0 * t,))
    return f


PROOFS = {
    "softmax": (lambda right: softmax(1.0 if right else 2.0), (4, 8)),
    "stopped": (lambda right: softmax(1.0 if right else 0.5, True), (4, 8)),
    "silu": (silu, (4, 8)),
    "double": (doubled, (3,)),
    "norm": (
        lambda right: functools.partial(ruled_norm(right), gain=jnp.ones(8)),
        (4, 8),
    ),
}


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("name", PROOFS)
def test_rules_are_proved_or_not(name: str, right: bool) -> None:
    make, shape = PROOFS[name]
    first = lambda x: jax.tree.leaves(make(right)(x))[0]
    found = custom_rules.users_rules(jax.make_jaxpr(first)(jnp.ones(shape)))
    assert len(found) == 1
    assert len(custom_rules.proved(found)) == right


def test_what_is_not_read_need_not_be_right() -> None:
    every = jax.make_jaxpr(lambda x: softmax()(x))(jnp.ones((2, 4)))
    assert not custom_rules.proved(
        custom_rules.users_rules(every)
    )  # that of the maximum is zero


def test_rules_with_effects_are_kept() -> None:
    f = ruled_norm(True, says=True)
    found = custom_rules.users_rules(jax.make_jaxpr(f)(jnp.ones((2, 4)), jnp.ones(4)))
    assert len(found) == 1
    assert not custom_rules.proved(found)


WAYS: dict[str, Callable[[Function], Function]] = {
    "forward": lambda f: f,
    "grad": lambda f: jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1)),
    "jvp": lambda f: lambda *a: jax.jvp(f, a, a),
    "vmap": lambda f: jax.vmap(f, (None,) * 3),
    "remat": lambda f: jax.grad(lambda *a: (jax.checkpoint(f)(*a) ** 2).sum(), (0, 1)),
}
WAYS["vmap"] = lambda f: lambda *a: jax.vmap(f)(*(x[None] for x in a))


def agree(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_proved_rule_inside_of_a_site(way: str, outside: bool) -> None:
    f = attention(softmax())
    args = [x_of(2, 8, 2, 4, seed=i) for i in range(3)]
    fast = functools.partial(rewriter.optimize, implementation=EVERYWHERE, strict=True)
    run = WAYS[way](fast(f)) if outside else fast(WAYS[way](f))
    agree(run(*args), WAYS[way](f)(*args))
    report = rewriter.explain(f, implementation=EVERYWHERE)(*args)
    assert report.counts()["attention"] == 1
    assert not report.misses


def test_a_wrong_rule_is_kept_and_told_of() -> None:
    f = attention(softmax(2.0))
    args = [x_of(2, 8, 2, 4, seed=i) for i in range(3)]
    fast = rewriter.optimize(f, implementation=EVERYWHERE, strict=True)
    loss = lambda f: jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2))
    agree(loss(fast)(*args), loss(f)(*args))
    (miss,) = (m for m in fast.report(*args).misses if m.op == "attention")
    assert "custom_jvp f: a rule of its own" in str(miss.reasons[0])
    assert "test_custom_rules.py" in str(miss.reasons[0])
    assert "attention" in rewriter.explain(f)(*args).why_not("attention")


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("right", [True, False])
def test_a_rule_around_a_site(right: bool, again: bool) -> None:
    f, x, gain = ruled_norm(right, again), x_of(4, 8), x_of(8, seed=1)
    both = lambda f: jax.value_and_grad(lambda x, g: (f(x, g) ** 2).sum(), (0, 1))
    fast = rewriter.optimize(f, implementation=EVERYWHERE, strict=True)
    agree(both(fast)(x, gain), both(f)(x, gain))
    assert [s.op for s in fast.report(x, gain).sites if s.replaced] == ["rms_norm"]
    step = rewriter.optimize(both(f), implementation=EVERYWHERE, strict=True)
    agree(step(x, gain), both(f)(x, gain))


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("transform", ["forward", "grad", "remat", "vmap"])
def test_forward_rules_that_may_be_made_again(again: bool, transform: str) -> None:
    @jax.custom_vjp
    def double(x: Any) -> Any:
        return 2 * x

    double.defvjp(lambda x: (2 * x, None), lambda _, t: (2 * t,), optimize_remat=again)
    args = [x_of(4, 8), x_of(4, 8, seed=1), x_of(4, 8, seed=2)]

    def f(x: Any, y: Any, z: Any) -> Any:
        return double(norm(x, y[0])) * z

    run = WAYS[transform](f)
    fast = rewriter.optimize(run, implementation=EVERYWHERE, strict=True)
    agree(fast(*args), jax.jit(run)(*args))
    assert "rms_norm" in {s.op for s in fast.report().sites if s.replaced}


def test_custom_vmap() -> None:
    f = attention(lambda s: (jax.nn.softmax(s),))
    other = custom_vmap(f)

    @other.def_vmap
    def _(size: int, batched: Any, *args: Any) -> Any:
        axes = [0 if b else None for b in batched]
        return 3 * jax.vmap(f, in_axes=axes)(*args), True

    args = [x_of(2, 8, 2, 4, seed=i) for i in range(3)]
    fast = rewriter.optimize(other, implementation=EVERYWHERE, strict=True)
    agree(fast(*args), f(*args))
    assert fast.report(*args).counts()["attention"] == 1
    stacked = [x[None] for x in args]
    agree(jax.vmap(fast)(*stacked), 3 * f(*args)[None])  # its own rule


def test_a_gated_unit_with_a_rule() -> None:
    def f(act: Function) -> Function:
        return lambda x, a, b: act(x @ a) * (x @ b)

    args = [x_of(8, 8), x_of(8, 16, seed=1), x_of(8, 16, seed=2)]
    for right in (True, False):
        fast = rewriter.optimize(f(silu(right)), implementation=EVERYWHERE)
        run = lambda f: jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2))
        agree(run(fast)(*args), run(f(silu(right)))(*args))
        report = fast.report(*args)
        assert report.counts()["gated_linear_unit"] == right
        told = [m for m in report.misses if "rule of its own" in str(m.reasons)]
        assert len(told) == (not right)
