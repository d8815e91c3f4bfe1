"""What `jax.jit` promises beside a result: one program for each promise.

A program is a function of ``jit`` that returns what a caller can see: results, what was
deleted, the order of side effects. It raises what a caller would. Each holds an RMS
norm that a kernel computes, and gives the same under `rewriter.optimize`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import rewriter
from tests.support.programs import FORCED, rms_norm

X = jnp.linspace(-1, 2, 64).reshape(4, 16)
SCALE = 1 + jnp.arange(16) / 16
CONTRACTS: dict[str, Callable[[Any], Any]] = {}


def contract(program: Callable[[Any], Any]) -> Callable[[Any], Any]:
    CONTRACTS[program.__name__] = program
    return program


def norm(x: Any) -> Any:
    return rms_norm(x, SCALE)


@contract
def static_argument_counts_from_the_end(jit: Any) -> Any:
    return jit(lambda x, n: norm(x) * n, static_argnums=-1)(X, 3)


@contract
def static_argument_that_is_not_there(jit: Any) -> Any:
    return jit(norm, static_argnums=5)(X)


@contract
def static_argument_without_a_hash(jit: Any) -> Any:
    return jit(lambda x, n: norm(x) * n[0], static_argnums=1)(X, [3])


@contract
def static_function_and_keyword(jit: Any) -> Any:
    def f(x: Any, *, how: Any = jnp.tanh) -> Any:
        return how(norm(x))

    g = jit(f, static_argnames="how")
    return g(X), g(X, how=jnp.sin)


@contract
def donated_by_name(jit: Any) -> Any:
    x = X + 0
    out = jit(rms_norm, donate_argnames=("x",))(x=x, scale=SCALE)
    return out, x.is_deleted()


@contract
def donated_but_not_read(jit: Any) -> Any:
    x = X + 0
    f = jit(lambda x, y: norm(y), donate_argnums=0, keep_unused=True)
    return f(x, X), x.is_deleted()


@contract
def donated_twice(jit: Any) -> Any:
    x = X + 0
    return jit(lambda x, y: norm(x) + y, donate_argnums=0)(x, x)


@contract
def arguments_that_are_results(jit: Any) -> Any:
    return jit(lambda x: (x, norm(x), x))(X)


@contract
def numbers_known_while_tracing(jit: Any) -> Any:
    def f(x: Any) -> Any:
        with jax.ensure_compile_time_eval():
            scale = norm(jnp.ones((1, 16)))
            assert float(scale[0, 0]) > 0
        return rms_norm(x, scale[0])

    return jit(f)(X)


@contract
def strict_promotion_of_dtypes(jit: Any) -> Any:
    with jax.numpy_dtype_promotion("strict"):
        return jit(jax.grad(lambda x: norm(x).sum()))(X)


@contract
def ranks_that_may_not_be_promoted(jit: Any) -> Any:
    with jax.numpy_rank_promotion("raise"):
        return jit(norm)(X)


@contract
def guarded_transfers(jit: Any) -> Any:
    with jax.transfer_guard("disallow"):
        return jit(rms_norm)(X, SCALE)


@contract
def leaked_tracer(jit: Any) -> Any:
    leaked: list[Any] = []
    jit(lambda x: (leaked.append(x), norm(x))[1])(X)
    return leaked[0] + 1


@contract
def no_leak_that_is_ours(jit: Any) -> Any:
    with jax.checking_leaks():
        return jit(jax.grad(lambda x: (norm(x) ** 2).sum()))(X)


@contract
def callbacks_keep_their_order(jit: Any) -> Any:
    seen: list[float] = []

    def f(x: Any) -> Any:
        for _ in range(2):
            x = norm(x)
            io_callback(lambda s: seen.append(round(float(s), 3)), None, x.sum(),
                        ordered=True)  # fmt: skip
        return x

    out = jit(f)(X)
    jax.effects_barrier()
    return out, seen


@contract
def callbacks_of_one_branch(jit: Any) -> Any:
    seen: list[int] = []

    def told(x: Any) -> Any:
        jax.debug.callback(lambda: seen.append(1))
        return norm(x)

    f = jit(lambda p, x: lax.cond(p, told, lambda x: norm(2 * x + 1), x))
    out = f(True, X), f(False, X)
    jax.effects_barrier()
    return out, seen


@contract
def results_of_a_callback_between(jit: Any) -> Any:
    def f(x: Any) -> Any:
        kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return norm(jax.pure_callback(lambda a: np.asarray(a) * 2, kind, norm(x)))

    return jit(f)(X)


@contract
def fwd_of_a_rule_that_returns_something_else(jit: Any) -> Any:
    @jax.custom_vjp
    def f(x: Any) -> Any:
        return norm(x)

    f.defvjp(lambda x: (norm(x) + 1, x), lambda x, g: (g * x,))
    of = jax.value_and_grad(lambda x: f(x).sum())
    return jit(f)(X), jit(of)(X), jax.value_and_grad(lambda x: jit(f)(x).sum())(X)


@contract
def batching_rule_that_returns_something_else(jit: Any) -> Any:
    @jax.custom_batching.custom_vmap
    def f(x: Any) -> Any:
        return norm(x)

    f.def_vmap(lambda size, batched, x: (norm(x) + 7, True))
    return jit(f)(X), jit(jax.vmap(f))(X), jax.vmap(jit(f))(X)


@contract
def transpose_that_is_not_the_derivative(jit: Any) -> Any:
    def f(x: Any) -> Any:
        rule = lambda r, t: t * r, lambda r, t: 9 * t * r
        return jax.custom_derivatives.linear_call(*rule, SCALE, norm(x)).sum()

    return jit(jax.grad(f))(X), jax.grad(jit(f))(X)


@contract
def executable_of_other_shapes(jit: Any) -> Any:
    compiled = jit(norm).lower(X).compile()
    np.testing.assert_allclose(compiled(X), norm(X), rtol=1e-5)
    return compiled(X[:1])


def outcome(program: Callable[[Any], Any], jit: Any) -> Any:
    """What a program returns, or the error that it raises."""
    try:
        return program(jit)
    except Exception as error:
        return error


@pytest.mark.parametrize("name", CONTRACTS)
def test_as_under_jit(name: str) -> None:
    made: list[Any] = []

    def optimize(f: Any, **options: Any) -> Any:
        made.append(rewriter.optimize(f, implementation=FORCED, **options))
        return made[-1]

    want = outcome(CONTRACTS[name], jax.jit)
    got = outcome(CONTRACTS[name], optimize)
    if isinstance(want, Exception):
        assert type(got) is type(want)
        ours, theirs = (str(e).splitlines()[0].split(" at 0x")[0] for e in (got, want))
        assert ours == theirs
        return
    assert not isinstance(got, Exception), got
    assert any(site.replaced for f in made for site in f.report().sites)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for ours, theirs in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
