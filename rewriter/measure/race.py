"""Compiles, checks and times candidates against each other.

Kernels are compiled in threads while inputs are drawn and XLA's programs compiled. Then
candidates are checked one by one, and timed in turns. Those that are far behind after a
few turns are dropped. A candidate that fails, hangs in compilation or gives other
numbers becomes a measurement with a problem instead of a time; the others go on.

On a GPU, an op that has a general form is compared with it, since XLA compiles that
form soon. Three kinds of candidates are left out:

- XLA's own, if its operations alone take longer than the best of the others;
- backward kernels behind such a forward;
- kernels whose own estimates are several times the best one's.

XLA's candidate is the user's own equations where a task has them, on leaves whose
operands are like those of the others. Otherwise, with a note, it is the op as usually
written.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from rewriter.hardware import conditions
from rewriter.hardware.conditions import Conditions
from rewriter.measure import candidate
from rewriter.measure.candidate import Candidate, Compiled, wide
from rewriter.measure.inputs import Args, Inputs, inputs, with_leaves
from rewriter.measure.least_time import needed_seconds
from rewriter.measure.measurement import Measurement, time_text
from rewriter.measure.original_region import NotTaken
from rewriter.measure.programs import (
    Task,
    arguments,
    function,
    general,
    own_equations,
    reference,
)
from rewriter.measure.times import Times, measurement, time_in_turns
from rewriter.ops.device import Device
from rewriter.ops.registry import REFERENCE as PLAIN
from rewriter.site.implementation import XLA, Implementation
from rewriter.support.threads import (
    check_stop,
    first_line,
    start_in_background,
    stopping,
)

log = logging.getLogger("rewriter.tune")

COMPILING, COMPILED = 0.5, 0.75
"""Shares of a site's seconds. No compilation begins after the first. One begins only if
it should end by the second, at the average duration of the others."""

HUNG_S = 60.0
"""Seconds after which a compilation is abandoned."""

STAGES = ((1, 3.0), (3, 1.3), (10, 1.1), (20, math.inf))
"""(turns, ratio): after so many turns, candidates slower than the best by that ratio
are dropped."""

ENOUGH = 3
"""The fewest turns for which an interrupted race counts: one turn has no spread."""

OTHER = 0.25
"""Relative error from which extracted equations count as different."""

REFERENCE = "the reference"
"""The name of the reference in reasons."""

NO_REFERENCE = "the op as usually written, since the reference did not run"

SPARED = 2.0
"""XLA's program may be skipped if it has so many times the op's operations."""

HOPELESS = 3.0
"""Kernels with estimates of so many times the best one's may be skipped."""

TURN_S = 0.05
"""Seconds of a turn by the wall clock."""


