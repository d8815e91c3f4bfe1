"""Edits a `scan` of a body: the same loop with other stacks and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rewriter import _jax

Step = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Sequence[Any]]
"""A loop body: maps constants, carries and slices to new carries and stacked values."""


@dataclass(frozen=True, eq=False)
class Loop:
    """A scan in a body.

    Attributes:
        position: Where it is among the body's equations.
        eqn: Its equation.
        body: Its jaxpr, closed or not.
        n_consts: The number of operands that every turn reads whole.
        n_carry: The number of carries, among operands and among results.
        length: The number of turns.
    """

    position: int
    eqn: Any
    body: Any
    n_consts: int
    n_carry: int
    length: Any

    @property
    def first(self) -> int:
        """The index of the first operand that is read turn by turn."""
        return self.n_consts + self.n_carry

    @property
    def xs(self) -> list[Any]:
        """The operands that are read turn by turn, in the body around."""
        return self.eqn.invars[self.first :]

    @property
    def eqns(self) -> list[Any]:
        """The equations of a turn."""
        return self.body.eqns

    @property
    def inputs(self) -> list[Any]:
        """The body's variables for constants, carries and slices."""
        return getattr(self.body, "jaxpr", self.body).invars

    @property
    def outs(self) -> list[Any]:
        """The body's results: carries, and values to stack."""
        return getattr(self.body, "jaxpr", self.body).outvars


def loop_of(position: int, eqn: Any) -> Loop:
    """Returns the equation of a scan as a `Loop`."""
    return Loop(position, eqn, *_jax.scan_parts(eqn))


def loops_in(body: Any) -> list[Loop]:
    """Returns the scans among a body's own equations."""
    return [loop_of(k, e) for k, e in _jax.of_kind("scan", body.eqns)]


def traced(
    loop: Loop,
    consts: Sequence[Any],
    carry: Sequence[Any],
    xs: Sequence[Any],
    step: Step,
) -> tuple[list[Any], list[Any]]:
    """Traces a loop with another body; returns its equations and result atoms.

    Args:
        loop: The loop that gives length, direction and the user's line.
        consts: Atoms around the loop, which every turn reads.
        carry: Atoms of the initial carries.
        xs: Atoms that it reads turn by turn.
        step: Its body.
    """
    counts = len(consts), len(consts) + len(carry)

    def code(*given: jax.Array) -> list[jax.Array]:
        start = tuple(given[counts[0] : counts[1]])

        def turn(carry: Any, x: Any) -> Any:
            outs = step(given[: counts[0]], carry, x[: len(xs)])
            return tuple(outs[: len(start)]), tuple(outs[len(start) :])

        known = isinstance(loop.length, int)  # JAX counts a symbolic length by what
        turns = () if known else (jnp.arange(loop.length),)  # the loop reads
        last, stacked = jax.lax.scan(
            turn,
            start,
            (*given[counts[1] :], *turns),
            length=loop.length if known else None,
            reverse=loop.eqn.params["reverse"],
            unroll=loop.eqn.params["unroll"],
        )
        return [*last, *stacked]

    atoms = [*consts, *carry, *xs]
    fragment = _jax.trace_placed(code, [a.aval for a in atoms])
    if fragment.constvars:
        raise ValueError("a loop holds constants")
    return inserted(fragment, atoms, loop.eqn.source_info)


def inserted(
    fragment: Any, atoms: Sequence[Any], source: Any
) -> tuple[list[Any], list[Any]]:
    """Returns a fragment's equations with fresh variables, and its results.

    Args:
        fragment: A jaxpr without constants.
        atoms: The atoms of its inputs.
        source: The source info for all its equations.
    """
    local = dict(zip(fragment.invars, atoms, strict=True))
    equations = []
    for inner in fragment.eqns:
        outs = [v if _jax.is_drop(v) else _jax.new_var(v.aval) for v in inner.outvars]
        ins = [a if _jax.is_literal(a) else local[a] for a in inner.invars]
        local.update(zip(inner.outvars, outs, strict=True))
        equations.append(_jax.with_atoms(inner, ins, outs, source))
    results = [v if _jax.is_literal(v) else local[v] for v in fragment.outvars]
    return equations, results
