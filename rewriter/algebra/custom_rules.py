"""Proves that a user's own derivative rule is the derivative of its function.

A function with a rule of its own is a closed body: a site must not reach into it, since
the kernel's derivative would replace the rule's. If the rule gives what differentiating
the body gives, as functions of real numbers, the site may be replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun, jaxprs_in_params

from rewriter import _jax
from rewriter.algebra.canonicalize import Evaluator
from rewriter.algebra.normal_form import Algebra
from rewriter.program.graph import Graph

log = logging.getLogger("rewriter.rules")

UNPROVED = (
    "a rule of its own for derivatives is not proved to be the derivative of what it "
    "is for"
)


@dataclass(frozen=True)
class Ruled:
    """An equation with a user's rule.

    Attributes:
        eqn: The equation.
        used: Positions of the results that anything reads.
    """

    eqn: Any
    used: tuple[int, ...]


def users_rules(closed_jaxpr: Any) -> dict[int, list[Ruled]]:
    """Returns the equations with a user's rule, by the id of their bodies.

    Args:
        closed_jaxpr: The program.
    """
    found: dict[int, list[Ruled]] = {}
    for ruled in _ruled_in(closed_jaxpr):
        found.setdefault(id(ruled.eqn.params.get("call_jaxpr")), []).append(ruled)
    return found


def proved(rules: Mapping[int, Sequence[Ruled]]) -> frozenset[int]:
    """Returns the ids of the bodies whose rules are the derivatives.

    Args:
        rules: As `users_rules` gives them.
    """
    return frozenset(k for k, some in rules.items() if all(map(_is_derivative, some)))


def _ruled_in(jaxpr: Any) -> Iterator[Ruled]:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in _jax.BODIES:
            continue
        if _jax.call_kind(eqn) == "custom" and not _jax.is_library_rule(eqn):
            read = _read_in(jaxpr)
            yield Ruled(eqn, tuple(i for i, v in enumerate(eqn.outvars) if v in read))
        for body in jaxprs_in_params(eqn.params):
            yield from _ruled_in(body)


def _read_in(jaxpr: Any) -> set[Any]:
    """The variables that a body reads or returns."""
    read = {a for e in jaxpr.eqns for a in e.invars if not _jax.is_literal(a)}
    return read | {a for a in jaxpr.outvars if not _jax.is_literal(a)}


def _is_derivative(ruled: Ruled) -> bool:
    """Whether differentiating by the rule and without it gives the same forms."""
    name = ruled.eqn.primitive.name
    try:
        if "jvp" in name:
            return _same(ruled, _tangents)
        return "vjp" in name and _same(ruled, _cotangents)
    except Exception as why:  # forms too large, operations without one, a rule's error
        log.debug("the rule of %s is not proved", name, exc_info=why)
        return False


def _same(ruled: Ruled, derivative: Callable[..., Any]) -> bool:
    eqn = ruled.eqn
    avals = [a.aval for a in eqn.invars]
    alg, forms = Algebra(), []
    with_rule = _jax.as_function(eqn)
    without = jaxpr_as_fun(_jax.call_body(eqn))
    for f in (with_rule, without):
        code, shapes = derivative(f, avals, eqn.outvars, ruled.used)
        traced = _jax.trace_flat(code, shapes)
        if traced.effects:
            return False
        graph = Graph(traced, users_rules(traced))  # differentiated already
        top = graph.top
        inputs = [top.env[v] for v in top.jaxpr.invars]
        names = dict(zip(inputs, range(len(inputs)), strict=True))
        ev = Evaluator(graph, alg, expand_all=True, names=names)
        ev.private = True
        outs = [graph.read(top, v) for v in top.jaxpr.outvars]
        if not forms:
            places = [tuple(map(alg.new_index, graph.shape(v))) for v in outs]
        forms.append([ev.poly(v, at) for v, at in zip(outs, places, strict=True)])
    return not any(alg.difference(a, b) for a, b in zip(*forms, strict=True))


def _is_moving(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.floating))


def _tangents(
    f: Callable[..., Any],
    avals: Sequence[Any],
    outs: Sequence[Any],
    used: Sequence[int],
) -> tuple[Callable[..., Any], list[Any]]:
    """Code of results and their tangents, and what it is given."""
    moving = [i for i, a in enumerate(avals) if _is_moving(a)]

    def code(*given: Any) -> list[Any]:
        fixed, moved = given[: len(avals)], given[len(avals) :]

        def of(*chosen: Any) -> list[Any]:
            found = f(*_put(fixed, moving, chosen))
            return [found[i] for i in used if _is_moving(found[i])]

        results, tangents = jax.jvp(of, tuple(fixed[i] for i in moving), moved)
        return [*results, *tangents]

    return code, [*avals, *(avals[i] for i in moving)]


def _cotangents(
    f: Callable[..., Any],
    avals: Sequence[Any],
    outs: Sequence[Any],
    used: Sequence[int],
) -> tuple[Callable[..., Any], list[Any]]:
    """Code of results and of the cotangents of operands, and what it is given."""
    moving = [i for i, a in enumerate(avals) if _is_moving(a)]
    read = [i for i in used if _is_moving(outs[i].aval)]

    def code(*given: Any) -> list[Any]:
        fixed, back = given[: len(avals)], given[len(avals) :]

        def of(*chosen: Any) -> list[Any]:
            found = f(*_put(fixed, moving, chosen))
            return [found[i] for i in read]

        results, function = jax.vjp(of, *(fixed[i] for i in moving))
        return [*results, *function(list(back))]

    return code, [*avals, *(outs[i].aval for i in read)]


def _put(given: Sequence[Any], places: Sequence[int], values: Sequence[Any]) -> Any:
    full = list(given)
    for i, value in zip(places, values, strict=True):
        full[i] = value
    return full
