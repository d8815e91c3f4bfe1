"""Splits sums over rows and columns into sums of rows, and the sum of these.

    t = reduce_sum[0 1 2] x        →     r = reduce_sum[2] x      t = reduce_sum[0 1] r
    g = broadcast[2 5 12] c        →     h = broadcast[2 5] c     g = broadcast h
    t = dot_general[0 1 2] x y     →     r = dot_general[2] x y   t = reduce_sum[0 1] r

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
    body = _without_products_of_all(body)
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


def _without_products_of_all(body: Any) -> Any:
    """A body with sums over all of products, and their gradients, over rows first."""
    shapes = {e.invars[0].aval.shape for e in body.eqns if _is_of_all(e)}
    if not shapes:
        return body
    eqns: list[Any] = []
    for eqn in body.eqns:
        if _is_of_all(eqn):
            eqns += _of_rows(eqn)
        elif _is_multiple(eqn, shapes):
            eqns += _multiple(eqn)
        else:
            eqns.append(eqn)
    return _jax.with_equations(body, eqns, getattr(body, "jaxpr", body).outvars)


def _is_multiple(eqn: Any, shapes: set[Shape]) -> bool:
    """Whether an equation multiplies an array of one of some shapes with a number."""
    if eqn.primitive.name != "dot_general" or eqn.params.get("out_sharding"):
        return False
    ins, out = [a.aval for a in eqn.invars], eqn.outvars[0].aval
    alike = {a.dtype for a in ins} == {out.dtype}
    return alike and () in [a.shape for a in ins] and out.shape in shapes


def _multiple(eqn: Any) -> list[Any]:
    """The same, the number for each row first."""

    def code(x: jax.Array, y: jax.Array) -> jax.Array:
        number, array = (x, y) if x.shape == () else (y, x)
        return lax.mul_p.bind(_broadcasts(number, array.shape), array)

    return _by(code, eqn)


def _is_of_all(eqn: Any) -> bool:
    """Whether an equation sums a product of two float arrays over all of their axes."""
    if eqn.primitive.name != "dot_general" or eqn.outvars[0].aval.shape:
        return False
    ((left, right), _), aval = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    placed = eqn.params.get("out_sharding") is not None
    alike = tuple(left) == tuple(right) and len(left) > 1
    dtypes = {aval.dtype, *(a.aval.dtype for a in eqn.invars)}
    floats = len(dtypes) == 1 and jnp.issubdtype(aval.dtype, jnp.floating)
    return alike and floats and not placed


def _of_rows(eqn: Any) -> list[Any]:
    """The same: products summed over the last axis, and the sum of these."""

    def code(x: jax.Array, y: jax.Array) -> jax.Array:
        last = x.ndim - 1
        batch = tuple(range(last))
        dims = ((last,), (last,)), (batch, batch)
        given = {n: eqn.params[n] for n in ("precision", "preferred_element_type")}
        rows = lax.dot_general(x, y, dims, **given)
        return lax.reduce_sum_p.bind(rows, axes=batch, out_sharding=None)

    return _by(code, eqn)


def _by(code: Any, eqn: Any) -> list[Any]:
    """The equations of a function of an equation's operands, with its result."""
    fragment = _jax.trace_placed(code, [a.aval for a in eqn.invars])
    made, _ = inserted(fragment, list(eqn.invars), eqn.source_info)
    return [*made[:-1], made[-1].replace(outvars=list(eqn.outvars))]


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
    return _by(lambda x: code(x, how), eqn)
