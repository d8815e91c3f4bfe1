"""Takes slices of integers out of the loops whose every step makes the same.

    loop over blocks j:                      mine = numbers[i]
      mask(numbers[i], numbers[j])     →     loop over blocks j:
                                               mask(mine, numbers[j])

The segments of a block of queries are often sliced where the mask is made. That is in
the loop over blocks of keys, or in a step that may be skipped. What is computed in
place of the loop reads them outside of it. A slice is little work, and it cannot fail:
a start out of range is moved inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from rewriter import _jax
from rewriter.program.bodies import map_bodies
from rewriter.program.equations import live
from rewriter.program.loops import loop_of, traced
from rewriter.program.prepare.masks_in_loops import OF_MASKS

SLICE = "dynamic_slice"
LOOPS = ("scan", "while")
INSIDE = ("cond", "remat")
"""Bodies in a step that slices are taken out of, too."""

Split = tuple[list[Any], dict[Any, Any], list[Any]]
"""Equations in front of a body, what it is given of their results, and its own."""


def take_slices_out(program: Any) -> Any:
    """Returns a program whose loops slice no integers anew; itself without such loops.

    Args:
        program: The program, closed.
    """
    return map_bodies(program, _changed)


def _changed(body: Any) -> Any:
    """A body with slices in front of its loops; itself without such loops."""
    eqns, found = [], False
    same: dict[Any, Any] = {}
    for eqn in body.eqns:
        read = _jax.reading(eqn, same) if same else eqn
        new = _without_slices(read) if _jax.call_kind(eqn) in LOOPS else None
        if new is None:
            eqns.append(read)
            continue
        found = True
        eqns += new[0]
        same |= new[1]
    if not found:
        return body
    outs = getattr(body, "jaxpr", body).outvars
    outs = [a if _jax.is_literal(a) else same.get(a, a) for a in outs]
    return _jax.with_equations(body, eqns, outs)


def _without_slices(eqn: Any) -> tuple[list[Any], Mapping[Any, Any]] | None:
    """A loop with slices in front, and new names of its results; None without such."""
    if _jax.call_kind(eqn) == "scan":
        body, n_consts, _, _ = _jax.scan_parts(eqn)
        atoms = eqn.invars[:n_consts]
    else:
        body, start, n_consts = _jax.while_parts(eqn)
        atoms = eqn.invars[start : start + n_consts]
    if eqn.effects or not _has_slices(body):
        return None
    inputs = getattr(body, "jaxpr", body).invars[:n_consts]
    front, given, eqns = _split(body, dict(zip(inputs, atoms, strict=True)))
    if not given:
        return None
    new = _given(body, given, eqns)
    if _jax.call_kind(eqn) == "while":
        return [*front, _jax.with_constants_first(eqn, [new], [*given.values()])], {}
    loop = loop_of(0, eqn)
    closed = new if hasattr(new, "consts") else ClosedJaxpr(new, ())
    step = lambda whole, carry, x: _jax.inlined(closed, [*whole, *carry, *x])
    consts, carry = [*given.values(), *atoms], eqn.invars[n_consts : loop.first]
    made, results = traced(loop, consts, carry, loop.xs, step)
    return [*front, *made], dict(zip(eqn.outvars, results, strict=True))


def _has_slices(body: Any) -> bool:
    """Whether a body, or a branch in it, slices integers."""
    for eqn in body.eqns:
        if _is_slice(eqn):
            return True
        if _jax.call_kind(eqn) in INSIDE and any(map(_has_slices, _bodies(eqn))):
            return True
    return False


def _bodies(eqn: Any) -> Sequence[Any]:
    """The branches of a cond, or the body of a checkpoint."""
    cond = _jax.call_kind(eqn) == "cond"
    return eqn.params["branches"] if cond else (_jax.call_body(eqn),)


def _split(body: Any, fixed: Mapping[Any, Any]) -> Split:
    """The slices of a body that depend on some inputs alone, and the rest of it.

    Args:
        body: The body.
        fixed: Those inputs, and the atoms around the body that they are.
    """
    known, given = dict(fixed), {}
    front, eqns = [], []
    for eqn in body.eqns:
        inner = _jax.call_kind(eqn) in INSIDE and any(map(_has_slices, _bodies(eqn)))
        for one in _split_inside(eqn, known) if inner else (eqn,):
            if _is_light(one) and all(
                _jax.is_literal(a) or a in known for a in one.invars
            ):
                outs = [_jax.new_var(v.aval) for v in one.outvars]
                ins = [a if _jax.is_literal(a) else known[a] for a in one.invars]
                front.append(one.replace(invars=ins, outvars=outs))
                known.update(zip(one.outvars, outs, strict=True))
                if _is_slice(one):
                    given[one.outvars[0]] = outs[0]
                    continue
            eqns.append(one)
    return live(front, [*given.values()])[0], given, eqns


def _split_inside(eqn: Any, known: Mapping[Any, Any]) -> list[Any]:
    """The slices of the bodies of an equation, and it."""
    first = len(eqn.invars) - len(
        getattr(_bodies(eqn)[0], "jaxpr", _bodies(eqn)[0]).invars
    )
    operands, front, parts = eqn.invars[first:], [], []
    for body in _bodies(eqn):
        inputs = getattr(body, "jaxpr", body).invars
        pairs = zip(inputs, operands, strict=True)
        fixed = {v: a for v, a in pairs if _jax.is_literal(a) or a in known}
        more, given, eqns = _split(body, fixed)
        front += more
        parts.append((body, given, eqns))
    atoms = [a for _, given, _ in parts for a in given.values()]
    if not atoms:
        return [eqn]
    new = []
    for body, given, eqns in parts:
        mine = {a: v for v, a in given.items()}
        names = {mine.get(a) or _jax.new_var(a.aval): a for a in atoms}
        new.append(_given(body, names, eqns))
    if _jax.call_kind(eqn) == "cond":
        return [*front, _jax.with_constants_first(eqn, new, atoms)]
    params = {**eqn.params, _jax.call_body_name(eqn): new[0]}
    return [*front, eqn.replace(invars=[*atoms, *eqn.invars], params=params)]


def _given(body: Any, given: Mapping[Any, Any], eqns: Sequence[Any]) -> Any:
    """A body with other equations, and with further inputs in front."""
    outs = getattr(body, "jaxpr", body).outvars
    return _jax.with_equations(body, live(eqns, outs)[0], outs, first=[*given])


def _is_slice(eqn: Any) -> bool:
    """Whether an equation slices an array of integers or booleans."""
    return eqn.primitive.name == SLICE and _is_whole(eqn.outvars[0].aval)


def _is_light(eqn: Any) -> bool:
    """Whether an equation makes integers or booleans with little work."""
    return (
        eqn.primitive.name in OF_MASKS
        and not eqn.effects
        and all(_is_whole(a.aval) for a in (*eqn.invars, *eqn.outvars))
    )


def _is_whole(aval: Any) -> bool:
    """Whether an array is of booleans or integers."""
    return any(jnp.issubdtype(aval.dtype, kind) for kind in (jnp.bool_, jnp.integer))
