"""Gradients of code, in two short traces.

`jax.vjp` splits each equation into what is known and what is linear in a tangent, with
small traces of its own, and takes three times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax._src.interpreters import ad

from rewriter._jax.calls import call_kind
from rewriter._jax.meshes import trace_flat
from rewriter._jax.programs import part_of, reading
from rewriter._jax.values import is_literal
from rewriter._jax.without_calls import without_calls


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
    count = len(parts.known.jaxpr.outvars) - 1
    result, *read = parts.known.out_avals
    code = lambda *given: parts.gradients(given[:count], given[count])
    back = trace_flat(code, [*read, result])
    return None if back.consts else _one_after_other(parts.known, back)


def _one_after_other(known: Any, back: Any) -> Any:
    """A program, and one that reads all its results but the first, as one program.

    What the second reads besides are further inputs; the results are the second's.
    """
    first, then = known.jaxpr, back.jaxpr
    values = first.outvars[1:]
    names = dict(zip(then.invars, values, strict=False))
    eqns = [*first.eqns, *(reading(e, names) for e in then.eqns)]
    more = then.invars[len(values) :]
    outs = [a if is_literal(a) else names.get(a, a) for a in then.outvars]
    return part_of(first, [*first.invars, *more], eqns, outs)


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
