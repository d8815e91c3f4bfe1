"""A user may give a function of JAX a derivative rule of their own: it is kept.

`jax.custom_jvp(jnp.tanh)` is traced of JAX's code, as `jax.nn.relu` is. Only the rule
tells that its derivative is not JAX's.
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

DRAW = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return DRAW.normal(size=shape).astype("f4")


X, A, B, G = normal(8, 16), normal(16, 12), normal(16, 12), normal(16)
Q, K, V = (normal(1, 12, 2, 8) for _ in range(3))


def half(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function of JAX whose derivative is said to be half of what it is."""
    own = jax.custom_jvp(f)

    @own.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        out, moved = jax.jvp(f, primals, tangents)
        return out, moved / 2

    return own


def straight(f: Callable[..., Any], *others: Any) -> Callable[..., Any]:
    """A function whose derivative is said to be one, by `defjvps`."""
    own = jax.custom_jvp(f)
    own.defjvps(lambda t, out, x: t, *others)
    return own


def unit(act: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, a, b: act(x @ a) * (x @ b)


def norm(rsqrt: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, g: x * rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g


def attention(
    exp: Callable[..., Any] = jnp.exp, cap: Callable[..., Any] = lambda x: x
) -> Callable[..., Any]:
    def f(q: Any, k: Any, v: Any) -> Any:
        s = cap(jnp.einsum("btnh,bsnh->bnts", q, k) / 3)
        e = exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))
        return jnp.einsum("bnts,bsnh->btnh", e / e.sum(-1, keepdims=True), v)

    return f


def rows(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, a, b: jax.vmap(f, (0, None, None))(x, a, b)


def steps(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, a, b: lax.scan(lambda c, r: (c, f(r, a, b)), 0, x)[1]


SOME = {
    "tanh": (unit(half(jnp.tanh)), (X, A, B)),
    "exp": (attention(half(jnp.exp)), (Q, K, V)),
    "relu by defjvps": (unit(straight(jax.nn.relu)), (X, A, B)),
}
MORE = {
    "silu": (unit(half(jax.nn.silu)), (X, A, B)),
    "logistic": (unit(lambda y: y * half(lax.logistic)(y)), (X, A, B)),
    "rsqrt": (norm(half(lax.rsqrt)), (X, G)),
    "cap": (attention(cap=lambda s: 5 * half(jnp.tanh)(s / 5)), (Q, K, V)),
    "product": (
        lambda x, a, b: jax.nn.silu(half(jnp.matmul)(x, a)) * (x @ b), (X, A, B),
    ),
    "tanh by defjvps": (unit(straight(jnp.tanh)), (X, A, B)),
    "rows": (rows(unit(half(jnp.tanh))), (X, A, B)),
    "steps": (steps(unit(half(jnp.tanh))), (X, A, B)),
    "checkpoint": (jax.checkpoint(unit(half(jnp.tanh))), (X, A, B)),
    "jit": (jax.jit(unit(half(jnp.tanh))), (X, A, B)),
}  # fmt: skip


def gradients(f: Callable[..., Any]) -> Callable[..., Any]:
    def g(*given: Any) -> Any:
        out, pull = jax.vjp(f, *given)
        return pull(jnp.cos(jnp.arange(out.size, dtype="f4")).reshape(out.shape))

    return g


def check(f: Callable[..., Any], given: tuple[Any, ...]) -> None:
    fast = rewriter.optimize(f, implementation=KERNELS)
    wanted, got = jax.jit(lambda *x: (gradients(f)(*x), gradients(fast)(*x)))(*given)
    for a, b in zip(wanted, got, strict=True):
        np.testing.assert_allclose(b, a, 1e-5, 1e-5 * np.abs(a).max())


@pytest.mark.parametrize("name", SOME)
def test_rule_is_kept(name: str) -> None:
    check(*SOME[name])


@pytest.mark.once
@pytest.mark.parametrize("name", MORE)
def test_rule_is_kept_in_other_programs(name: str) -> None:
    check(*MORE[name])


@pytest.mark.parametrize("wrap", [lambda f: f, rows, steps])
def test_functions_of_jax_keep_their_sites(wrap: Callable[..., Any]) -> None:
    f = rewriter.optimize(wrap(unit(jax.nn.relu)), implementation=KERNELS)
    assert any(s.replaced for s in f.report(X, A, B).sites)
