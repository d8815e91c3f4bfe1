"""Loops that count their steps: scans, and while loops with a counter.

A while loop counts if it carries an integer, and goes on as long as that is below a
bound that the loop does not change. `jax.lax.fori_loop` makes such loops of bounds that
are not numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from rewriter import _jax
from rewriter.program.graph import Node

LOOPS = frozenset({"scan", "while"})
_SWAPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


@dataclass(frozen=True)
class Condition:
    """While loops go on as long as ``counter < bound + more``.

    Attributes:
        counter: Which carry counts.
        bound: The value outside that the counter is compared with, a scalar; None if
            it is compared with a number.
        carried: Which carry holds the bound; None if it is none.
        more: A number.
    """

    counter: int
    bound: int | None
    carried: int | None
    more: int


@dataclass(frozen=True)
class Counted:
    """A loop as its body sees it.

    Attributes:
        body: The jaxpr of a step.
        ins: The body's operands outside: constants, first carries, stacked arrays.
        n_consts: How many of them are constants.
        n_carry: How many of them are carries.
        length: The number of steps; None for a while loop.
        reverse: Whether the last step along stacked arrays comes first.
        condition: Of a while loop.
    """

    body: Any
    ins: tuple[int, ...]
    n_consts: int
    n_carry: int
    length: Any
    reverse: bool
    condition: Condition | None = None


def counted(node: Node) -> Counted | None:
    """The parts of a loop; None if an equation is none, or does not count."""
    if node.prim == "scan":
        body, n_consts, n_carry, length = _jax.scan_parts(node.eqn)
        reverse = bool(node.params["reverse"])
        return Counted(body, node.ins, n_consts, n_carry, length, reverse)
    if node.prim != "while":
        return None
    condition = _condition(node)
    if condition is None:
        return None
    body, n_test, n_consts = _jax.while_parts(node.eqn)
    ins = node.ins[n_test:]
    return Counted(body, ins, n_consts, len(ins) - n_consts, None, False, condition)


def _condition(node: Node) -> Condition | None:
    """The condition of a while loop, if it compares a carry with a bound."""
    _, n_test, n_body = _jax.while_parts(node.eqn)
    test = _jax.while_test(node.eqn)
    *before, last = test.eqns or (None,)
    if last is None or last.primitive.name not in _SWAPPED:
        return None
    if list(test.outvars) != list(last.outvars):
        return None
    known = {v: (k - n_test, 0) for k, v in enumerate(test.invars)}
    for eqn in before:
        moved = _moved(eqn, known)
        if moved is None:
            return None
        known[eqn.outvars[0]] = moved
    one, other = (_sum_of(a, known) for a in last.invars)
    if one is None or other is None:
        return None
    prim = last.primitive.name
    if prim in ("gt", "ge"):
        prim, one, other = _SWAPPED[prim], other, one
    (counter, less), (bound, more) = one, other
    if counter is None or counter < 0:
        return None
    more += int(prim == "le") - less
    if bound is None:
        return Condition(counter, None, None, more)
    if bound < 0:
        return Condition(counter, node.ins[n_test + bound], None, more)
    return Condition(counter, node.ins[n_test + n_body + bound], bound, more)


def _sum_of(atom: Any, known: dict[Any, Any]) -> tuple[int | None, int] | None:
    """(an input, or None, a number) whose sum an integer is."""
    if not _jax.is_literal(atom):
        return known.get(atom)
    whole = jnp.issubdtype(atom.aval.dtype, jnp.integer)
    return (None, int(atom.val)) if whole else None


def _moved(eqn: Any, known: dict[Any, Any]) -> tuple[int | None, int] | None:
    """What an equation gives, if that is an input plus a number."""
    prim, ins = eqn.primitive.name, [_sum_of(a, known) for a in eqn.invars]
    if None in ins:
        return None
    if prim == "convert_element_type":
        same = eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype
        return ins[0] if same else None
    if prim == "add" and None in (ins[0][0], ins[1][0]):
        (one, a), (other, b) = ins
        return (other if one is None else one), a + b
    if prim == "sub" and ins[1][0] is None:
        return ins[0][0], ins[0][1] - ins[1][1]
    return None
