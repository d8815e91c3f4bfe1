"""The `Program` that passes hand on, and the definition of a `Pass`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import ClosedJaxpr

from rewriter.choose.number_sites import Plan
from rewriter.config import Config
from rewriter.find.match import Found, Match, Reason
from rewriter.find.region import Regions
from rewriter.program.fold import BEHIND, Folded
from rewriter.program.propagation import Placement
from rewriter.rewrite.beside_sites import Change
from rewriter.rewrite.origins import Origins
from rewriter.rewrite.passes.checkpoint_savings import Saved
from rewriter.rewrite.replacements import Pair
from rewriter.site.facts import Facts


@dataclass(frozen=True, eq=False)
class Program:
    """A program between two passes, with the facts that earlier passes found.

    Attributes:
        closed_jaxpr: The program as it is now.
        original: The program as the user wrote it.
        config: Patterns in force, forced kernels, numerics.
        patterns: The patterns that can occur in it.
        primitives: The names of the original's primitives, at any depth.
        placement: Where its inputs are, if it runs on more than one device; or why
            that is not known.
        behind: How many equal layers `fold` keeps after those that it leaves out.
        folded: The equal layers that were left out, if any.
        regions: The graph and the walks over it.
        rules: By the id of a body, the user's own rule for its derivatives.
        proved: Those that are proved to be the derivatives.
        found: Matches and near misses of the patterns.
        matches: The matches that are still in use.
        facts: Each match with its gradients, shards and repeats.
        failures: What went wrong inside the rewriter, if anything.
        plan: The sites, and the splices that replace them.
        origins: Where the equations of the program come from.
        pairs: Each kind of site as written and replaced, if the two are compared.
        changes: What passes changed beside the sites.
        offered: Further values that could be saved for checkpoints.
    """

    closed_jaxpr: ClosedJaxpr
    original: ClosedJaxpr
    config: Config
    patterns: tuple[Any, ...]
    primitives: frozenset[str] = frozenset()
    placement: Placement | str | None = None
    behind: int = BEHIND
    folded: Folded | None = None
    regions: Regions | None = None
    rules: Mapping[int, Any] = field(default_factory=dict)
    proved: frozenset[int] = frozenset()
    found: Found | None = None
    matches: tuple[Match, ...] = ()
    facts: tuple[Facts, ...] = ()
    failures: tuple[Reason, ...] = ()
    plan: Plan = field(default_factory=Plan)
    origins: Origins | None = None
    pairs: tuple[Pair, ...] = ()
    changes: tuple[Change, ...] = ()
    offered: tuple[Saved, ...] = ()

    @property
    def has_losses(self) -> bool:
        """Whether some pattern that can occur reads the loss of each row."""
        return any(p.of_rows for p in self.patterns)

    @property
    def has_special_forms(self) -> bool:
        """Whether a special form of an op was found, or nearly."""
        assert self.found is not None
        return bool(self.found.refused) or any(m.op.form_of for m in self.matches)

    @property
    def replaced(self) -> bool:
        """Whether any site is replaced."""
        return bool(self.plan.splices)

    @property
    def changed(self) -> bool:
        """Whether the program differs from the original at all."""
        return self.replaced or bool(self.changes)

    @property
    def spread(self) -> bool:
        """Whether the program runs on more than one device."""
        return self.placement is not None

    @property
    def strict(self) -> bool:
        """Whether numbers may not change beyond what kernels round."""
        return self.config.numerics == "strict"

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
        when: Whether to run it on a program.
        optional: Whether it may be disabled: the program is also correct without it.
        alone: Whether it also runs on a program in which no pattern can occur.
    """

    name: str
    run: Callable[[Program], Program]
    when: Callable[[Program], bool] = always
    optional: bool = False
    alone: bool = False
