"""Candidates in, measurements out: compiled, checked and timed against each other.

Candidates are compiled side by side in threads, then checked one by one, then timed in
turns. Those that are far behind after a few turns are dropped. One that fails, hangs in
compilation or gives other numbers is a measurement with a problem instead of a time;
the others go on.

Where the operands are drawn from several distributions, each is timed apart and the
mean of the medians counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from rewriter import candidate, timing
from rewriter.candidate import Candidate, Compiled, temp_bytes
from rewriter.device import Device
from rewriter.implementation import Implementation
from rewriter.inputs import Inputs, inputs
from rewriter.key import PROGRAM
from rewriter.measurement import Measurement, by_inputs_text, version_of
from rewriter.programs import Task, function, reference
from rewriter.threads import first_line, side_by_side

COMPILING = 0.5
"""The share of a site's seconds after which no compilation begins."""

HUNG_S = 60.0
"""Seconds after which a compilation is not waited for any more."""

STAGES = ((1, 3.0), (3, 1.3), (10, 1.1), (20, math.inf))
"""After so many turns, candidates that take so many times the best's are dropped."""

WHOLE_TURNS = 12
"""Turns of whole programs."""

TURN_S = 0.05
"""Seconds of a turn by the wall clock."""


@dataclass
class Race:
    """The candidates of one task: compiled, checked, timed.

    Attributes:
        task: The task.
        on: The device.
        until: The `time.monotonic` by which it should be done.
        latest: The one at which the whole budget ends.
        say: Told how many candidates are done, of how many.
    """

    task: Task
    on: Device
    until: float
    latest: float
    say: Callable[[int, int], None]

    def run(self, wanted: Sequence[Implementation]) -> list[Measurement]:
        """Returns one measurement for each candidate."""
        try:
            drawn = inputs(self.task, self.on)
            compiled = self._compiled(wanted, drawn[0].sets[0])
            truth = self._truth(drawn[0].sets[0])
        except Exception as problem:
            reason = f"no inputs: {first_line(problem)}"
            return [self._measured(i, Compiled(i.text, reason=reason)) for i in wanted]
        firsts = [d.sets[0] for d in drawn]
        done = candidate.checked(
            compiled, truth, firsts, lambda n: self.say(n, len(wanted))
        )
        times, done = self._timed(done, drawn)
        return [
            self._measured(i, c, times.get(c.name))
            for i, c in zip(wanted, done, strict=True)
        ]

    def _measured(
        self, made: Implementation, c: Compiled, times: Times | None = None
    ) -> Measurement:
        version = version_of(made, {k.name: k for k in self.task.kernels})
        if times is None or c.reason:
            reason = c.reason or "was not timed"
            return Measurement(made, version, jax.__version__, None, problem=reason)
        return measurement(made, version, times, c.program)

    # ------------------------------------------------------------- compiling
    def _compiled(
        self, wanted: Sequence[Implementation], args: Sequence[Any]
    ) -> list[Compiled]:
        """Compiled programs, or why there is none.

        What has begun is waited for, since XLA times products on the device while it
        compiles and would disturb the timing of others; one that hangs is left behind.
        """
        candidates = [
            Candidate(i.text, lambda *x, i=i: function(self.task, i)(*x))
            for i in wanted
        ]
        shapes = jax.eval_shape(reference(self.task), *args)
        now = time.monotonic()
        begin = now + COMPILING * max(0.0, self.until - now)
        return candidate.compile_all(
            candidates, tuple(args), shapes, begin, self._hung()
        )

    def _truth(self, args: Sequence[Any]) -> Compiled:
        """The reference at full precision, compiled."""
        one = Candidate("the reference", reference(self.task))
        with candidate.precise(tuple(args)):
            (found,) = candidate.compile_all(
                [one], tuple(args), None, time.monotonic(), self._hung()
            )
        return found

    def _hung(self) -> float:
        """When a compilation that begins now is left behind."""
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
            if not alive or (done and time.monotonic() > self.until):
                break
            found = time_apart(
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


# ----------------------------------------------------------------------- times
@dataclass(frozen=True)
class Times:
    """One program's times by distribution of its inputs.

    Attributes:
        by_inputs: Distribution to samples.
    """

    by_inputs: Mapping[str, timing.Samples]

    @property
    def median(self) -> float:
        """The mean over distributions of the median, in seconds."""
        return _mean([s.median for s in self.by_inputs.values()])

    @property
    def sigma(self) -> float:
        """The spread of one sample, in seconds."""
        return _mean([s.sigma**2 for s in self.by_inputs.values()]) ** 0.5

    @property
    def runs(self) -> int:
        """How many samples there are."""
        return sum(len(s.seconds) for s in self.by_inputs.values())

    @property
    def method(self) -> str:
        """How they were taken."""
        return next(iter(self.by_inputs.values())).method

    @property
    def as_one(self) -> timing.Samples:
        """Samples whose every turn is the mean over distributions."""
        turns = zip(*(s.seconds for s in self.by_inputs.values()), strict=False)
        first = next(iter(self.by_inputs.values()))
        return timing.Samples(tuple(map(_mean, turns)), first.method, first.kernels)

    @property
    def text(self) -> str:
        """The medians by distribution in words; empty if there is only one."""
        return by_inputs_text(
            [(n, 1e6 * s.median) for n, s in self.by_inputs.items() if n]
        )

    def __add__(self, other: Times) -> Times:
        """Returns the samples of both."""
        mine = self.by_inputs
        return Times({n: mine[n] + s for n, s in other.by_inputs.items()})


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def time_apart(
    compiled: Sequence[Compiled], drawn: Sequence[Inputs], turns: int, **options: Any
) -> dict[str, Times | str]:
    """Returns the times of programs that take turns, by name.

    In the place of the times of one that fails is why; the others are timed without
    it.

    Args:
        compiled: Checked programs.
        drawn: Sets of inputs by distribution.
        turns: Samples of each program for each distribution.
        **options: As in `timing.measure`.
    """
    if not compiled:
        return {}
    try:
        found = [
            timing.measure([c.program for c in compiled], d.sets, turns, **options)
            for d in drawn
        ]
    except Exception as problem:
        if len(compiled) == 1:
            return {compiled[0].name: f"does not run: {first_line(problem)}"}
        alone = [time_apart([c], drawn, turns, **options) for c in compiled]
        return {name: times for one in alone for name, times in one.items()}
    names = [d.drawn for d in drawn]
    return {
        c.name: Times(dict(zip(names, samples, strict=True)))
        for c, samples in zip(compiled, zip(*found, strict=True), strict=True)
    }


def measurement(
    made: Implementation, version: str, times: Times, program: Any
) -> Measurement:
    """Returns the times of a compiled program as a measurement."""
    return Measurement(
        made,
        version,
        jax.__version__,
        median_us=_us(times.median),
        sigma_us=_us(times.sigma),
        runs=times.runs,
        method=times.method,
        temp_bytes=temp_bytes(program),
        by_inputs=tuple(
            (name, _us(s.median)) for name, s in times.by_inputs.items() if name
        ),
    )


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)


