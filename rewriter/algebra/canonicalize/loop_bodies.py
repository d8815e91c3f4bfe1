"""Loops whose bodies have forms, and what is known of their values."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from rewriter.algebra.normal_form import TRUE, Index, Poly
from rewriter.program.graph import Node


@dataclass(frozen=True, eq=False)
class Loop:
    """A scan or a while loop and the values of its body.

    Attributes:
        node: The loop.
        index: The step, counted along stacked arrays; None if there is only one.
        first: The carries before the first step, outside.
        before: The carries before a step, inside.
        after: The results of a step, inside: carries, then stacked values.
        reverse: Whether the last step along the arrays comes first.
        runs: Where a step runs that a condition may skip.
        over: The loop over whose steps it goes back; None if there is none.
    """

    node: Node
    index: Index
    first: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    reverse: bool
    runs: int = TRUE
    over: Loop | None = None


@dataclass(eq=False)
class Loops:
    """The loops that an evaluator has entered.

    Attributes:
        entered: A loop's equation to it.
        steps: A value that a body reads step by step, to (the whole, the step).
        carries: A carry before a step, to (its loop, its index).
        varying: A value to the steps that it depends on.
        closed: A carry of a loop that goes back over another one's steps, to (its
            index arguments, its form before a step); None if that is not known.
        functions: What an opaque value is a function of, to the first such value.
        first_alike: An opaque value to the first that is the same function.
        outdated: How often indices were replaced, after which older forms do not count.
    """

    entered: dict[Node, Loop] = field(default_factory=dict)
    steps: dict[int, tuple[int, Index]] = field(default_factory=dict)
    carries: dict[int, tuple[Loop, int]] = field(default_factory=dict)
    varying: dict[int, tuple[Index, ...]] = field(default_factory=dict)
    closed: dict[int, tuple[tuple[Index, ...], Poly] | None] = field(
        default_factory=dict
    )
    functions: dict[Hashable, int] = field(default_factory=dict)
    first_alike: dict[int, int] = field(default_factory=dict)
    outdated: int = 0

    def first_run(self, loop: Loop) -> Loop | None:
        """The entered loop that a recomputation runs again: its carries are the same.

        The graph gives the results of both one number, if they compute the same.
        """
        n = len(loop.before)
        results = loop.node.outs[:n]
        for other in self.entered.values():
            same = other.node.outs[:n] == results and len(other.before) == n
            if n and same and loop.over is None and other.over is None:
                return other
        return None
