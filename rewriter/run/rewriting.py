"""Rewrites a program: runs the passes in order, clocks, logs and checks each."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import ClosedJaxpr

from rewriter import _jax
from rewriter.choose.composite import composites, elementary
from rewriter.choose.planner import tasks_of
from rewriter.config import Config
from rewriter.errors import RewriterError
from rewriter.find.sieve import primitives
from rewriter.measure.programs import Task
from rewriter.program.fold import BEHIND, FEWEST
from rewriter.program.propagation import Placement
from rewriter.rewrite.rewritten import Rewritten
from rewriter.rewrite.unfold import TurnsDiffer
from rewriter.run import steps
from rewriter.run.pipeline import FOLD, PASSES, PREPARE
from rewriter.run.program import Pass, Program
from rewriter.run.validate import validate
from rewriter.site.facts import Facts
from rewriter.support import garbage, promotion
from rewriter.support.verdict import Reason

log = logging.getLogger("rewriter.passes")


def rewrite(
    closed_jaxpr: ClosedJaxpr,
    config: Config,
    user_patterns: Sequence[Any] = (),
    placement: Placement | str | None = None,
) -> Rewritten:
    """Returns the program with every site on the kernel chosen for it.

    Where no site is replaced it is the same program, with the same constants.

    Args:
        closed_jaxpr: The program.
        config: Patterns in force, forced kernels, numerics.
        user_patterns: Patterns beyond those that the configuration names.
        placement: Where its inputs are, if it runs on more than one device; or why
            that is not known.
    """
    with garbage.paused(), promotion.as_usual(), _jax.without_mesh():
        # Within a function of its own: what it made is freed before collection goes on.
        return _rewritten(closed_jaxpr, config, user_patterns, placement)


def _rewritten(
    closed_jaxpr: ClosedJaxpr,
    config: Config,
    user_patterns: Sequence[Any],
    placement: Placement | str | None,
) -> Rewritten:
    clock = _Clock()
    start = _start(closed_jaxpr, config, user_patterns, placement)
    program = _prepared_and_folded(start, clock)
    if not program.patterns:
        return _without_patterns(program, clock)
    known = program.folded is None and program.closed_jaxpr is closed_jaxpr
    try:
        later = _later_passes(without="fold" if known else "")
        program = _after_passes(program, clock, later)
    except TurnsDiffer as why:
        fewest = program.folded is not None and program.folded.behind < BEHIND
        program = _with_more_layers(start, clock, fewest, why)
    program.walks.graph.release()
    assert program.found is not None
    return Rewritten(
        program.closed_jaxpr if program.changed else closed_jaxpr,
        tuple(program.plan.sites),
        program.found.misses,
        program.failures,
        clock.seconds,
        program.plan.key,
        program.changes,
        program.offered,
        program.pairs,
    )


def _with_more_layers(
    start: Program, clock: _Clock, fewest: bool, why: TurnsDiffer
) -> Program:
    """The program after all passes, where the layers left in were not rewritten alike.

    Args:
        start: The program before the first pass.
        clock: Where the passes' times are noted.
        fewest: Whether one layer more may help, before all are looked at.
        why: How the layers differ.
    """
    log.debug("layers differ: %s", why)
    prepared = _after_passes(start, clock, PREPARE)
    try:
        if fewest:
            return _after_passes(prepared, clock, _later_passes())
    except TurnsDiffer as more:
        log.debug("layers are looked at one by one: %s", more)
    return _after_passes(prepared, clock, _later_passes(without="fold"))


def _without_patterns(program: Program, clock: _Clock) -> Rewritten:
    """The outcome of the passes that run where no pattern can occur."""
    if program.config.patterns == "none":
        return Rewritten(program.original)
    program = _after_passes(program, clock, [p for p in _later_passes() if p.alone])
    failures = program.failures
    if not program.changed:
        return Rewritten(program.original, failures=failures)
    return Rewritten(
        program.closed_jaxpr,
        failures=failures,
        seconds=clock.seconds,
        changes=program.changes,
    )


def has_sites(
    closed_jaxpr: ClosedJaxpr, config: Config, user_patterns: Sequence[Any] = ()
) -> bool:
    """Returns whether anything in a program is recognised, or almost.

    Args:
        closed_jaxpr: The program.
        config: Patterns in force, numerics.
        user_patterns: Patterns beyond those that the configuration names.
    """
    with garbage.paused(), promotion.as_usual(), _jax.without_mesh():
        program = _prepared(_start(closed_jaxpr, config, user_patterns))
        if not program.patterns:
            return False
        found = steps.find_sites(steps.make_graph(program)).found
    assert found is not None
    return bool(found.matches or found.misses or found.failures)


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
    with garbage.paused(), promotion.as_usual(), _jax.without_mesh():
        program = _prepared(_start(closed_jaxpr, config, user_patterns, placement))
        if not program.patterns:
            return []
        program = steps.find_sites(steps.make_graph(program))
        every = program.matches
        if program.spread:
            every = steps.prefer_special_forms(program).matches
        whole = composites(program.walks, every, config)
        found = steps.find_gradients(replace(program, matches=elementary(every)))
        alone = replace(program, facts=tuple(Facts(m) for m in whole))
        gathered: list[Task] = []
        for part in (found, alone):
            facts = steps.split_over_devices(part).facts
            gathered += tasks_of(program.walks.graph, facts, gradients)
        return gathered


def _start(
    closed_jaxpr: ClosedJaxpr,
    config: Config,
    user_patterns: Sequence[Any],
    placement: Placement | str | None = None,
) -> Program:
    """The program before the first pass."""
    from rewriter.patterns.sets import in_force

    patterns = tuple(in_force(config.patterns, (*config.using, *user_patterns)))
    held = frozenset(primitives(closed_jaxpr))
    return Program(closed_jaxpr, closed_jaxpr, config, patterns, held, placement)


def _prepared(program: Program) -> Program:
    """The program after `PREPARE`; without patterns if none can occur in it."""
    return _after_passes(program, _Clock(), PREPARE)


def _prepared_and_folded(start: Program, clock: _Clock) -> Program:
    """The program after `PREPARE`, perhaps with equal layers left out already.

    Most programs are changed by none of the passes of `PREPARE`. Those passes then look
    at a few layers in place of all. If one does change these, all are prepared.
    """
    short = replace(start, behind=FEWEST)
    if start.patterns:
        short = _after_passes(short, clock, [FOLD])
    if short.folded is not None:
        ready = _after_passes(short, clock, PREPARE)
        if not ready.patterns:
            return replace(ready, closed_jaxpr=start.closed_jaxpr, folded=None)
        if ready.closed_jaxpr is short.closed_jaxpr:
            return ready
    return _after_passes(replace(start, failures=short.failures), clock, PREPARE)


def _later_passes(without: str = "") -> list[Pass]:
    """The passes after `PREPARE`, but one."""
    return [p for p in PASSES[len(PREPARE) :] if p.name != without]


def _after_passes(program: Program, clock: _Clock, passes: Sequence[Pass]) -> Program:
    """The program after some passes but those that are disabled."""
    for step in passes:
        if step.name in program.config.disable or not step.when(program):
            continue
        before, program = program, _after_pass(program, step)
        clock(step.name)
        if os.environ.get("REWRITER_VALIDATE", "0") != "0":
            validate(step.name, before, program)
        log.debug("%s: %.1f ms", step.name, 1e3 * clock.seconds[step.name])
    return program


def _after_pass(program: Program, step: Pass) -> Program:
    """The program after a pass; an optional one that fails is left out, and said."""
    try:
        return step.run(program)
    except (RewriterError, TurnsDiffer):
        raise
    except Exception as error:
        if not step.optional:
            raise
        log.debug("%s failed", step.name, exc_info=error)
        text = f"the pass {step.name}: {type(error).__name__}: {error}"
        failures = (*program.failures, Reason("internal", text))
        return replace(program, failures=failures)


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def __call__(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = now - self.last
        self.last = now
