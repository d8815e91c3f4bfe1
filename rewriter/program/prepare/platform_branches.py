"""Takes the branch of other platforms where a program asks for one that is no target.

    p = platform_index[platforms=(("mosaic",), None)]
    y = cond[branches=(a, b)] p x                         →   y = b x

JAX writes some functions twice, such as `jax.numpy.diagonal`: for its own compiler of
kernels, and for all platforms. A program that is rewritten runs on the latter.
"""

from __future__ import annotations

from typing import Any

from rewriter import _jax
from rewriter.program.bodies import map_bodies

NO_TARGETS = frozenset({"mosaic"})
"""Platforms on which no rewritten program runs: compilers of kernels."""

COND = "cond"
"""The primitive that takes one of several branches, which may be named by platforms."""


def take_branches(program: Any) -> Any:
    """Returns a program without choices that are the same on all targets.

    Args:
        program: The program, closed; it is returned itself without such choices.
    """
    return map_bodies(program, _with_taken_branches)


def _with_taken_branches(body: Any) -> Any:
    """A body with the equations of the branches that are taken."""
    taken = {k: _taken(e) for k, e in enumerate(body.eqns) if e.primitive.name == COND}
    if not any(taken.values()):
        return body
    eqns: list[Any] = []
    for k, eqn in enumerate(body.eqns):
        branch = taken.get(k)
        eqns += [eqn] if branch is None else _inlined(eqn, branch)
    return _jax.with_equations(body, eqns, getattr(body, "jaxpr", body).outvars)


def _taken(eqn: Any) -> Any:
    """The branch that all targets take; None if they differ, or it is none."""
    platforms = eqn.params.get("branches_platforms")
    if not platforms:
        return None
    left = [
        branch
        for branch, names in zip(eqn.params["branches"], platforms, strict=True)
        if names is None or not NO_TARGETS.issuperset(names)
    ]
    if len(left) != 1 or left[0].consts:
        return None
    made = {v for e in left[0].eqns for v in e.outvars}
    outs = left[0].jaxpr.outvars
    own = len(set(map(id, outs))) == len(outs)
    whole = own and all(not _jax.is_literal(v) and v in made for v in outs)
    return left[0] if whole else None


def _inlined(eqn: Any, branch: Any) -> list[Any]:
    """The branch's equations, with the values of the choice."""
    jaxpr = branch.jaxpr
    names = dict(zip(jaxpr.invars, eqn.invars[1:], strict=True))
    names |= dict(zip(jaxpr.outvars, eqn.outvars, strict=True))
    found = []
    for e in jaxpr.eqns:
        for v in e.outvars:
            names.setdefault(v, _jax.new_var(v.aval))
        ins = [a if _jax.is_literal(a) else names[a] for a in e.invars]
        found.append(e.replace(invars=ins, outvars=[names[v] for v in e.outvars]))
    return found
