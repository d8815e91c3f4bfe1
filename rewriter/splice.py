"""One replacement, and where in a program it can stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from rewriter import _jax
from rewriter.gradients import Backward
from rewriter.graph import Scope
from rewriter.match import Match
from rewriter.region import Regions


@dataclass(frozen=True, eq=False)
class Splice:
    """One replacement at one place.

    Attributes:
        match: What is replaced.
        scope: The body that holds the equation of the result.
        position: That equation.
        call: ``call(**operands, **params)`` gives the op's result.
        label: The site's name in profiles.
        key: Splices with equal keys have equal code.
        backward: Gradients that are replaced with it, in the same body.
    """

    match: Match
    scope: Scope
    position: int
    call: Callable[..., jax.Array]
    label: str = ""
    key: Any = None
    backward: Backward | None = None


def obstacle(match: Match, scope: Scope, regions: Regions) -> str:
    """Why a replacement cannot stand in a body, or nothing."""
    place = regions.place(scope)
    for _, value in match.leaves:
        if value in scope.first_var:
            continue
        if value not in place.defined:
            return "an operand cannot be had where the result is computed"
        for inner in (scope, place.defined[value][1]):
            while inner is not place.scope:  # calls that would be dissolved
                if _jax.holds_tracers(inner.jaxpr):
                    return "a call around it holds values of a trace around"
                inner = inner.parent
    return ""


def places(match: Match) -> list[tuple[Scope, int]]:
    """The first place of the result in every body that computes it."""
    node = match.node
    found = {id(node.scope): (node.scope, node.position)}
    for scope, position, _ in node.copies:
        found.setdefault(id(scope), (scope, position))
    return list(found.values())


PLACING = frozenset({"sharding_constraint", "reshard"})


def as_placed(regions: Regions, match: Match, scope: Scope) -> dict[int, int]:
    """Leaves that the program puts elsewhere before the region reads them.

    Args:
        regions: The walks over the program's graph.
        match: The region.
        scope: The body in which it is replaced.

    Returns:
        By the leaf, the equal value that the replacement reads instead.
    """
    graph, place = regions.graph, regions.place(scope)
    found: dict[int, int] = {}
    for _, leaf in match.leaves:
        value, going = leaf, True
        while going:
            going = False
            for node in graph.users(value):
                out = node.outs[0] if node.outs else None
                here = out in match.inner and (
                    out in scope.first_var or out in place.defined
                )
                if node.prim in PLACING and here and out != match.value:
                    found[leaf] = value = out
                    going = True
                    break
    return found
