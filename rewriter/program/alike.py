"""Writes equal what equal layers compute in equal ways.

JAX traces a function with a rule for its derivative anew for each call, so that the
calls of two layers have other parameters. And a layer may take its own row of an array
that holds one number only, as of a mask of heads that was not given:

    rows = broadcast(1)                  rows = broadcast(1)
    layer(k): row = rows[k]      →       layer(k): row = rows[0]
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from rewriter import _jax
from rewriter.program.contents import contents_of
from rewriter.program.repeats import same_params

KEEPING = frozenset(
    {"broadcast_in_dim", "copy", "convert_element_type", "reshape", "squeeze", "slice"}
)
"""What gives one number everywhere, if its operand is one number everywhere."""

CHANGED = frozenset({"slice", "custom_jvp_call"})
"""The primitives of equations that may be written in another way."""


def written_alike(jaxpr: Any) -> Any:
    """Returns the program with equal equations in equal layers; itself without such.

    Calls of JAX's own functions with a rule share one set of parameters, if their
    bodies are equal and the rule is the same.

    Args:
        jaxpr: The program.
    """
    held, changed = contents_of(jaxpr), dict[int, Any]()  # by an equation's identity
    if held.names.isdisjoint(CHANGED):
        return jaxpr
    even: set[Any] = set()  # arrays of one number
    calls: dict[Any, list[Any]] = {}  # by rule
    for eqn in held.named(KEEPING | CHANGED):
        name, new = eqn.primitive.name, eqn
        if name in KEEPING and _is_even(eqn.invars[0], even):
            even.add(eqn.outvars[0])
            new = _first_part(eqn) if name == "slice" else eqn
        elif name == "custom_jvp_call" and (rule := _jax.rule_function(eqn)):
            new = _first(calls.setdefault(rule, []), eqn)
        if new is not eqn:
            changed[id(eqn)] = new
    if not changed:
        return jaxpr
    eqns = [changed.get(id(eqn), eqn) for eqn in jaxpr.eqns]
    return _jax.with_equations(jaxpr, eqns, jaxpr.jaxpr.outvars)


def _is_even(atom: Any, even: Container[Any]) -> bool:
    """Whether an operand is one number everywhere."""
    return not atom.aval.shape or (atom.__class__ is _jax.Var and atom in even)


def _first_part(eqn: Any) -> Any:
    """A slice of an array of one number, as that of its first entries."""
    shape = tuple(eqn.outvars[0].aval.shape)
    start = (0,) * len(shape)
    places = {"start_indices": start, "limit_indices": shape, "strides": None}
    return eqn.replace(params={**eqn.params, **places})


def _first(seen: list[Any], eqn: Any) -> Any:
    """A call with the parameters of the first one like it."""
    for first in seen:
        if _same_call(first, eqn):
            return eqn.replace(params=first.params)
    seen.append(eqn)
    return eqn


def _same_call(first: Any, eqn: Any) -> bool:
    bodies = "call_jaxpr", "jvp_jaxpr_fun"
    rest = [
        {k: v for k, v in e.params.items() if k not in bodies} for e in (first, eqn)
    ]
    return same_params(*rest) and _same_body(*map(_jax.call_body, (first, eqn)))


def _same_body(first: Any, second: Any) -> bool:
    """Whether two bodies without constants compute the same by equal equations."""
    one, two = (getattr(body, "jaxpr", body) for body in (first, second))
    if one.constvars or two.constvars or len(one.eqns) != len(two.eqns):
        return False
    places = [_places(body) for body in (one, two)]
    types = [[v.aval for v in body.invars] for body in (one, two)]
    return types[0] == types[1] and all(
        a.primitive is b.primitive
        and same_params(a.params, b.params)
        and _same_atoms(a.invars, b.invars, places)
        for a, b in zip(one.eqns, two.eqns, strict=True)
    ) and _same_atoms(one.outvars, two.outvars, places)  # fmt: skip


def _places(body: Any) -> dict[Any, int]:
    made = [v for eqn in body.eqns for v in eqn.outvars]
    return {v: k for k, v in enumerate([*body.invars, *made])}


def _same_atoms(first: Any, second: Any, places: list[dict[Any, int]]) -> bool:
    if len(first) != len(second):
        return False
    for a, b in zip(first, second, strict=True):
        if _jax.is_literal(a) or _jax.is_literal(b):
            if not (
                _jax.is_literal(a) and _jax.is_literal(b) and _jax.same_literal(a, b)
            ):
                return False
        elif places[0][a] != places[1][b]:
            return False
    return True
