"""Gradients of rows that are added, where ids are outside of the table.

With the promise that none is, as in the gradient of `t[i]`, XLA drops such a row. The
row's own gradient, as in second derivatives, is that of the nearest row of the table.
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

V, D, M = 7, 4, 12
DRAW = np.random.default_rng(0)
TABLE = DRAW.normal(size=(V, D)).astype("f4")
ROWS = DRAW.normal(size=(M, D)).astype("f4")
IDS = np.array([0, 3, -1, 6, 7, -9, 3, 40, 1, 0, -7, 100])
MODES = ("promise_in_bounds", "clip", "fill")
PROMISE = lax.GatherScatterMode.PROMISE_IN_BOUNDS


def added(mode: str, ids: Any = IDS) -> Callable[..., Any]:
    return lambda t, r: jnp.sin(t.at[ids].add(r, mode=mode))


def cotangents(mode: str | None) -> Callable[..., Any]:
    """The gradient of a lookup, as a function of the cotangent."""
    return lambda t, r: jax.vjp(lambda t: t.at[IDS].get(mode=mode), t)[1](r)[0]


def tangents(mode: str | None) -> Callable[..., Any]:
    """A second derivative of what is looked up."""
    take = lambda t, r: jnp.sum(jnp.sin(t.at[IDS].get(mode=mode)) * r)
    return lambda t, r: jax.jvp(lambda t: jax.grad(take)(t, r), (t,), (t + 1,))[1]


def on_zeros(mode: Any, ids: Any = IDS) -> Callable[..., Any]:
    return lambda t, r: jax.ops.segment_sum(r, ids, V, mode=mode) * t


SOME: dict[str, Callable[..., Any]] = {
    "gradient of an index": lambda t, r: jax.vjp(lambda t: t[IDS], t)[1](r)[0],
    "promised sums": on_zeros(PROMISE),
    "fill": cotangents("fill"),
}
MORE: dict[str, Callable[..., Any]] = {
    **{f"added {m}": added(m) for m in MODES},
    **{f"gradient {m}": cotangents(m) for m in (*MODES, None)},
    **{f"second derivative {m}": tangents(m) for m in (*MODES, None)},
    "dropped sums": on_zeros(None),
    "of 8 bits": added("promise_in_bounds", IDS.astype("int8")),
    "unsigned": added("promise_in_bounds", IDS.astype("uint32")),
    "of 16 bits": lambda t, r: (
        t.astype(jnp.bfloat16)
        .at[IDS]
        .add(r.astype(jnp.bfloat16), mode="promise_in_bounds")
        .astype("f4")
    ),
    "batches": lambda t, r: jax.vmap(added("promise_in_bounds"))(
        jnp.stack([t, 2 * t]), jnp.stack([r, r])
    ),
    "steps": lambda t, r: lax.scan(
        lambda c, x: (added("promise_in_bounds")(c, x), None), t, jnp.stack([r, r])
    )[0],
}


def gradients(f: Callable[..., Any]) -> Callable[..., Any]:
    def g(*given: Any) -> Any:
        out, pull = jax.vjp(f, *given)
        return pull(jnp.cos(jnp.arange(out.size, dtype="f4")).reshape(out.shape))

    return g


def check(f: Callable[..., Any], off: float = 1e-5) -> None:
    fast = lambda f: rewriter.optimize(f, implementation=KERNELS)
    wanted = jax.jit(lambda *x: (f(*x), gradients(f)(*x), gradients(f)(*x)))
    got = jax.jit(
        lambda *x: (fast(f)(*x), gradients(fast(f))(*x), fast(gradients(f))(*x))
    )
    pairs = zip(wanted(TABLE, ROWS), got(TABLE, ROWS), strict=True)
    for a, b in pairs:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(y, x, off, off), a, b)
    assert any(
        s.op == "embedding" for s in fast(gradients(f)).report(TABLE, ROWS).sites
    )


@pytest.mark.parametrize("name", SOME)
def test_gradients_of_rows(name: str) -> None:
    check(SOME[name])


@pytest.mark.once
@pytest.mark.parametrize("name", MORE)
def test_gradients_of_rows_in_other_programs(name: str) -> None:
    check(MORE[name], 0.02 if name == "of 16 bits" else 1e-5)
