"""The outcome of a rewrite: the new program, and what is to be said of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jax.extend.core import ClosedJaxpr

from rewriter.find.match import NearMiss
from rewriter.measure.key import Key
from rewriter.rewrite.passes.aligned_products import Aligned
from rewriter.rewrite.passes.checkpoint_savings import Saved
from rewriter.rewrite.passes.erfc_in_16_bits import Shortened
from rewriter.rewrite.passes.recompute import Stacks
from rewriter.rewrite.passes.recompute_activations import Recomputed
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
        stacks: Stacked bytes of loops, where `recompute` made them fewer.
        kept: Values saved for checkpoints, which they do not compute again.
        offered: Further values that could be saved for them.
        pairs: Each kind of site as written and replaced, if the two are compared.
        recomputed: Activations that the backward pass computes again.
        shortened: Functions of 16-bit numbers that take fewer operations.
        aligned: Matrix products that were padded.
    """

    closed_jaxpr: ClosedJaxpr
    sites: tuple[Site, ...] = ()
    misses: tuple[NearMiss, ...] = ()
    failures: tuple[Reason, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    key: Key | None = None
    stacks: tuple[Stacks, ...] = ()
    kept: tuple[Saved, ...] = ()
    offered: tuple[Saved, ...] = ()
    pairs: tuple[Pair, ...] = ()
    recomputed: tuple[Recomputed, ...] = ()
    shortened: tuple[Shortened, ...] = ()
    aligned: tuple[Aligned, ...] = ()
