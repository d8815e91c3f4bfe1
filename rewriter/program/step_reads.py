"""Finds the arrays that loops read step by step, and loops that read the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rewriter import _jax
from rewriter.program.counters import only_counts
from rewriter.program.loop_places import is_read_whole, loops_around

How = tuple[Any, bool, tuple[Any, ...]]
"""A loop's length, whether it goes backwards, and the loops around it."""


@dataclass(eq=False)
class StepReads:
    """The reads of the loops of a program.

    Attributes:
        per_step: What some loop has at each step of an array, by array and loop.
        by_result: The last result of a loop to its reads: an array to its step.
        maps: Reads of loops that carry counters alone and run first.
    """

    per_step: dict[tuple[int, How], int] = field(default_factory=dict)
    by_result: dict[int, dict[int, int]] = field(default_factory=dict)
    maps: list[tuple[How, dict[int, int]]] = field(default_factory=list)

    def known(
        self, scope: Any, eqn: Any, arrays: Sequence[int], node_of: Callable[[int], Any]
    ) -> list[int | None]:
        """What earlier loops have at each step of arrays; None where it is new.

        A loop that goes back has what the loop had whose stacks it reads. If that one
        carries more than counters, steps of other loops are no steps of its own.

        Args:
            scope: The body that the loop is in.
            eqn: A scan.
            arrays: What it reads step by step, as values of a graph.
            node_of: Returns the equation of a value.
        """
        length, backwards, around = how = how_of(scope, eqn)
        back = length, not backwards, around
        stacks = [v for v in arrays if (n := node_of(v)) and n.prim == "scan"]
        rather = {**self.first_run(arrays, back), **self.written_by(stacks, node_of)}
        alone = any(not only_counts(node_of(v).eqn) for v in stacks)
        again: Mapping[int, int] | None = None
        if scope.runs_again and only_counts(eqn) and not is_read_whole(scope, eqn):
            again = self.first_run(arrays, how)
        found, outer = [], steps_around(scope)
        for value in arrays:
            known = self.per_step.get((value, back))
            if known is not None:  # rather as the loop had it whose stacks are read
                known = rather.get(
                    value, known if value in stacks or not alone else None
                )
            elif again is not None:  # as the loop had it that runs again
                known = again.get(value, self.per_step.get((value, how)))
            found.append(None if known in outer else known)  # that is at another step
        return found

    def note(
        self, scope: Any, eqn: Any, read: dict[int, int], outs: Sequence[int],
        stacked: Mapping[int, int],
    ) -> None:  # fmt: skip
        """Notes a loop's reads.

        Args:
            scope: The body that the loop is in.
            eqn: A scan.
            read: Arrays to what it has of them at each step.
            outs: Its results.
            stacked: Those that are stacked, to what the body returns.
        """
        how, is_map = how_of(scope, eqn), only_counts(eqn)
        self.by_result[outs[-1] if outs else -1] = read
        if not (is_map and is_read_whole(scope, eqn)):
            for value, step in read.items():
                self.per_step.setdefault((value, how), step)
            if is_map and not scope.runs_again:
                self.maps.append((how, read))
        self.per_step.update({(v, how): step for v, step in stacked.items()})

    def first_run(self, arrays: Sequence[int], how: How) -> Mapping[int, int]:
        """What the map that reads most of some arrays reads.

        Args:
            arrays: What another loop, such as its recomputation, reads step by step.
            how: How the map runs.
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


def how_of(scope: Any, eqn: Any) -> How:
    """How a scan in a body runs."""
    length = _jax.scan_parts(eqn)[3]
    return length, bool(eqn.params["reverse"]), loops_around(scope)


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
