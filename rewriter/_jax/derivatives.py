"""Gradients of code that is traced already, in two short traces.

`jax.vjp` splits each equation into what is known and what is linear in a tangent, with
small traces of its own, and takes five times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters import ad

from rewriter._jax.calls import CALLS, call_body, call_kind
from rewriter._jax.jit import inlined
from rewriter._jax.meshes import trace_flat
from rewriter._jax.programs import part_of
from rewriter._jax.values import consts_of, is_literal


def gradients_of(closed: Any, moving: Sequence[int]) -> Any:
    """The closed jaxpr of a program's gradients, or None if it has loops or branches.

    Its inputs are those of the program and a cotangent, and its results the cotangents
    of some of the inputs. The rules are JAX's own, as in `jax.vjp`.

    Args:
        closed: The program, without constants; it has one result, a float.
        moving: The positions of the inputs, all of them floats.

    Raises:
        NotImplementedError: If JAX has no rule for one of its primitives.
    """
    count = len(closed.in_avals)

    def moved(*given: Any) -> Any:
        primals, tangents = given[:count], given[count:]

        def of(*chosen: Any) -> Any:
            full = list(primals)
            for k, x in zip(moving, chosen, strict=True):
                full[k] = x
            return _evaluated(closed.jaxpr, full)[0]

        return jax.jvp(of, tuple(primals[k] for k in moving), tangents)[1]

    tangents = [closed.in_avals[k] for k in moving]
    forward = without_calls(trace_flat(moved, [*closed.in_avals, *tangents]))
    if forward.consts or any(map(call_kind, forward.jaxpr.eqns)):
        return None
    known, linear = _parts(forward.jaxpr, count)

    def gradients(*given: Any) -> list[Any]:
        *primals, cotangent = given
        at = [*inlined(known, primals), *map(ad.UndefinedPrimal, tangents)]
        found = ad.backward_pass(linear.jaxpr, False, [], at, [cotangent])
        return list(map(ad.instantiate_zeros, found[-len(tangents) :]))

    return trace_flat(gradients, [*closed.in_avals, *closed.out_avals])


def without_calls(closed: Any) -> Any:
    """The closed jaxpr with the bodies of its calls in their places."""
    if not any(e.primitive.name in CALLS for e in closed.jaxpr.eqns):
        return closed
    code = lambda *given: _evaluated(closed.jaxpr, given)
    return trace_flat(code, closed.in_avals)


def _evaluated(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr, with the calls in it inlined."""
    inputs = (*jaxpr.constvars, *jaxpr.invars)
    env = dict(zip(inputs, (*consts_of(jaxpr), *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        ins = [read(a) for a in eqn.invars]
        if eqn.primitive.name in CALLS and (body := call_body(eqn)) is not None:
            outs = _evaluated(body, ins)
        else:
            outs = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(eqn.params))
            outs = outs if eqn.primitive.multiple_results else [outs]
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _parts(jaxpr: Any, count: int) -> tuple[Any, Any]:
    """Two programs: what its tangents do not change, and what is linear in them.

    The results of the first are inputs of the second, before the tangents.

    Args:
        jaxpr: The jaxpr.
        count: The number of its inputs that are no tangents.
    """
    moving = set(jaxpr.invars[count:])
    known, linear = [], []
    for eqn in jaxpr.eqns:
        if moving.isdisjoint(a for a in eqn.invars if not is_literal(a)):
            known.append(eqn)
        else:
            linear.append(eqn)
            moving.update(eqn.outvars)
    atoms = [a for e in linear for a in e.invars] + list(jaxpr.outvars)
    read = dict.fromkeys(a for a in atoms if not is_literal(a) and a not in moving)
    inputs = [*read, *jaxpr.invars[count:]]
    return (
        part_of(jaxpr, jaxpr.invars[:count], known, list(read)),
        part_of(jaxpr, inputs, linear, jaxpr.outvars),
    )
