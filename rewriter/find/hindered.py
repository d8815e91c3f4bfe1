"""What a search finds without users' rules of derivatives in, near misses out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from rewriter import _jax
from rewriter.algebra.custom_rules import UNPROVED
from rewriter.find.match import Found, Match, NearMiss
from rewriter.find.region import Regions
from rewriter.support.verdict import Reason

NEAR = 0.9


def hindered(
    without: Sequence[Match], found: Found, regions: Regions, unproved: Collection[int]
) -> tuple[NearMiss, ...]:
    """Returns what rules that are not proved keep from being found.

    Args:
        without: What is found where such rules are left out of account.
        found: What is found.
        regions: The walks in which the former was found.
        unproved: The ids of the bodies with such rules.
    """
    known = {(m.op.name, m.where) for m in found.matches}
    misses: dict[tuple[str, str], NearMiss] = {}
    for match in without:
        key = match.op.name, match.where
        eqns = list(_around(match, regions, unproved))
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
        )
    return tuple(misses.values())


def _what(eqn: Any) -> str:
    kind = eqn.primitive.name.removesuffix("_jaxpr").removesuffix("_call")
    return f"{kind} {_jax.function_name(eqn)}".rstrip()


def _around(match: Match, regions: Regions, unproved: Collection[int]) -> Iterator[Any]:
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
