"""Edits a `scan` of a body: the same loop with other stacks and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from rewriter import _jax

Step = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Sequence[Any]]
"""Constants, carries and a turn's slices in, carries and what is stacked out."""


@dataclass(frozen=True, eq=False)
class Loop:
    """A scan in a body.

    Attributes:
        position: Where it is among the body's equations.
        eqn: Its equation.
        body: Its jaxpr, closed or not.
        n_consts: How many operands every turn reads whole.
        n_carry: How many go from turn to turn; so many of its results do.
        length: How many turns there are.
    """

    position: int
    eqn: Any
    body: Any
    n_consts: int
    n_carry: int
    length: Any

    @property
    def first(self) -> int:
        """The place of the first operand that is read turn by turn."""
        return self.n_consts + self.n_carry

    @property
    def xs(self) -> list[Any]:
        """What is read turn by turn, in the body around."""
        return self.eqn.invars[self.first :]

    @property
    def eqns(self) -> list[Any]:
        """The equations of a turn."""
        return self.body.eqns

    @property
    def inputs(self) -> list[Any]:
        """A turn's variables of constants, carries and slices."""
        return getattr(self.body, "jaxpr", self.body).invars

    @property
    def outs(self) -> list[Any]:
        """A turn's carries and what it stacks."""
        return getattr(self.body, "jaxpr", self.body).outvars


def loop_of(position: int, eqn: Any) -> Loop:
    """Returns a scan's equation, at a position of a body, as a loop."""
    return Loop(position, eqn, *_jax.scan_parts(eqn))


def loops_in(body: Any) -> list[Loop]:
    """Returns the scans among a body's own equations."""
    return [
        loop_of(k, e) for k, e in enumerate(body.eqns) if _jax.call_kind(e) == "scan"
    ]


def traced(
    loop: Loop,
    consts: Sequence[Any],
    carry: Sequence[Any],
    xs: Sequence[Any],
    step: Step,
) -> tuple[list[Any], list[Any]]:
    """Returns equations of a loop with another body, and the atoms of its results.

    Args:
        loop: Whose length, direction and place in the user's code it takes.
        consts: Atoms around the loop, which every turn reads.
        carry: Those that it starts from.
        xs: Those that it reads turn by turn.
        step: Its body.
    """
    counts = len(consts), len(consts) + len(carry)

    def code(*given: jax.Array) -> list[jax.Array]:
        start = tuple(given[counts[0] : counts[1]])

        def turn(carry: Any, x: Any) -> Any:
            outs = step(given[: counts[0]], carry, x)
            return tuple(outs[: len(start)]), tuple(outs[len(start) :])

        last, stacked = jax.lax.scan(
            turn,
            start,
            tuple(given[counts[1] :]),
            length=loop.length,
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
    """Returns a fragment's equations with variables of their own, and its results.

    Args:
        fragment: A jaxpr without constants.
        atoms: What it is given.
        source: The place in the user's code of all its equations.
    """
    local = dict(zip(fragment.invars, atoms, strict=True))
    made = []
    for inner in fragment.eqns:
        outs = [v if _jax.is_drop(v) else _jax.new_var(v.aval) for v in inner.outvars]
        ins = [a if _jax.is_literal(a) else local[a] for a in inner.invars]
        local.update(zip(inner.outvars, outs, strict=True))
        made.append(inner.replace(invars=ins, outvars=outs, source_info=source))
    results = [v if _jax.is_literal(v) else local[v] for v in fragment.outvars]
    return made, results