@dataclass
class Race:
    """The candidates of one task: compiled, checked, timed.

    Attributes:
        task: The task.
        on: The device.
        until: The `time.monotonic` by which the race should end.
        latest: The `time.monotonic` at which the whole budget ends.
        say: Called with the number of finished candidates, and their total.
        spares: Whether hopeless candidates may be skipped.
    """

    task: Task
    on: Device
    until: float
    latest: float
    say: Callable[[int, int], None]
    spares: bool = True

    def run(self, wanted: Sequence[Implementation]) -> list[Measurement]:
        """Returns one measurement for each candidate."""
        seconds = self.until - time.monotonic()
        try:
            with self._stage("drawn and compiled"):
                drawn, truth, compiled = self._compiled(wanted)
            for c in (truth, *compiled):
                log.debug("  %.1f s: %s%s", c.seconds, c.name, c.reason and ": no")
            with self._stage("checked"):
                done = self._checked(compiled, truth, drawn)
        except Exception as problem:
            reason = f"no inputs: {first_line(problem)}"
            return [self._measured(i, Compiled(i.text, reason=reason)) for i in wanted]
        with self._stage("timed"):
            times, done = self._timed(done, drawn)
        least = min((c.least_s for c in done if c.least_s), default=math.inf)
        best = min((t.median for t in times.values()), default=math.inf)
        if self.spares and least <= best and math.isfinite(least):
            until = min(time.monotonic() + seconds, self.latest)
            return replace(self, spares=False, until=until).run(wanted)
        at = conditions.now()
        return [
            self._measured(i, c, times.get(c.name), at)
            for i, c in zip(wanted, done, strict=True)
        ]

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Logs the duration of a stage."""
        begin = time.monotonic()
        yield
        took = time.monotonic() - begin
        log.debug("%s: %s in %.1f s", self.task.key(self.on).text, name, took)

    def _measured(
        self,
        implementation: Implementation,
        c: Compiled,
        times: Times | None = None,
        at: Conditions | None = None,
    ) -> Measurement:
        version = self.task.version_of(implementation)
        if times is None or c.reason:
            reason = c.reason or "was not timed"
            return Measurement(
                implementation, version, jax.__version__, None, problem=reason
            )
        return measurement(implementation, version, times, c, at or Conditions())

    # ---------------------------------------------------------- as it is written
    def _written(
        self, wanted: bool
    ) -> tuple[tuple[Inputs, ...], Compiled, Compiled | None]:
        """Inputs, the compiled reference, and XLA's candidate if wanted.

        XLA's candidate shares the reference's program, if it is the op's reference on
        operands so narrow that their products have full precision anyway.
        """
        with self._stage("drawn inputs"):
            drawn = inputs(self.task, self.on)
            drawn, note = self._with_leaves(drawn) if wanted else (drawn, "")
        exact = self._reference()
        if not wanted:
            (truth,) = self._compiled_by_xla(drawn, exact)
            return drawn, truth, None
        usual = self.task.op.usual is None and bool(note or not drawn[0].leaves)
        if usual and not exact.soon and not wide(drawn[0].sets[0]):
            own = self._usual_spelling(drawn, note)
            return drawn, replace(own, name=REFERENCE, note=""), own
        truth, own = self._compiled_by_xla(drawn, exact, self._xla(drawn, note))
        return drawn, truth, replace(own, note=note)

    def _with_leaves(self, drawn: tuple[Inputs, ...]) -> tuple[tuple[Inputs, ...], str]:
        """The inputs with leaves for the user's own equations, or why not."""
        if self.task.written is None:
            return drawn, _instead(self.task.unwritten)
        try:
            return with_leaves(self.task, drawn), ""
        except Exception as problem:  # also errors of the device or of a sample
            why = str(problem) if isinstance(problem, NotTaken) else first_line(problem)
            return drawn, _instead(why)

    def _xla(self, drawn: Sequence[Inputs], note: str) -> Candidate:
        """XLA's candidate: the user's own equations, or the usual ones with a note."""
        if drawn[0].leaves and not note:
            own, _ = own_equations(self.task)
            return Candidate(XLA, own, limit=self._limit())
        return Candidate(
            XLA, function(self.task, Implementation()), limit=self._limit()
        )

    def _usual_spelling(self, drawn: Sequence[Inputs], note: str) -> Compiled:
        """The compiled op as usually written."""
        plain = [replace(d, leaves=()) for d in drawn]
        (found,) = self._compiled_by_xla(plain, self._xla(plain, note))
        return replace(found, note=note)

    def _compiled_by_xla(
        self, drawn: Sequence[Inputs], *candidates: Candidate
    ) -> list[Compiled]:
        """Compiles programs without a time limit: all others are compared with them."""
        jobs: list[tuple[Candidate, Args, Any]] = []
        for c in candidates:
            args, exact = drawn[0].sets[0], reference(self.task)
            if c.name == XLA and drawn[0].leaves:
                args, exact = drawn[0].leaves[0], own_equations(self.task)[1]
            jobs.append((c, args, jax.eval_shape(exact, *args)))
        now = time.monotonic()
        return candidate.compile_all(jobs, now, self._compile_deadline(), len(jobs))

    def _own(self, c: Compiled, drawn: Sequence[Inputs]) -> Compiled:
        """The user's own equations, checked; else the op as usually written."""
        firsts = [d.leaves[0] for d in drawn]
        _, exact = own_equations(self.task)
        own = c
        if not c.reason:
            job = Candidate(REFERENCE, exact, exact=True), firsts[0], None
            now = time.monotonic()
            (truth,) = candidate.compile_all([job], now, self._compile_deadline())
            (own,) = candidate.checked([c], truth, firsts)
        if not own.reason and own.error is not None and own.error < OTHER:
            return replace(own, of_leaves=True)
        why = own.reason or own.note
        if own.error is not None and own.error >= OTHER:
            why = f"differ by {own.error:.0e} on their own"
        return self._usual_spelling(drawn, _instead(why))

    # ------------------------------------------------------------- compiling
    def _compiled(
        self, wanted: Sequence[Implementation]
    ) -> tuple[tuple[Inputs, ...], Compiled, list[Compiled]]:
        """Inputs, the compiled reference, and candidates or reasons against them."""
        kernels = [i for i in wanted if i.forward != XLA]
        written = start_in_background(lambda: self._written(len(kernels) < len(wanted)))
        mine = iter(self._compiled_kernels(kernels))
        drawn, truth, own = written()
        compiled = [own if i.forward == XLA else next(mine) for i in wanted]
        return drawn, truth, [c for c in compiled if c is not None]

    def _reference(self) -> Candidate:
        """The reference that candidates are compared with."""
        soon = general(self.task) if self.on.platform == "cuda" else None
        if soon is None:
            return Candidate(REFERENCE, reference(self.task), exact=True)
        return Candidate(REFERENCE, soon, exact=True, soon=True)

    def _limit(self) -> tuple[Device, float] | None:
        """The limit for XLA's own operations in seconds; None for no limit."""
        if not self.spares or not self._reference().soon:
            return None
        task = self.task
        needed = needed_seconds(task.op, task.spec, task.passes, self.on)
        return (self.on, SPARED * needed) if needed else None

    def _slow_by_estimate(
        self, wanted: Sequence[Implementation]
    ) -> dict[str, Compiled]:
        """Candidates whose estimates are far slower than the best, by text."""
        if not (self.spares and self.on.flops and self.on.bandwidth):
            return {}
        spec, passes = self.task.spec, self.task.passes
        models = {k.name: k.speed.estimate for k in self.task.kernels}
        named = {name: model for name, model in models.items() if model}
        own = {n: named[n](spec, self.on, passes)[n] for n in sorted(named)
               if any(n in i.kernels for i in wanted)}  # fmt: skip
        if len(own) < 2:
            return {}
        best, found = min(own, key=own.__getitem__), {}
        for i in wanted:
            takes = max((own.get(n, 0.0) for n in i.kernels), default=0.0)
            if takes > HOPELESS * own[best]:
                text = time_text(1e6 * takes)
                why = f"not compiled: estimated to take {text}, and {best} "
                why += time_text(1e6 * own[best])
                found[i.text] = Compiled(i.text, reason=why, least_s=takes)
        return found

    def _compiled_kernels(self, wanted: Sequence[Implementation]) -> list[Compiled]:
        """The compiled programs of kernels, or reasons for having none.

        Compilations that have begun are awaited, since XLA times products on the device
        while it compiles, which would disturb other timings. One that hangs is
        abandoned. Each kernel's first config is compiled before others, however late it
        is: a choice among an arbitrary few would be worse than none.
        """
        args, hopeless = arguments(self.task), self._slow_by_estimate(wanted)
        shapes = jax.eval_shape(reference(self.task), *args)
        hopeful = [i for i in wanted if i.text not in hopeless]
        jobs: list[tuple[Candidate, Args, Any]] = []
        for i in hopeful:
            limit = self._limit() if i.forward == PLAIN else None
            run = lambda *x, i=i: function(self.task, i)(*x)  # which may raise
            jobs.append((Candidate(i.text, run, limit=limit), args, shapes))
        now = time.monotonic()
        left = max(0.0, self.until - now)
        order, surely = one_of_each_first([i.forward for i in hopeful])
        found = candidate.compile_all(
            [jobs[i] for i in order],
            now + COMPILING * left,
            self._compile_deadline(),
            surely,
            now + COMPILED * left,
        )
        by_text = {hopeful[i].text: c for i, c in zip(order, found, strict=True)}
        return [{**hopeless, **by_text}[i.text] for i in wanted]

    def _checked(
        self, compiled: list[Compiled], truth: Compiled, drawn: Sequence[Inputs]
    ) -> list[Compiled]:
        """The candidates with correct numbers, or the reasons against the others."""
        firsts = [d.sets[0] for d in drawn]
        say = lambda n: self.say(n, len(compiled))
        own = None
        if drawn[0].leaves and compiled[0].name == XLA and not compiled[0].least_s:
            compiled = [self._own(compiled[0], drawn), *compiled[1:]]
            own = compiled[0] if compiled[0].of_leaves else None
        if own is None:
            return candidate.checked(compiled, truth, firsts, say)
        rest = candidate.checked(compiled[1:], truth, firsts, say, own.error or 0.0)
        if any(c.note for c in rest):  # the reference did not run: compare with XLA
            usual = self._usual_spelling(drawn, NO_REFERENCE)
            return candidate.checked([usual, *compiled[1:]], truth, firsts, say)
        return [own, *rest]

    def _compile_deadline(self) -> float:
        """The time at which a compilation that begins now is abandoned."""
        now = time.monotonic()
        return min(now + HUNG_S, max(self.latest, now + 1))

    # ---------------------------------------------------------------- timing
    def _timed(
        self, compiled: Sequence[Compiled], drawn: Sequence[Inputs]
    ) -> tuple[dict[str, Times], list[Compiled]]:
        alive = [c for c in compiled if not c.reason]
        times: dict[str, Times] = {}
        failed: dict[str, str] = {}
        done = 0
        for turns, factor in STAGES:
            if stopping() and done < ENOUGH:
                check_stop()
            late = stopping() or time.monotonic() > self.until
            if not alive or (done and late):
                break
            found = time_in_turns(
                alive, drawn, turns - done, until=self.until, turn_s=TURN_S
            )
            for c in alive:
                more = found[c.name]
                if isinstance(more, str):
                    failed[c.name] = more
                else:
                    times[c.name] = times[c.name] + more if c.name in times else more
            alive = [c for c in alive if c.name not in failed]
            best = min((times[c.name].median for c in alive), default=0.0)
            alive = [c for c in alive if times[c.name].median <= factor * best]
            done = turns
            self.say(len(compiled) - len(alive), len(compiled))
        return times, [
            replace(c, reason=c.reason or failed.get(c.name, "")) for c in compiled
        ]


def one_of_each_first(whose: Sequence[Any]) -> tuple[list[int], int]:
    """Returns an order with the first of each kind in front, and the number of kinds.

    Example:
        >>> one_of_each_first(["xla", "hopper", "hopper", "cudnn"])
        ([0, 1, 3, 2], 3)
    """
    first = {kind: i for i, kind in reversed([*enumerate(whose)])}
    ahead = sorted(first.values())
    return [*ahead, *(i for i in range(len(whose)) if i not in ahead)], len(ahead)


def _instead(why: str) -> str:
    """The note for measuring the op as usually written instead."""
    return f"the op as usually written, since its own equations {why}" if why else ""
