"""Keys of programs: equal for programs with equal equations."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from rewriter import _jax


def written(closed: Any) -> Hashable | None:
    """Returns a key that two programs share only if their equations are equal.

    None for a program with constants, effects, sizes that are no numbers, or parameters
    that cannot be keys. Bodies of loops are equal only to themselves.

    Args:
        closed: The program.

    Example:
        >>> import jax
        >>> same = written(jax.make_jaxpr(lambda x: x * 2)(1.0))
        >>> again = written(jax.make_jaxpr(lambda y: y * 2)(5.0))
        >>> other = written(jax.make_jaxpr(lambda x: x * 3)(1.0))
        >>> same == again, same == other
        (True, False)
    """
    jaxpr = closed.jaxpr
    if closed.consts or closed.effects:
        return None
    number = {v: k for k, v in enumerate(jaxpr.invars)}

    def of(atom: Any) -> Hashable:
        if not _jax.is_literal(atom):
            return number[atom]
        return _type(atom.aval), np.asarray(atom.val).tobytes()

    equations = []
    for eqn in jaxpr.eqns:
        ins = tuple(map(of, eqn.invars))
        for var in eqn.outvars:
            number[var] = len(number)
        outs = tuple(_type(v.aval) for v in eqn.outvars)
        equations.append((eqn.primitive, ins, outs, tuple(eqn.params.items())))
    types = tuple(_type(v.aval) for v in jaxpr.invars)
    key = types, tuple(equations), tuple(map(of, jaxpr.outvars))
    if any(not isinstance(n, int) for shape, *_ in types for n in shape):
        return None
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _type(aval: Any) -> tuple[Any, ...]:
    return aval.shape, aval.dtype, aval.weak_type
