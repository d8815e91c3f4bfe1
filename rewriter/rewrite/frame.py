"""The equations of one new body, while they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rewriter import _jax
from rewriter.program.loops import inserted


@dataclass(eq=False)
class Frame:
    """Equations of a new body.

    Attributes:
        eqns: The equations so far.
        ends: How many follow each equation of the old body.
        labels: By the id of an equation, the site that it belongs to.
    """

    eqns: list[Any] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    labels: dict[int, str] = field(default_factory=dict)

    def insert(
        self, fragment: Any, atoms: Sequence[Any], eqn: Any, label: str = ""
    ) -> list[Any]:
        """Appends a fragment's equations; returns the atoms of its results.

        Args:
            fragment: A jaxpr.
            atoms: What it reads.
            eqn: The old equation whose source they have.
            label: The site that they belong to.
        """
        source = _jax.scoped(eqn.source_info, label)
        equations, results = inserted(fragment, list(atoms), source)
        self.eqns += equations
        self.labels.update((id(e), label) for e in equations)
        return results

    def insert_sum(self, one: Any, other: Any, eqn: Any) -> Any:
        """Appends the sum of two atoms of one type; returns its atom."""
        avals = [one.aval, other.aval]
        fragment = _jax.trace_placed(lambda a, b: [a + b], avals)
        return self.insert(fragment, [one, other], eqn)[0]
