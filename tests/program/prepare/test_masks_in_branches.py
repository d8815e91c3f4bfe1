"""Masks that the branches of a `cond` return are selected in front of their readers."""

from __future__ import annotations

from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rewriter.program.prepare.masks_in_branches import select_masks

T = 24


def causal() -> Any:
    return jnp.tril(jnp.ones((T, T), bool))


def local() -> Any:
    return causal() & ~jnp.tril(jnp.ones((T, T), bool), -3)


def added(kept: Any) -> Any:
    return jnp.where(kept, 0.0, -1e30)


def conds(program: Any) -> int:
    return sum(eqn.primitive.name == "cond" for eqn in program.eqns)


LENGTHS = np.array([[3], [T]])
MASKS = {
    "booleans": lambda i, n: lax.cond(i > 1, local, causal),
    "several": lambda i, n: lax.switch(i, [local, causal, lambda: ~causal()]),
    "numbers": lambda i, n: lax.cond(
        i > 1, lambda: added(local()), lambda: added(causal())
    ),
    "of lengths": lambda i, n: lax.cond(
        i > 1,
        lambda: local() & (jnp.arange(T) < n)[:, None],
        lambda: causal() & (jnp.arange(T) < n)[:, None],
    ),
    "two results": lambda i, n: lax.cond(
        i > 1, lambda: (local(), causal()), lambda: (causal(), ~local())
    ),
}
OTHERS = {
    "a product": lambda i, x: lax.cond(i > 1, lambda: x @ x, lambda: x * 2),
    "an exponential": lambda i, x: lax.cond(i > 1, lambda: jnp.exp(x), lambda: x),
    "numbers of as many": lambda i, x: lax.cond(i > 1, lambda: x + 1, lambda: x),
    "a number beside": lambda i, x: lax.cond(
        i > 1, lambda: (causal(), 1.0), lambda: (local(), 2.0)
    ),
    "a print": lambda i, x: lax.cond(
        i > 1, lambda: (jax.debug.print("local"), local())[1], causal
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_selected(name: str) -> None:
    made = MASKS[name]
    before = jax.make_jaxpr(made)(0, LENGTHS)
    after = select_masks(before)
    assert (conds(before), conds(after)) == (1, 0)
    for i in range(4):
        for got, want in zip(
            jax.tree.leaves(jax.extend.core.jaxpr_as_fun(after)(i, LENGTHS)),
            jax.tree.leaves(made(i, LENGTHS)),
            strict=True,
        ):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_mask_stays_in_its_branch(name: str) -> None:
    before = jax.make_jaxpr(OTHERS[name])(0, np.ones((64, 64), np.float32))
    assert select_masks(before) is before
