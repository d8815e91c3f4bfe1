"""Computes masks in front of what reads them, and not in the branches of a choice.

    m = cond[branches=(causal, local)] layer
          ↓
    m = select(layer >= 1, local, causal)

A mask from a branch is an array of booleans of which nothing is known. From a selection
its structure can be read: here that of a window in some layers. Branches of which
others are read as well, and those that compute more than masks, stay.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun, jaxprs_in_params

from rewriter import _jax
from rewriter.program.bodies import map_bodies
from rewriter.program.contents import contents_of
from rewriter.program.loops import inserted
from rewriter.program.prepare.parts_of_masks import LIGHT, MOST, is_smaller

COND = "cond"
CALLS = frozenset({"pjit", "jit", "closed_call", "core_call"})
"""Calls whose bodies may be masks as well; `jax.numpy.tril` is one."""
BRANCHES = 4
"""The most branches, all of which are computed."""


def select_masks(program: Any) -> Any:
    """Returns a program that selects masks which its branches return.

    Args:
        program: The program, closed; it is returned itself if nothing changes.
    """
    return map_bodies(program, _with_selections, wanted=frozenset({COND}))


def _with_selections(body: Any) -> Any:
    chosen = {
        k
        for k, eqn in enumerate(body.eqns)
        if eqn.primitive.name == COND and _is_choice_of_masks(eqn)
    }
    if not chosen:
        return body
    same: dict[Any, Any] = {}
    eqns: list[Any] = []
    for k, eqn in enumerate(body.eqns):
        eqn = _jax.reading(eqn, same)
        if k not in chosen:
            eqns.append(eqn)
            continue
        fragment = _jax.trace_flat(_selected(eqn), [a.aval for a in eqn.invars])
        new, results = inserted(fragment, eqn.invars, eqn.source_info)
        eqns += new
        same |= dict(zip(eqn.outvars, results, strict=True))
    outs = getattr(body, "jaxpr", body).outvars
    outs = [a if _jax.is_literal(a) else same.get(a, a) for a in outs]
    return _jax.with_equations(body, eqns, outs)


def _selected(eqn: Any) -> Any:
    """Code that computes all branches, and selects the results of one."""
    branches = eqn.params["branches"]

    def code(index: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        first, *others = (jaxpr_as_fun(b)(*operands) for b in branches)
        for k, other in enumerate(others):
            taken = index >= k + 1
            first = [
                lax.select(jnp.broadcast_to(taken, a.shape), b, a)
                for a, b in zip(first, other, strict=True)
            ]
        return first

    return code


def _is_choice_of_masks(eqn: Any) -> bool:
    """Whether all that branches return is masks, made of less or of other masks."""
    branches = eqn.params["branches"]
    if eqn.params.get("branches_platforms") or eqn.effects:
        return False
    if len(branches) > BRANCHES or any(branch.consts for branch in branches):
        return False
    index, *operands = eqn.invars
    if _jax.is_on_mesh([a.aval for a in eqn.invars]):
        return False
    if index.aval.shape or not all(_is_mask(v.aval) for v in eqn.outvars):
        return False
    small = [a for a in operands if a.aval.dtype != bool]
    if not all(is_smaller([(a, ()) for a in small], v.aval) for v in eqn.outvars):
        return False
    return all(_is_light(branch.jaxpr, MOST) for branch in branches)


def _is_mask(aval: Any) -> bool:
    """Whether a value may be a mask: booleans, or numbers that are added to scores."""
    if len(getattr(aval, "shape", ())) < 2:
        return False
    return bool(
        jnp.issubdtype(aval.dtype, jnp.floating) or jnp.issubdtype(aval.dtype, bool)
    )


def _is_light(jaxpr: Any, most: int) -> bool:
    """Whether a branch has few equations, all of kinds that make masks."""
    if len(jaxpr.eqns) > most or not contents_of(jaxpr).names <= LIGHT | CALLS:
        return False
    return all(
        _is_light(body, most)
        for eqn in jaxpr.eqns
        if eqn.primitive.name in CALLS
        for body in jaxprs_in_params(eqn.params)
    )
