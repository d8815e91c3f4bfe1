"""Finds the inputs of a program that its comparisons read.

Such inputs are masks, positions, lengths and thresholds. Changing one bit of them may
change the result by more than a rounding.
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
