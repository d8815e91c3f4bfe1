"""The equations of a call, in the place of the call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rewriter import _jax


def opened(
    body: Any, operands: Sequence[Any], results: Sequence[Any]
) -> tuple[list[Any], Mapping[Any, Any]] | None:
    """Returns the equations of a body with the variables of the place around it.

    Args:
        body: The body, closed or not.
        operands: The atoms that it is given.
        results: The variables that hold what it returns.

    Returns:
        The equations, and the results that none of them makes, with the atoms that they
        are. None if the body holds constants.
    """
    jaxpr = getattr(body, "jaxpr", body)
    if jaxpr.constvars:
        return None
    names = dict(zip(jaxpr.invars, operands, strict=True))
    made = {v for e in jaxpr.eqns for v in e.outvars}
    for inner, outer in zip(jaxpr.outvars, results, strict=True):
        is_own = not _jax.is_literal(inner) and inner in made
        if is_own and not _jax.is_drop(outer):
            names.setdefault(inner, outer)
    eqns = []
    for eqn in jaxpr.eqns:
        outs = [
            v if _jax.is_drop(v) else names.setdefault(v, _jax.new_var(v.aval))
            for v in eqn.outvars
        ]
        ins = [a if _jax.is_literal(a) else names[a] for a in eqn.invars]
        eqns.append(eqn.replace(invars=ins, outvars=outs))
    read = lambda a: a if _jax.is_literal(a) else names[a]
    pairs = zip(results, map(read, jaxpr.outvars), strict=True)
    return eqns, {v: a for v, a in pairs if a is not v}
