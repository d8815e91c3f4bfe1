"""Choices by platform that are the same on all platforms of rewritten programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from rewriter.program.prepare.platform_branches import take_branches


def conds(program) -> int:
    return str(program).count("cond[")


def test_the_branch_of_all_targets_is_taken() -> None:
    """Values and gradients: a gradient's choice has its index from another call."""
    x = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    for fn in (jnp.diagonal, jax.grad(lambda x: (jnp.diagonal(x) ** 2).sum())):
        program = jax.make_jaxpr(fn)(x)
        taken = take_branches(program)
        assert conds(taken) == 0
        np.testing.assert_array_equal(jaxpr_as_fun(taken)(x)[0], fn(x))


def test_choices_between_targets_stay() -> None:
    def fn(x):
        return lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)

    program = jax.make_jaxpr(fn)(1.0)
    assert take_branches(program) is program
    plain = jax.make_jaxpr(lambda x: lax.cond(x > 0, jnp.sin, jnp.cos, x))(1.0)
    assert take_branches(plain) is plain
