"""Reports sites that a user's own derivative rule keeps from being replaced."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from rewriter import _jax
from rewriter.algebra.custom_rules import UNPROVED
from rewriter.find.match import Found, Match, NearMiss
from rewriter.find.region import Regions
from rewriter.program.lines import users_line_of
from rewriter.support.verdict import Reason

NEAR = 0.9


def hidden_by_rules(
    without: Sequence[Match], found: Found, regions: Regions, unproved: Collection[int]
) -> tuple[NearMiss, ...]:
    """Returns a near miss for each site that an unproved rule keeps from being found.

    Args:
        without: What a search finds that ignores such rules.
        found: What the search finds that respects them.
        regions: The walks of the search that ignores them.
        unproved: The ids of the bodies with such rules.
    """
    known = {(m.op.name, m.where) for m in found.matches}
    misses: dict[tuple[str, str], NearMiss] = {}
    for match in without:
        key = match.op.name, match.where
        eqns = list(_rules_around(match, regions, unproved))
        if key in known or key in misses or not eqns:
            continue
        reasons = {
            id(e): Reason("rule", f"{_what(e)}: {UNPROVED}", _jax.source_of(e))
            for e in eqns
        }
        misses[key] = NearMiss(
            *key,
            tuple(reasons.values()),
            "",
            NEAR,
            "leave the rule to JAX, or write the derivative of the function itself",
            users_line_of(match.anchor),
        )
    return tuple(misses.values())


def _what(eqn: Any) -> str:
    kind = eqn.primitive.name.removesuffix("_jaxpr").removesuffix("_call")
    return f"{kind} {_jax.function_name(eqn)}".rstrip()


def _rules_around(
    match: Match, regions: Regions, unproved: Collection[int]
) -> Iterator[Any]:
    """The equations with such rules in which parts of a match are computed."""
    seen: set[int] = set()
    for value in match.inner:
        if value not in regions.graph.producer:
            continue
        scope = regions.graph.producer[value][0].scope
        while scope.parent is not None and id(scope) not in seen:
            seen.add(id(scope))
            eqn = scope.parent.jaxpr.eqns[scope.call]
            if id(eqn.params.get("call_jaxpr")) in unproved:
                yield eqn
            scope = scope.parent
