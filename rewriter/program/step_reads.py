"""What loops read of arrays step by step, and which loops read alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rewriter import _jax


@dataclass(eq=False)
class StepReads:
    """The reads of the loops of a program.

    Attributes:
        by_result: The last result of a loop to its reads: an array to its step.
        maps: Reads of loops without carries that run first, by length and direction.
    """

    by_result: dict[int, dict[int, int]] = field(default_factory=dict)
    maps: list[tuple[Any, dict[int, int]]] = field(default_factory=list)

    def first_run(self, arrays: Sequence[int], how: Any) -> Mapping[int, int]:
        """What the earlier loop without carries that reads most of some arrays reads.

        Args:
            arrays: What a checkpoint's recomputation of it reads step by step.
            how: Its length and direction.
        """
        alike = [
            {v: step for v, step in reads.items() if v in arrays}
            for its, reads in self.maps
            if its == how
        ]
        return max(alike, key=len, default={})

    def written_by(
        self, stacked: Iterable[int], node_of: Callable[[int], Any]
    ) -> dict[int, int]:
        """What the loops that stacked some arrays read at each step."""
        found: dict[int, int] = {}
        for value in stacked:
            node = node_of(value)
            if node is not None and node.prim == "scan":
                found |= self.by_result.get(node.outs[-1], {})
        return found


def steps_around(scope: Any) -> set[int]:
    """What the loops around a body read step by step.

    Args:
        scope: A scope of a graph.
    """
    found: set[int] = set()
    while scope.parent is not None:
        if scope.kind == "scan":
            body = getattr(scope.jaxpr, "jaxpr", scope.jaxpr)
            eqn = scope.parent.jaxpr.eqns[scope.call]
            _, n_consts, n_carry, _ = _jax.scan_parts(eqn)
            found.update(scope.env[v] for v in body.invars[n_consts + n_carry :])
        scope = scope.parent
    return found
