"""A plan in, the rewritten program out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jax.extend.core import ClosedJaxpr

from rewriter.match import NearMiss
from rewriter.plan import Site
from rewriter.verdict import Reason


@dataclass(frozen=True)
class Rewritten:
    """A program with its sites replaced.

    Attributes:
        closed_jaxpr: The new program; same inputs and outputs as before.
        sites: Everything recognised, replaced or not.
        misses: Everything that almost was.
        failures: What went wrong inside the rewriter, if anything.
        seconds: Stage name to seconds.
    """

    closed_jaxpr: ClosedJaxpr
    sites: tuple[Site, ...] = ()
    misses: tuple[NearMiss, ...] = ()
    failures: tuple[Reason, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
