"""The outcome of a rewrite: the new program, and what is to be said of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jax.extend.core import ClosedJaxpr

from rewriter.find.match import NearMiss
from rewriter.measure.key import Key
from rewriter.rewrite.beside_sites import Change
from rewriter.rewrite.passes.checkpoint_savings import Saved
from rewriter.rewrite.plan import Site
from rewriter.rewrite.replacements import Pair
from rewriter.support.verdict import Reason


@dataclass(frozen=True)
class Rewritten:
    """A program with its sites replaced.

    Attributes:
        closed_jaxpr: The new program; same inputs and outputs as before.
        sites: All recognised ops, replaced or not.
        misses: Near misses.
        failures: What went wrong inside the rewriter, if anything.
        seconds: Stage name to seconds.
        key: The key under which the whole program is measured; None if nothing was
            replaced.
        changes: What passes changed beside the sites.
        offered: Further values that could be saved for checkpoints.
        pairs: Each kind of site as written and replaced, if the two are compared.
    """

    closed_jaxpr: ClosedJaxpr
    sites: tuple[Site, ...] = ()
    misses: tuple[NearMiss, ...] = ()
    failures: tuple[Reason, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    key: Key | None = None
    changes: tuple[Change, ...] = ()
    offered: tuple[Saved, ...] = ()
    pairs: tuple[Pair, ...] = ()
