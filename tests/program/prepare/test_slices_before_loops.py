"""Slices of integers that every step of a loop makes, taken out of the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun, jaxprs_in_params

from rewriter.program.prepare.slices_before_loops import take_slices_out

STEPS, BLOCK = 3, 4
NUMBERS = jnp.arange(2 * STEPS * BLOCK).reshape(2, -1) // 5
X = jnp.asarray(np.random.default_rng(0).normal(size=(STEPS, BLOCK)), jnp.float32)


def rows(numbers: Any, i: Any) -> Any:
    return lax.dynamic_slice_in_dim(numbers, i * BLOCK, BLOCK, 1)


def added(carry: Any, x: Any, mine: Any) -> Any:
    return carry + jnp.where(mine == 1, x, 0.0).sum()


def scanned(numbers: Any, x: Any, i: Any) -> Any:
    step = lambda c, row: (added(c, row, rows(numbers, i)), None)
    return lax.scan(step, 0.0, x)[0]


def counted(numbers: Any, x: Any, i: Any) -> Any:
    """A while loop, as its bound is a value."""
    step = lambda j, c: added(c, x[j], rows(numbers, i))
    return lax.fori_loop(0, jnp.minimum(i + 1, STEPS), step, 0.0)


def skipped(numbers: Any, x: Any, i: Any) -> Any:
    def step(c: Any, row: Any) -> Any:
        run = lambda c: added(c, row, rows(numbers, i))
        return lax.cond(row.sum() > 0, run, lambda c: c * 2, c), None

    return lax.scan(step, 0.0, x)[0]


def in_both_branches(numbers: Any, x: Any, i: Any) -> Any:
    def step(c: Any, row: Any) -> Any:
        run = lambda c: added(c, row, rows(numbers, i))
        other = lambda c: added(c, 2 * row, rows(numbers, i + 1))
        return lax.cond(row.sum() > 0, run, other, c), None

    return lax.scan(step, 0.0, x)[0]


def recomputed(numbers: Any, x: Any, i: Any) -> Any:
    run = jax.checkpoint(lambda c, row: added(c, row, rows(numbers, i)))
    return lax.scan(lambda c, row: (run(c, row), None), 0.0, x)[0]


def in_two_loops(numbers: Any, x: Any, i: Any) -> Any:
    return lax.map(lambda k: scanned(numbers, x, k + i), jnp.arange(STEPS))


OUTSIDE: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (scanned, counted, skipped, in_both_branches, recomputed, in_two_loops)
}


def of_the_step(numbers: Any, x: Any, i: Any) -> Any:
    step = lambda c, x: (added(c, x[0], rows(numbers, i + x[1])), None)
    return lax.scan(step, 0.0, (x, jnp.arange(STEPS)))[0]


def of_the_carry(numbers: Any, x: Any, i: Any) -> Any:
    step = lambda c, row: ((added(c[0], row, rows(numbers, c[1])), c[1] + 1), None)
    return lax.scan(step, (0.0, i), x)[0][0]


def of_floats(numbers: Any, x: Any, i: Any) -> Any:
    part = lambda: lax.dynamic_slice_in_dim(x, i, 1, 0).sum()
    return lax.scan(lambda c, row: (c + row.sum() * part(), None), 0.0, x)[0]


def without_a_loop(numbers: Any, x: Any, i: Any) -> Any:
    run = lambda: added(0.0, x[0], rows(numbers, i))
    return lax.cond(i > 0, run, lambda: 0.0)


INSIDE: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (of_the_step, of_the_carry, of_floats, without_a_loop)
}


def slices_in_loops(jaxpr: Any, depth: int = 0) -> int:
    """How many equations slice integers of two axes, by the loops around each."""
    found = 0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        aval = eqn.outvars[0].aval if eqn.outvars else None
        integers = aval is not None and jnp.issubdtype(aval.dtype, jnp.integer)
        if name == "dynamic_slice" and integers and aval.ndim == 2:
            found += depth
        for body in jaxprs_in_params(eqn.params):
            found += slices_in_loops(body, depth + (name in ("scan", "while")))
    return found


@pytest.mark.parametrize("name", OUTSIDE)
def test_slices_are_in_front_of_the_loop(name: str) -> None:
    fn = OUTSIDE[name]
    program = jax.make_jaxpr(fn)(NUMBERS, X, jnp.int32(0))
    new = take_slices_out(program)
    before, after = (slices_in_loops(p.jaxpr) for p in (program, new))
    assert before > after == (1 if name == "in_two_loops" else 0)
    for i in (0, 1, 2, 7, -1, -9):  # those out of range are moved inside
        (got,) = jaxpr_as_fun(new)(NUMBERS, X, jnp.int32(i))
        np.testing.assert_allclose(got, fn(NUMBERS, X, jnp.int32(i)), rtol=1e-6)
    assert take_slices_out(new) is new


@pytest.mark.parametrize("name", INSIDE)
def test_others_stay(name: str) -> None:
    program = jax.make_jaxpr(INSIDE[name])(NUMBERS, X, jnp.int32(0))
    assert take_slices_out(program) is program
