"""Candidates in, measurements out: compiled, checked and timed against each other.

Candidates are compiled side by side in threads, then run one by one: each must first
give the reference's numbers on the inputs it is timed on. Those that are far behind
after a few runs are dropped. One that fails, hangs in compilation or gives other
numbers is a measurement with a problem instead of a time; the others go on.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rewriter import oracle, timing
from rewriter.device import Device
from rewriter.implementation import XLA, Implementation
from rewriter.key import PROGRAM
from rewriter.measurement import Measurement, version_of
from rewriter.programs import Task, function, inputs, reference
from rewriter.threads import first_line, side_by_side

log = logging.getLogger("rewriter.tune")

Compiled = Any

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
            sets = inputs(self.task, self.on)
        except Exception as problem:
            return [
                self._failed(i, f"no inputs: {first_line(problem)}") for i in wanted
            ]
        programs = self._compiled(wanted, sets[0])
        checked = self._checked(wanted, programs, sets[0])
        times, problems = self._timed(wanted, checked, sets)
        return [
            self._failed(i, problems[i])
            if i in problems
            else self._measured(i, times[i], checked[i])
            for i in wanted
        ]

    def _failed(self, made: Implementation, problem: str) -> Measurement:
        version = version_of(made, {k.name: k for k in self.task.kernels})
        return Measurement(made, version, jax.__version__, None, problem=problem)

    def _measured(
        self, made: Implementation, samples: timing.Samples, program: Compiled
    ) -> Measurement:
        version = version_of(made, {k.name: k for k in self.task.kernels})
        return measurement(made, version, samples, program)

    # ------------------------------------------------------------- compiling
    def _compiled(
        self, wanted: Sequence[Implementation], args: Sequence[Any]
    ) -> dict[Implementation, Compiled | str]:
        """Compiled programs, or why there is none.

        What has begun is waited for, since XLA times products on the device while it
        compiles and would disturb the timing of others; one that hangs is left behind.
        """
        jobs = [
            functools.partial(self._compile, function(self.task, made), args)
            for made in wanted
        ]
        left = max(0.0, self.until - time.monotonic())
        now = time.monotonic()
        begin = now + COMPILING * left
        found = side_by_side(jobs, start_by=begin, end_by=self._hung())
        return dict(zip(wanted, found, strict=True))

    def _hung(self) -> float:
        """When a compilation that begins now is left behind."""
        now = time.monotonic()
        return min(now + HUNG_S, max(self.latest, now + 1))

    def _compile(self, run: Callable[..., Any], args: Sequence[Any]) -> Compiled:
        return jax.jit(run).lower(*args).compile()

    # -------------------------------------------------------------- checking
    def _checked(
        self,
        wanted: Sequence[Implementation],
        programs: Mapping[Implementation, Compiled | str],
        args: Sequence[Any],
    ) -> dict[Implementation, Compiled | str]:
        """The programs whose numbers are right, or what is wrong with the others."""
        want, source = self._wanted(args)
        limits: list[float] = []
        checked: dict[Implementation, Compiled | str] = {}
        for i, made in enumerate(wanted):
            self.say(i, len(wanted))
            program = programs[made]
            if not isinstance(program, str):
                program = self._tried(program, args, want, made, limits, source)
            checked[made] = program
            if want is None and not isinstance(program, str):
                want = list(jax.tree.leaves(program(*args)))
                source = "the reference" if made.forward == XLA else made.name
        return checked

    def _wanted(self, args: Sequence[Any]) -> tuple[list[Any] | None, str]:
        """The reference's results, at full precision for wide operands.

        None where it cannot be run: then the first that runs is the measure.
        """
        wide = any(a.dtype.itemsize >= 4 for a in args if _is_float(a))

        def run() -> list[Any]:
            with jax.default_matmul_precision("highest" if wide else None):
                exact = reference(self.task)
                return list(jax.tree.leaves(jax.jit(exact)(*args)))

        now = time.monotonic()
        (out,) = side_by_side([run], start_by=now, end_by=self._hung())
        if isinstance(out, str):
            log.debug("%s: no exact reference: %s", self.task.spec.op, out)
            return None, ""
        return out, "the reference"

    def _tried(
        self,
        program: Compiled,
        args: Sequence[Any],
        want: list[Any] | None,
        made: Implementation,
        limits: list[float],
        source: str,
    ) -> Compiled | str:
        if problem := _too_large(program):
            return problem
        try:
            got = jax.tree.leaves(program(*args))
            jax.block_until_ready(got)
            if want is None:
                return program
            errors = [float(_error(g, w)) for g, w in zip(got, want, strict=True)]
        except Exception as problem:
            return f"does not run: {first_line(problem)}"
        if made.forward == XLA:
            limits.extend(2 * e for e in errors)
            return program
        for n, (e, g) in enumerate(zip(errors, got, strict=True)):
            limit = max(oracle.allowed(g.dtype), limits[n] if limits else 0.0)
            if not e <= limit:
                which = "result" if n == 0 else f"gradient {n}"
                return f"wrong: {which} differs from {source} by {e:.1e}"
        return program

    # ---------------------------------------------------------------- timing
    def _timed(
        self,
        wanted: Sequence[Implementation],
        checked: Mapping[Implementation, Compiled | str],
        sets: Sequence[Sequence[Any]],
    ) -> tuple[dict[Implementation, timing.Samples], dict[Implementation, str]]:
        problems = {i: p for i, p in checked.items() if isinstance(p, str)}
        alive = [i for i in wanted if i not in problems]
        times: dict[Implementation, timing.Samples] = {}
        done = 0
        for turns, factor in STAGES:
            if not alive or (done and time.monotonic() > self.until):
                break
            programs = [checked[i] for i in alive]
            try:
                found = timing.measure(
                    programs, sets, turns - done, until=self.until, turn_s=TURN_S
                )
            except Exception as problem:
                text = f"does not run: {first_line(problem)}"
                late = {i: text for i in alive if i not in times}
                return times, problems | late
            for i, samples in zip(alive, found, strict=True):
                times[i] = times[i] + samples if i in times else samples
            best = min(times[i].median for i in alive)
            alive = [i for i in alive if times[i].median <= factor * best]
            done = turns
            self.say(len(wanted) - len(alive), len(wanted))
        return times, problems


def race_programs(
    programs: Mapping[str, Any], leaves: Sequence[Any]
) -> tuple[Measurement, ...]:
    """Returns the times of whole programs on the same arguments, in turns.

    Args:
        programs: Jitted functions by the name of what was done to them.
        leaves: Their arguments.
    """
    jobs = [lambda p=p: p.lower(*leaves).compile() for p in programs.values()]
    forever = time.monotonic() + 1e6
    made = dict(zip(programs, side_by_side(jobs, forever, forever), strict=True))
    problems = {n: p for n, p in made.items() if isinstance(p, str)}
    for name, program in made.items():
        if name not in problems:
            try:
                jax.block_until_ready(program(*leaves))
            except Exception as problem:
                problems[name] = f"does not run: {first_line(problem)}"
    alive = [n for n in made if n not in problems]
    times = timing.measure([made[n] for n in alive], [leaves], WHOLE_TURNS)
    found = [
        measurement(Implementation(n), PROGRAM, s, made[n])
        for n, s in zip(alive, times, strict=True)
    ]
    failed = [
        Measurement(Implementation(n), PROGRAM, jax.__version__, None, problem=p)
        for n, p in problems.items()
    ]
    return (*found, *failed)


def measurement(
    made: Implementation, version: str, samples: timing.Samples, program: Compiled
) -> Measurement:
    """Returns the samples of a compiled program as a measurement."""
    return Measurement(
        made,
        version,
        jax.__version__,
        median_us=round(1e6 * samples.median, 3),
        sigma_us=round(1e6 * samples.sigma, 3),
        runs=len(samples.seconds),
        method=samples.method,
        temp_bytes=temp_bytes(program),
    )


def temp_bytes(program: Compiled) -> int | None:
    """Returns a compiled program's temporary memory, where the backend says."""
    try:
        return int(program.memory_analysis().temp_size_in_bytes)
    except Exception:  # a backend without the analysis
        return None


def _too_large(program: Compiled) -> str:
    """Why a program will not fit into what is left of the device's memory, or ''."""
    need = temp_bytes(program)
    stats = jax.devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    if need is None or not limit:
        return ""
    free = limit - stats.get("bytes_in_use", 0)
    if need <= free:
        return ""
    return f"out of memory: takes {need / 2**30:.1f} GiB of {free / 2**30:.1f} GiB"


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


@jax.jit
def _error(got: Any, want: Any) -> Any:
    """The norm of the difference over that of ``want``, where ``want`` is finite."""
    wide = jnp.promote_types(jnp.result_type(got, want), jnp.float32)
    got, want = got.astype(wide), want.astype(wide)
    fine = jnp.isfinite(want)
    gap = jnp.where(fine, got - want, 0)
    norm = lambda x: jnp.sqrt(jnp.sum(jnp.square(jnp.abs(x))))
    size = norm(jnp.where(fine, want, 0))
    error = norm(gap) / jnp.where(size > 0, size, 1)
    return jnp.where(jnp.all(jnp.isfinite(gap)), error, jnp.inf)
