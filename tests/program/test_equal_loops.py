"""Loops that a checkpoint runs again have the carries of their first run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rewriter import _jax
from rewriter.program.graph import Graph

pytestmark = pytest.mark.once

X = np.linspace(0.0, 1.0, 12, dtype=np.float32).reshape(3, 4)


def loop(c: Any, x: Any, *, times: float = 2.0, step: Any = jnp.sin) -> Any:
    """The last carry of a loop whose gradient reads what each step gives."""

    def body(carry: Any, row: Any) -> Any:
        at = jnp.arange(4.0)
        return step(carry) * times + row * at, None

    return lax.scan(body, c, x)[0]


def differentiated(first: Callable[..., Any], again: Callable[..., Any]) -> Any:
    """A program with a loop, and another one in a checkpoint's recomputation."""

    @jax.custom_vjp
    def both(c: Any, x: Any) -> Any:
        return first(c, x)

    def backward(saved: Any, t: Any) -> Any:
        return jax.vjp(jax.checkpoint(again), *saved)[1](t)

    both.defvjp(lambda c, x: (first(c, x), (c, x)), backward)
    return jax.make_jaxpr(jax.grad(lambda c, x: both(c, x).sum(), (0, 1)))


def carries(program: Any) -> list[int]:
    """The values that are the last carries of the loops that go forward."""
    nodes = [n for n in Graph(program).nodes if n.prim == "scan"]
    return [n.outs[0] for n in nodes if not n.params["reverse"]]


def test_a_recomputation_has_the_same_carries() -> None:
    program = jax.make_jaxpr(jax.value_and_grad(lambda c, x: loop_again(c, x).sum()))
    first, again = carries(program(X[0], X))
    assert first == again


loop_again = jax.checkpoint(loop)
OTHERS = {
    "factor": lambda c, x: loop(c, x, times=3.0),
    "start": lambda c, x: loop(c + 1, x),
    "rows": lambda c, x: loop(c, x[::-1]),
    "step": lambda c, x: loop(c, x, step=jnp.cos),
    "fewer": lambda c, x: loop(c, x[:2]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_loops_have_their_own(name: str) -> None:
    first, *others = carries(differentiated(loop, OTHERS[name])(X[0], X))
    assert others
    assert first not in others


def test_equal_loops_elsewhere() -> None:
    """Also where the first run is no part of the checkpoint."""
    first, *others = carries(differentiated(loop, loop)(X[0], X))
    assert first in others


def test_loops_in_each_other_read_an_array_at_other_steps() -> None:
    def pairs(x: Any) -> Any:
        return lax.map(lambda a: lax.map(lambda b: jnp.exp(a @ b.T) @ b, x), x)

    loss = lambda x: jnp.sin(jax.checkpoint(pairs)(x)).sum()
    graph = Graph(jax.make_jaxpr(jax.grad(loss))(X[:, None]))
    inner = 0
    for node in (n for n in graph.nodes if n.prim == "scan"):
        (body,) = node.scope.children[node.position]
        scope, around = node.scope, set()
        while scope is not None and scope.kind == "scan":
            around |= own_steps(scope)
            scope = scope.parent
        inner += bool(around)
        assert around.isdisjoint(own_steps(body))
    assert inner >= 2  # forward and backward


def own_steps(body: Any) -> set[int]:
    """What a loop reads step by step."""
    eqn = body.parent.jaxpr.eqns[body.call]
    inner, n_consts, n_carry, _ = _jax.scan_parts(eqn)
    return {body.env[v] for v in inner.jaxpr.invars[n_consts + n_carry :]}
