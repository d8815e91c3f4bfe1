"""Carries of loops to which each step adds the same number.

A checkpoint's recomputation runs a loop again. Where it carries nothing else, what
counts the steps of both from the same number is one value: the same function of the
step. Loops that stand in each other are at different steps, so only those with as many
loops around count alike. So is a loop of which another one reads all that it stacks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from rewriter import _jax
from rewriter.program.loop_places import is_read_whole, loops_around


@dataclass(eq=False)
class Counters:
    """The counters of a program.

    Attributes:
        known: A carry to its first value, what is added, and how often.
        by_count: The same with what is around, to the first such carry.
    """

    known: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    by_count: dict[Hashable, int] = field(default_factory=dict)

    def shared(
        self, scope: Any, eqn: Any, ins: Sequence[int], fresh: Sequence[int]
    ) -> list[int]:
        """The carries of a loop before each step; counters that run again are known.

        Args:
            scope: The body that the loop is in.
            eqn: A scan.
            ins: Its operands, as values of a graph.
            fresh: New values for its carries.
        """
        _, n_consts, n_carry, length = _jax.scan_parts(eqn)
        again = scope.runs_again and only_counts(eqn)
        again, found = again and not is_read_whole(scope, eqn), list(fresh)
        place = loops_around(scope), length, bool(eqn.params["reverse"])
        for k in range(n_carry):
            step = added(eqn, k)
            if step is None:
                continue
            key = (*place, ins[n_consts + k], step)
            first = self.by_count.setdefault(key, found[k])
            found[k] = first if again else found[k]
        return found


def added(eqn: Any, k: int) -> tuple[str, int] | None:
    """The dtype of a carry and the number that each step adds; None if it is none."""
    body, n_consts, _, _ = _jax.scan_parts(eqn)
    inner = getattr(body, "jaxpr", body)
    carry, after = inner.invars[n_consts + k], inner.outvars[k]
    if carry.aval.shape or not jnp.issubdtype(carry.aval.dtype, jnp.integer):
        return None
    number = _more(inner, after, carry)
    return None if number is None else (str(carry.aval.dtype), number)


def _more(body: Any, after: Any, carry: Any) -> int | None:
    """The number whose sum with one variable of a body another one is."""
    made = (e for e in body.eqns if not _jax.is_literal(after) and after in e.outvars)
    eqn = next(made, None)
    if eqn is None or carry not in [a for a in eqn.invars if not _jax.is_literal(a)]:
        return None
    if _jax.call_kind(eqn) in ("call", "remat"):
        within = _jax.call_body(eqn)
        within = getattr(within, "jaxpr", within)
        return _more(
            within,
            within.outvars[eqn.outvars.index(after)],
            within.invars[list(eqn.invars).index(carry)],
        )
    numbers = [a for a in eqn.invars if a is not carry]
    if eqn.primitive.name != "add" or len(numbers) != 1:
        return None
    (number,) = numbers
    if not _jax.is_literal(number) or _jax.is_opaque(number.val):
        return None
    return int(number.val)


def only_counts(eqn: Any) -> bool:
    """Whether all that a loop carries are counters."""
    _, _, n_carry, _ = _jax.scan_parts(eqn)
    return all(added(eqn, k) is not None for k in range(n_carry))
