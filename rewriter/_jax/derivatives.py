"""Gradients of code, in two short traces.

`jax.vjp` splits each equation into what is known and what is linear in a tangent, with
small traces of its own, and takes three times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.interpreters import ad

from rewriter._jax.calls import CALLS, call_body, call_kind
from rewriter._jax.jit import inlined
from rewriter._jax.meshes import trace_flat
from rewriter._jax.programs import part_of
from rewriter._jax.values import consts_of, is_literal


@dataclass(frozen=True, eq=False)
class Linearized:
    """A function's result, and how it moves with some of its arguments.

    Attributes:
        known: The closed jaxpr of the result, and of what `linear` reads.
        linear: The closed jaxpr of the result's tangent, from these values and the
            tangents of the arguments.
    """

    known: Any
    linear: Any

    def gradients(self, read: Sequence[Any], cotangent: Any) -> list[Any]:
        """Returns the arguments' cotangents, by JAX's own rules.

        Args:
            read: The values that `linear` reads.
            cotangent: The result's.

        Raises:
            NotImplementedError: If JAX has no rule for a primitive.
        """
        tangents = self.linear.in_avals[len(read) :]
        at = [*read, *map(ad.UndefinedPrimal, tangents)]
        found = ad.backward_pass(self.linear.jaxpr, True, [], at, [cotangent])
        return list(map(ad.instantiate_zeros, found[len(read) :]))


def linearized(
    code: Callable[..., Any], avals: Sequence[Any], moving: Sequence[int]
) -> Linearized | None:
    """Returns a function in two parts; None if it has loops, branches or constants.

    Args:
        code: A function of arrays, with one result, a float.
        avals: The types of its arguments.
        moving: The positions of those that move, all of them floats.
    """
    count = len(avals)

    def moved(*given: Any) -> Any:
        primals, tangents = given[:count], given[count:]

        def of(*chosen: Any) -> Any:
            full = list(primals)
            for k, x in zip(moving, chosen, strict=True):
                full[k] = x
            return code(*full)

        return jax.jvp(of, tuple(primals[k] for k in moving), tangents)

    both = without_calls(trace_flat(moved, [*avals, *(avals[k] for k in moving)]))
    if both.consts or any(map(call_kind, both.jaxpr.eqns)):
        return None
    return _parts(both.jaxpr, count)


def gradients_of(
    code: Callable[..., Any], avals: Sequence[Any], moving: Sequence[int]
) -> Any:
    """The closed jaxpr of a function's gradients; None where `linearized` is.

    Its inputs are the arguments and a cotangent.
    """
    parts = linearized(code, avals, moving)
    if parts is None:
        return None

    def gradients(*given: Any) -> list[Any]:
        *arrays, cotangent = given
        _, *read = inlined(parts.known, arrays)
        return parts.gradients(read, cotangent)

    return trace_flat(gradients, [*avals, parts.known.out_avals[0]])


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


def _parts(jaxpr: Any, count: int) -> Linearized:
    """The parts of a jaxpr with two results, a value and its tangent.

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
    result, tangent = jaxpr.outvars
    atoms = [*(a for e in linear for a in e.invars), tangent]
    read = dict.fromkeys(a for a in atoms if not is_literal(a) and a not in moving)
    inputs = [*read, *jaxpr.invars[count:]]
    return Linearized(
        part_of(jaxpr, jaxpr.invars[:count], known, [result, *read]),
        part_of(jaxpr, inputs, linear, [tangent]),
    )
