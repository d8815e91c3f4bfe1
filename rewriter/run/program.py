"""The `Program` that passes hand on, and the definition of a `Pass`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import ClosedJaxpr

from rewriter.choose.placing import Plan
from rewriter.config import Config
from rewriter.find.match import Found, Match, Reason
from rewriter.find.region import Regions
from rewriter.program.fold import Folded
from rewriter.program.propagation import Placement
from rewriter.rewrite.passes.checkpoint_savings import Kept
from rewriter.rewrite.passes.recompute import Stacks
from rewriter.rewrite.replace import Origins
from rewriter.rewrite.replacements import Pair
from rewriter.site.facts import Facts


@dataclass(frozen=True, eq=False)
class Program:
    """A program on its way through the passes, and what they found out.

    Attributes:
        closed_jaxpr: The program as it is now.
        original: The program as the user wrote it.
        config: Patterns in force, forced kernels, numerics.
        patterns: The patterns that can occur in it.
        placement: Where its inputs are, if it runs on more than one device; or why
            that is not known.
        folded: The layers that were left out, if many were equal.
        regions: The graph and the walks over it.
        found: What the patterns matched, and what they nearly matched.
        matches: The matches that are kept of those.
        facts: Each match with its gradients, shards and repeats.
        failures: What went wrong inside the rewriter, if anything.
        plan: The sites, and the splices that replace them.
        origins: Where the equations of the program come from.
        pairs: Each kind of site as written and replaced, where they are compared.
        kept: What checkpoints are given, and do not compute again.
        offered: What more they could be given.
        stacks: What loops stack for their gradients, where that is less than before.
    """

    closed_jaxpr: ClosedJaxpr
    original: ClosedJaxpr
    config: Config
    patterns: tuple[Any, ...]
    placement: Placement | str | None = None
    folded: Folded | None = None
    regions: Regions | None = None
    found: Found | None = None
    matches: tuple[Match, ...] = ()
    facts: tuple[Facts, ...] = ()
    failures: tuple[Reason, ...] = ()
    plan: Plan = field(default_factory=Plan)
    origins: Origins | None = None
    pairs: tuple[Pair, ...] = ()
    kept: tuple[Kept, ...] = ()
    offered: tuple[Kept, ...] = ()
    stacks: tuple[Stacks, ...] = ()

    @property
    def replaced(self) -> bool:
        """Whether any site is replaced."""
        return bool(self.plan.splices)

    @property
    def spread(self) -> bool:
        """Whether the program runs on more than one device."""
        return self.placement is not None

    @property
    def compared(self) -> bool:
        """Whether its sites are compared with what was written."""
        return self.config.verify == "once" and not self.spread

    @property
    def walks(self) -> Regions:
        """The graph and the walks over it, which the pass "graph" makes."""
        assert self.regions is not None
        return self.regions


def always(program: Program) -> bool:
    """Lets a pass run on every program."""
    return True


@dataclass(frozen=True)
class Pass:
    """One step of the engine.

    Attributes:
        name: Its name, in ``REWRITER_LOG=+passes``, in reports and in
            ``rewriter.config(disable=...)``.
        run: ``run(program)`` gives the program after it.
        when: Whether it runs on a program.
        optional: Whether it may be disabled: the program is right without it.
    """

    name: str
    run: Callable[[Program], Program]
    when: Callable[[Program], bool] = always
    optional: bool = False
