"""Splits sums over rows and columns into sums of rows, and the sum of these.

    t = reduce_sum[0 1 2] x        →     r = reduce_sum[2] x      t = reduce_sum[0 1] r
    g = broadcast[2 5 12] c        →     h = broadcast[2 5] c     g = broadcast h

A loss is often written as one sum over all that there is. Then no value of the program
holds the loss of each row, nor its cotangent. XLA joins both sums again, and both
broadcasts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rewriter import _jax
from rewriter.program.bodies import map_bodies
from rewriter.program.loops import inserted

Shape = tuple[Any, ...]


def split(program: Any) -> Any:
    """Returns a program whose sums give sums of rows first; itself without such sums.

    Args:
        program: The program, closed.
    """
    return map_bodies(program, _split)


def _split(body: Any) -> Any:
    """A body with its sums, and broadcasts of their cotangents, in two steps."""
    shapes = {e.invars[0].aval.shape for e in body.eqns if _is_of_rows_too(e)}
    if not shapes:
        return body
    eqns: list[Any] = []
    for eqn in body.eqns:
        if _is_of_rows_too(eqn):
            eqns += _in_two(eqn, _sums, eqn.params["axes"])
        elif _is_of_one_number(eqn, shapes):
            eqns += _in_two(eqn, _broadcasts, eqn.outvars[0].aval.shape)
        else:
            eqns.append(eqn)
    return _jax.with_equations(body, eqns, getattr(body, "jaxpr", body).outvars)


def _is_of_rows_too(eqn: Any) -> bool:
    """Whether an equation sums floats over the last axis and others."""
    if eqn.primitive.name != "reduce_sum":
        return False
    aval, axes = eqn.invars[0].aval, eqn.params["axes"]
    floats = jnp.issubdtype(aval.dtype, jnp.floating)
    placed = eqn.params.get("out_sharding") is not None
    return floats and not placed and len(axes) > 1 and len(aval.shape) - 1 in axes


def _is_of_one_number(eqn: Any, shapes: set[Shape]) -> bool:
    """Whether an equation broadcasts a number to one of some shapes."""
    if eqn.primitive.name != "broadcast_in_dim" or len(eqn.invars) != 1:
        return False
    if eqn.params.get("sharding") is not None or eqn.invars[0].aval.shape:
        return False
    return eqn.outvars[0].aval.shape in shapes


def _sums(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    last = x.ndim - 1
    rows = lax.reduce_sum_p.bind(x, axes=(last,), out_sharding=None)
    rest = tuple(a for a in axes if a != last)
    return lax.reduce_sum_p.bind(rows, axes=rest, out_sharding=None)


def _broadcasts(x: jax.Array, shape: Shape) -> jax.Array:
    rows = lax.broadcast_in_dim(x, shape[:-1], ())
    return lax.broadcast_in_dim(rows, shape, range(len(shape) - 1))


def _in_two(eqn: Any, code: Any, how: Any) -> list[Any]:
    """The equations of a function that computes what an equation does."""
    (atom,), (out,) = eqn.invars, eqn.outvars
    fragment = _jax.trace_placed(lambda x: code(x, how), [atom.aval])
    made, _ = inserted(fragment, [atom], eqn.source_info)
    return [*made[:-1], made[-1].replace(outvars=[out])]