# -------------------------------------------------------------- whole programs
def race_programs(
    programs: Mapping[str, Any], leaves: Sequence[Any]
) -> tuple[Measurement, ...]:
    """Returns the times of whole programs on the same arguments, in turns.

    Args:
        programs: Jitted functions by the name of what was done to them.
        leaves: Their arguments.
    """
    forever = time.monotonic() + 1e6
    jobs = [lambda p=p: p.lower(*leaves).compile() for p in programs.values()]
    made = side_by_side(jobs, forever, forever)
    compiled = [
        Compiled(n, reason=p) if isinstance(p, str) else _tried(Compiled(n, p), leaves)
        for n, p in zip(programs, made, strict=True)
    ]
    sets = [Inputs("", (tuple(leaves),))]
    times = time_apart([c for c in compiled if not c.reason], sets, WHOLE_TURNS)
    found = []
    for c in compiled:
        made, its = Implementation(c.name), times.get(c.name, c.reason)
        if isinstance(its, str):
            failed = Measurement(made, PROGRAM, jax.__version__, None, problem=its)
            found.append(failed)
        else:
            found.append(measurement(made, PROGRAM, its, c.program))
    return tuple(found)


def _tried(c: Compiled, leaves: Sequence[Any]) -> Compiled:
    try:
        jax.block_until_ready(c.program(*leaves))
    except Exception as problem:
        return replace(c, reason=f"does not run: {first_line(problem)}")
    return c
