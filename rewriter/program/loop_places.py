"""Finds the loops around a body, and whether another loop reads all that one stacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewriter import _jax

MOVES = frozenset(
    {"reshape", "transpose", "broadcast_in_dim", "squeeze", "convert_element_type"}
)


def loops_around(scope: Any) -> tuple[Any, ...]:
    """The lengths of the loops around a body, innermost first."""
    lengths = []
    while scope.parent is not None:
        if scope.kind in ("scan", "while"):
            lengths.append((scope.kind, scope.length))
        scope = scope.parent
    return tuple(lengths)


def is_read_whole(scope: Any, eqn: Any) -> bool:
    """Whether another loop reads at each step all that a loop stacks.

    Then both are at different steps: a loop may make the positions of all blocks of
    keys, which one over blocks of queries reads.

    Args:
        scope: The body that the loop is in.
        eqn: A scan.
    """
    eqns, found = scope.jaxpr.eqns, set(eqn.outvars)
    position = next(k for k, e in enumerate(eqns) if e is eqn)
    while True:
        if _reads_whole(eqns[position + 1 :], found):
            return True
        if scope.kind not in ("call", "remat"):
            return False
        left = [k for k, v in enumerate(scope.jaxpr.outvars) if _is_in(v, found)]
        position, scope = scope.call, scope.parent
        eqns = scope.jaxpr.eqns
        found = {eqns[position].outvars[k] for k in left}


def _reads_whole(eqns: Sequence[Any], found: set[Any]) -> bool:
    """Whether a loop among equations is given a value, and not its steps."""
    for eqn in eqns if found else ():
        given = [_is_in(a, found) for a in eqn.invars]
        if not any(given):
            continue
        kind = _jax.call_kind(eqn)
        if kind == "scan":
            _, n_consts, n_carry, _ = _jax.scan_parts(eqn)
            if any(given[: n_consts + n_carry]):
                return True
        elif kind in ("call", "remat"):
            body = _jax.call_body(eqn)
            body = getattr(body, "jaxpr", body)
            pairs = zip(body.invars, given, strict=True)
            if _reads_whole(body.eqns, {v for v, is_given in pairs if is_given}):
                return True
        elif eqn.primitive.name in MOVES:
            found = found | set(eqn.outvars)
    return False


def _is_in(atom: Any, found: set[Any]) -> bool:
    return not _jax.is_literal(atom) and atom in found
