"""Jaxprs with other variables, constants, equations or results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex_core
from jax._src import core
from jax.interpreters import partial_eval

from rewriter._jax.values import is_literal

Var = core.Var


def new_var(aval: Any) -> Any:
    """A new variable."""
    return core.Var(aval)


def reading(eqn: Any, env: Any) -> Any:
    """The equation with its operands replaced by an environment's."""
    for atom in eqn.invars:
        if atom.__class__ is Var and atom in env:
            changed = [a if is_literal(a) else env.get(a, a) for a in eqn.invars]
            return eqn.replace(invars=changed)
    return eqn


def with_atoms(eqn: Any, ins: Sequence[Any], outs: Sequence[Any], source: Any) -> Any:
    """The equation with other operands, results and source info.

    Since 0.11 effects on references name the operand; before, they count operands.
    """
    changed = {"invars": list(ins), "outvars": list(outs), "source_info": source}
    if eqn.effects:
        pairs = zip(eqn.invars, ins, strict=True)
        given = {a: b for a, b in pairs if not is_literal(a)}
        changed["effects"] = {
            e.replace(given[e.input]) if hasattr(e, "input") else e for e in eqn.effects
        }
    return eqn.replace(**changed)


def with_constants(
    closed: Any, constvars: Sequence[Any], invars: Sequence[Any], consts: Sequence[Any]
) -> Any:
    """Returns the closed jaxpr with some of its inputs turned into constants.

    Since 0.12 a closed jaxpr is a jaxpr whose leading inputs carry values;
    before, constvars and invars are two lists. This spelling suits both.
    """
    jaxpr = closed.jaxpr
    both = [*jaxpr.constvars, *constvars]
    return jex_core.ClosedJaxpr(
        jaxpr.replace(constvars=both, invars=list(invars)), consts
    )


def without_constants(closed: Any) -> Any:
    """Returns the closed jaxpr with its constants turned into leading inputs."""
    jaxpr = closed.jaxpr
    if not closed.consts:
        return closed
    both = [*jaxpr.constvars, *jaxpr.invars]
    return jex_core.ClosedJaxpr(jaxpr.replace(constvars=[], invars=both), [])


def with_equations(
    jaxpr: Any,
    eqns: Sequence[Any],
    outvars: Sequence[Any],
    more: Sequence[Any] = (),
    first: Sequence[Any] = (),
) -> Any:
    """A jaxpr with other equations; inputs, constants and effects stay.

    Args:
        jaxpr: The jaxpr.
        eqns: Its new equations.
        outvars: Its new results.
        more: Inputs that are added after its own.
        first: Inputs that are added before its own.
    """
    if _wraps(jaxpr):
        inner = with_equations(jaxpr.jaxpr, eqns, outvars, more, first)
        return jex_core.ClosedJaxpr(inner, jaxpr.consts)
    inputs = {"invars": [*first, *jaxpr.invars, *more]} if more or first else {}
    return jaxpr.replace(eqns=list(eqns), outvars=list(outvars), **inputs)


def with_signature(
    jaxpr: Any, invars: Sequence[Any], eqns: Sequence[Any], outvars: Sequence[Any]
) -> Any:
    """A jaxpr with other inputs, equations and results; constants and effects stay."""
    if _wraps(jaxpr):
        inner = with_signature(jaxpr.jaxpr, invars, eqns, outvars)
        return jex_core.ClosedJaxpr(inner, jaxpr.consts)
    return jaxpr.replace(invars=list(invars), eqns=list(eqns), outvars=list(outvars))


def with_one_variable(closed: Any, same: Mapping[Any, Any]) -> Any:
    """A closed jaxpr without some of its constants.

    Args:
        closed: The closed jaxpr; it has no effects, which count constants.
        same: Maps the variable of each dropped constant to that of a kept one.
    """

    def renamed(atoms: Sequence[Any]) -> list[Any]:
        return [same.get(a, a) if a.__class__ is Var else a for a in atoms]

    jaxpr = closed.jaxpr
    pairs = zip(jaxpr.constvars, closed.consts, strict=True)
    kept = [(v, c) for v, c in pairs if v not in same]
    eqns = [
        e.replace(invars=renamed(e.invars))
        if any(a.__class__ is Var and a in same for a in e.invars)
        else e
        for e in jaxpr.eqns
    ]
    new = jaxpr.replace(
        constvars=[v for v, _ in kept], eqns=eqns, outvars=renamed(jaxpr.outvars)
    )
    return jex_core.ClosedJaxpr(new, [c for _, c in kept])


def part_of(
    jaxpr: Any, invars: Sequence[Any], eqns: Sequence[Any], outvars: Sequence[Any]
) -> Any:
    """The closed jaxpr of some equations; constants that they read are ``invars``."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    names = {"arg_names": ("",) * len(invars), "result_paths": ("",) * len(outvars)}
    new = inner.replace(
        constvars=[],
        invars=list(invars),
        eqns=list(eqns),
        outvars=list(outvars),
        debug_info=inner.debug_info._replace(**names),
    )
    return jex_core.ClosedJaxpr(new, [])


def pruned(closed: Any) -> Any:
    """The closed jaxpr without unread equations, also in its loops."""
    jaxpr = closed.jaxpr
    used = [True] * len(jaxpr.outvars)
    new, _ = partial_eval.dce_jaxpr(jaxpr, used, instantiate=True)
    return jex_core.ClosedJaxpr(new, closed.consts)


def check_types(closed: Any) -> None:
    """Raises an error if equations of a program do not fit together."""
    core.check_jaxpr(closed.jaxpr)


def _wraps(jaxpr: Any) -> bool:
    """Whether a jaxpr is a pair of an open one and constants (jax 0.10)."""
    return getattr(jaxpr, "jaxpr", jaxpr) is not jaxpr
