"""Numbers for equations: equal ones for equal primitives and parameters."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rewriter import _jax

NEVER_MERGED = {"optimization_barrier"}
ROUNDING = "reduce_precision"


@dataclass(eq=False)
class Signatures:
    """The signatures of a program's equations.

    An equation that is never merged with another has a number of its own, below zero.
    """

    numbers: dict[Any, int] = field(default_factory=dict)
    _of_bodies: dict[int, list[int]] = field(default_factory=dict)

    def of_body(self, eqns: Sequence[Any]) -> list[int]:
        """A number for each equation of a body."""
        known = self._of_bodies.get(id(eqns))
        if known is None:
            known = self._of_bodies[id(eqns)] = [self.one(e) for e in eqns]
        return known

    def one(self, eqn: Any) -> int:
        """The number of an equation."""
        params, numbers = eqn.params, self.numbers
        name = eqn.primitive.name
        key: Any = object()  # equal to nothing else
        number = -len(numbers) - 1
        if not (
            eqn.effects
            or name in _jax.BODIES
            or name in NEVER_MERGED
            or name == ROUNDING
            or "jaxpr" in params
        ):
            key = (name, *params.items())
            number = len(numbers)
        try:
            return numbers.setdefault(key, number)
        except TypeError:  # a parameter without a hash
            return numbers.setdefault(object(), -len(numbers) - 1)

    def of_call(self, name: Hashable) -> int:
        """The number of what counts as one equation, such as a call of a name."""
        return self.numbers.setdefault(name, len(self.numbers))
