"""Finds the inputs of a program that its comparisons read.

Such inputs are masks, positions, lengths and thresholds. Changing one bit of them may
change the result by more than a rounding. Where nothing but comparisons reads one, and
what they compare is computed alike in every program, no rounding excuses a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxprs_in_params

from rewriter import _jax

DECIDE = frozenset({
    "eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to", "is_finite", "sort",
    "argmax", "argmin", "top_k", "floor", "ceil", "round", "sign", "rem",
})  # fmt: skip

SAME = frozenset({
    "neg", "abs", "max", "min", "clamp", "select_n", "sort", "stop_gradient", "copy",
    "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "rev",
    "slice", "dynamic_slice", "gather", "concatenate", "pad", "reduce_max",
    "reduce_min", "floor", "ceil", "round", "sign", "cummax", "cummin",
})  # fmt: skip
"""What moves and chooses numbers, and rounds none."""

ALONE = frozenset({
    "eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to", "is_finite",
    "argmax", "argmin", "convert_element_type",
})  # fmt: skip
"""What makes booleans and integers of numbers."""

CALLS = frozenset({"jit", "pjit", "closed_call", "checkpoint", "remat2", "core_call"})

SUMS = frozenset({"add", "sub"})
"""Sums of two, which XLA rounds alike in 32 bits and more, but for those of products:
a product and a sum may become one instruction."""


def deciding(program: ClosedJaxpr) -> list[bool]:
    """Returns, for each input, whether a comparison depends on it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> f = lambda x, y: jnp.where(2 * x > 0, y, 0)
        >>> deciding(jax.make_jaxpr(f)(1.0, 1.0))
        [True, False]
    """
    jaxpr = program.jaxpr
    return _body(jaxpr, [False] * len(jaxpr.outvars))


def only_deciding(program: ClosedJaxpr) -> list[bool]:
    """Returns, for each input, whether all that reads it is decided by its exact bits.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> f = lambda x, y, z: jnp.where((x - y >= 0) & (jnp.exp(z) > 1), x, 0)
        >>> only_deciding(jax.make_jaxpr(f)(1.0, 1.0, 1.0))
        [False, True, False]
    """
    jaxpr = program.jaxpr
    rounded = _rounded(jaxpr, [True] * len(jaxpr.outvars))
    return [not r for r in rounded]


def _rounded(body: Any, outs: Sequence[bool]) -> list[bool]:
    """For each input, whether a rounding of it is one of what the program computes."""
    jaxpr = getattr(body, "jaxpr", body)
    marked = {
        v for v, m in zip(jaxpr.outvars, outs, strict=True) if m and not _literal(v)
    }
    summed: set[Any] = set()
    for eqn in reversed(jaxpr.eqns):
        found = _rounded_here(eqn, [v in marked for v in eqn.outvars], summed)
        pairs = zip(eqn.invars, found, strict=True)
        marked.update(a for a, m in pairs if m and not _literal(a))
        if _is_summed(eqn, summed):
            floats = (a for a in eqn.invars if not _literal(a) and _is_float(a))
            summed.update(floats)
    return [v in marked and _is_float(v) for v in jaxpr.invars]


def _rounded_here(eqn: Any, outs: list[bool], summed: set[Any]) -> list[bool]:
    name, count = eqn.primitive.name, len(eqn.invars)
    bodies = list(jaxprs_in_params(eqn.params))
    if len(bodies) == 1 and name in CALLS and len(bodies[0].invars) == count:
        pairs = zip(outs, eqn.outvars, strict=True)
        return _rounded(bodies[0], [m or v in summed for m, v in pairs])
    if not any(_is_float(v) for v in eqn.outvars) and name in ALONE:
        return [False] * count
    return [any(outs) or not _exact(eqn, summed)] * count


def _is_summed(eqn: Any, summed: set[Any]) -> bool:
    """Whether what an equation reads may be part of a sum."""
    name = eqn.primitive.name
    return name not in SAME | ALONE or any(v in summed for v in eqn.outvars)


def _exact(eqn: Any, summed: set[Any]) -> bool:
    """Whether each program that computes this from the same bits gives the same."""
    name, (out, *_) = eqn.primitive.name, eqn.outvars
    if name in SAME or not _is_float(out):
        return name in SAME | ALONE
    wide = jnp.finfo(out.aval.dtype).bits >= 32
    if name == "convert_element_type":
        source = eqn.invars[0].aval.dtype
        return (
            not _is_float(eqn.invars[0]) or out.aval.dtype.itemsize >= source.itemsize
        )
    return wide and (name in SUMS or (name == "mul" and out not in summed))


def _is_float(atom: Any) -> bool:
    return jnp.issubdtype(getattr(atom.aval, "dtype", bool), jnp.inexact)


def _body(body: Any, outs: Sequence[bool]) -> list[bool]:
    jaxpr = getattr(body, "jaxpr", body)
    marked = {
        v for v, m in zip(jaxpr.outvars, outs, strict=True) if m and not _literal(v)
    }
    for eqn in reversed(jaxpr.eqns):
        found = _equation(eqn, [v in marked for v in eqn.outvars])
        pairs = zip(eqn.invars, found, strict=True)
        marked.update(a for a, m in pairs if m and not _literal(a))
    return [v in marked for v in jaxpr.invars]


def _equation(eqn: Any, outs: list[bool]) -> list[bool]:
    count = len(eqn.invars)
    bodies = list(jaxprs_in_params(eqn.params))
    if bodies and eqn.primitive.name != "while":
        return _bodies(bodies, count, outs)
    return [bool(bodies) or any(outs) or _decides(eqn)] * count


def _bodies(bodies: Sequence[Any], count: int, outs: list[bool]) -> list[bool]:
    """For bodies whose inputs are the last operands: all but those of a while loop."""
    marked = [any(outs)] * count
    for body in bodies:
        fits = len(body.outvars) == len(outs) and len(body.invars) <= count
        if not fits:
            return [True] * count
        found = _body(body, [any(outs)] * len(outs) if any(outs) else outs)
        for k, m in enumerate(found, count - len(found)):
            marked[k] = marked[k] or m
    return marked


def _decides(eqn: Any) -> bool:
    """Whether an equation's result is not continuous in its operands."""
    if eqn.primitive.name in DECIDE:
        return True
    dtypes = [getattr(v.aval, "dtype", None) for v in eqn.outvars]
    casts = eqn.primitive.name == "convert_element_type"
    return casts and not jnp.issubdtype(dtypes[0], jnp.inexact)


def _literal(atom: Any) -> bool:
    return _jax.is_literal(atom) or _jax.is_drop(atom)
