"""A program in, the rewritten program out: graph, search, choice, splices."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from rewriter.choose.composite import apart, parted, wholes
from rewriter.choose.planner import planned, target_of, tasks_of
from rewriter.choose.special_form import of_one_form
from rewriter.config import Config
from rewriter.find.match import search
from rewriter.find.region import Regions
from rewriter.find.sieve import possible
from rewriter.gradients.search import search_gradients
from rewriter.measure.programs import Task
from rewriter.program.equal_constants import once
from rewriter.program.fold import Folded, fold
from rewriter.program.graph import Graph
from rewriter.program.propagation import Placement
from rewriter.rewrite.locate import located
from rewriter.rewrite.passes.checkpoint_policies import kept_to
from rewriter.rewrite.passes.checkpoint_savings import kept, offered
from rewriter.rewrite.passes.fuse_residual_adds import absorbed
from rewriter.rewrite.passes.memory_order import told
from rewriter.rewrite.passes.recompute import recomputed
from rewriter.rewrite.replace import Rewritten, replace
from rewriter.rewrite.replacements import Pair, pairs_of
from rewriter.rewrite.unfold import Labels, Unlike, unfold
from rewriter.support import promotion

log = logging.getLogger("rewriter.pipeline")


def rewrite(
    closed_jaxpr: ClosedJaxpr,
    config: Config,
    user_patterns: Sequence[Any] = (),
    placement: Placement | str | None = None,
) -> Rewritten:
    """Returns the program with every site on the kernel chosen for it.

    Args:
        closed_jaxpr: The program.
        config: Patterns in force, forced kernels, numerics.
        user_patterns: Patterns beyond those that the configuration names.
        placement: Where its inputs are, if it runs on more than one device; or why
            that is not known.
    """
    from rewriter.patterns.sets import in_force

    clock = _Clock()
    patterns = in_force(config.patterns, (*config.using, *user_patterns))
    with _paused_collection(), promotion.as_usual():
        patterns = possible(closed_jaxpr, patterns)
        if not patterns:
            return Rewritten(closed_jaxpr, seconds=clock.seconds)
        closed_jaxpr = once(closed_jaxpr)
        if placement is not None:  # layers that look alike may be placed differently
            return _whole(closed_jaxpr, config, patterns, clock, placement=placement)
        return _rewritten(closed_jaxpr, config, patterns, clock)


def tasks(
    closed_jaxpr: ClosedJaxpr,
    config: Config,
    user_patterns: Sequence[Any] = (),
    gradients: bool = False,
    placement: Placement | str | None = None,
) -> list[Task]:
    """Returns what can be measured for a program's sites, equal ones once.

    Args:
        closed_jaxpr: The program.
        config: Patterns in force, numerics.
        user_patterns: Patterns beyond those that the configuration names.
        gradients: Whether to measure gradients also of sites that the program does
            not differentiate.
        placement: As for `rewrite`; what is measured is what one device computes.
    """
    from rewriter.patterns.sets import in_force

    patterns = in_force(config.patterns, (*config.using, *user_patterns))
    with _paused_collection(), promotion.as_usual():
        patterns = possible(closed_jaxpr, patterns)
        if not patterns:
            return []
        graph = Graph(once(closed_jaxpr))
        regions = Regions(graph)
        found = search(regions, patterns, config.numerics, config.assume)
        every = found.matches
        if placement is not None:
            every = of_one_form(found, config, target_of(config))
        matches, whole = apart(every), wholes(regions, every, config)
        its = search_gradients(regions, matches)
        made = []
        for some, of in ((its.matches, its.backward), (whole, {})):
            spread = {} if placement is None else located(regions, some, placement)
            made += tasks_of(graph, some, of, gradients, spread)
        return made


@contextlib.contextmanager
def _paused_collection() -> Iterator[None]:
    """Many small objects are made and none is garbage: collecting only costs time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _rewritten(
    closed_jaxpr: ClosedJaxpr, config: Config, patterns: Sequence[Any], clock: _Clock
) -> Rewritten:
    folded = fold(closed_jaxpr)
    if folded is not None:
        clock("fold")
        try:
            return _whole(closed_jaxpr, config, patterns, clock, folded)
        except Unlike as why:
            log.debug("layers are looked at one by one: %s", why)
    return _whole(closed_jaxpr, config, patterns, clock)


def _whole(
    closed_jaxpr: ClosedJaxpr,
    config: Config,
    patterns: Sequence[Any],
    clock: _Clock,
    folded: Folded | None = None,
    placement: Placement | str | None = None,
) -> Rewritten:
    """The program rewritten; by way of a shorter one, if it was folded."""
    graph = Graph(closed_jaxpr if folded is None else folded.short)
    clock("graph")
    regions = Regions(graph)
    found = search(regions, patterns, config.numerics, config.assume)
    clock("match")
    matches = of_one_form(found, config, target_of(config))
    matches = parted(regions, matches, config, placement)
    clock("forms")
    its = search_gradients(regions, matches)
    clock("gradients")
    spread = {} if placement is None else located(regions, its.matches, placement)
    clock("placement")
    plan = planned(regions, its.matches, config, its.backward, its.why, folded, spread)
    clock("choose")
    pairs: tuple[Pair, ...] = ()
    if config.verify == "once" and placement is None:
        pairs = pairs_of(graph, plan.splices, len(closed_jaxpr.in_avals))
    program, origins = replace(regions, plan.splices)
    graph.release()
    clock("replace")
    if folded is not None:
        program = _unfolded(folded, program, origins, plan.labels)
        clock("unfold")
    program, more = kept(program, _room(config.checkpoint_memory, placement))
    rest = offered(program) if plan.splices else ()
    clock("keep")
    program = told(absorbed(program))
    clock("absorb")
    program = kept_to(program) if plan.splices else program
    program, stacks = recomputed(program) if plan.splices else (program, ())
    clock("recompute")
    return Rewritten(
        program,
        tuple(plan.sites),
        found.misses,
        (*found.failures, *its.failures),
        clock.seconds,
        plan.key,
        stacks,
        more,
        rest,
        pairs,
    )


def _room(memory: int, placement: Placement | str | None) -> int:
    """Bytes of values that may be kept, if all devices together may keep so many.

    Where a mesh does not split a value, each device has all of it, and what XLA will
    split is not known here: each is taken to be on every device.
    """
    if isinstance(placement, str):
        return 0
    return memory // math.prod(placement.sizes.values()) if placement else memory


def _unfolded(folded: Folded, program: Any, origins: Any, labels: Labels) -> Any:
    if program is folded.short:
        return folded.whole
    if origins is None:
        raise Unlike("residuals are handed from body to body")
    return unfold(folded, program, origins, labels)


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def __call__(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = now - self.last
        self.last = now
