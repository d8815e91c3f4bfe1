"""Measures the seconds per run of compiled programs, on the device's own clock.

The rules: programs take turns, and the order is reversed each time, so that a machine
that slows down slows all of them. Each run uses the next of several sets of inputs, so
that no run finds its own inputs in a cache. Compilation and the first run do not count.
The program returns every result, and the timing waits for all of them.

On NVIDIA GPUs the time is CUPTI's, summed over all kernels of a run. On TPUs it is the
profiler's, summed over the programs that ran (`profile`, not run on a TPU yet). The
wall clock is used on other devices, and where the profiler is busy or sees nothing. JAX
offers neither CUDA's events nor the replay of a captured graph. So on a GPU the wall
clock times `IN_A_ROW` - 1 runs in a row and waits for all of them together. They are
launched ahead of the device: only runs shorter than their launch (some 10 µs) show the
launch. Such times say ``"wall clock"`` and are compared only with others of their kind,
as all candidates of a site are timed in one way.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from rewriter import _jax
from rewriter.hardware import profile

Program = Callable[..., Any]

WALL = "wall clock"
"""The method that is always there."""

TURN_S = 0.2
"""The longest turn of one program in seconds, after its first two runs."""

IN_A_ROW = 12
"""The most runs in a turn, by the wall clock."""


@dataclass(frozen=True)
class Samples:
    """Times of one program.

    Attributes:
        seconds: One per turn.
        method: ``"cupti"``, ``"profiler"`` or ``"wall clock"``.
        kernels: Names of the GPU kernels, or TPU programs, of one run, where known.

    Example:
        >>> times = Samples((1.0, 1.1, 1.2, 9.0), "wall clock")
        >>> round(times.median, 2), times.minimum
        (1.15, 1.0)
    """

    seconds: tuple[float, ...]
    method: str
    kernels: tuple[str, ...] = ()

    @property
    def median(self) -> float:
        """The median, in seconds."""
        return statistics.median(self.seconds)

    @property
    def minimum(self) -> float:
        """The shortest time, in seconds."""
        return min(self.seconds)

    @property
    def sigma(self) -> float:
        """The spread of one sample, in seconds; robust, as a standard deviation."""
        median = self.median
        return 1.4826 * statistics.median(abs(s - median) for s in self.seconds)

    @property
    def error(self) -> float:
        """The standard error of the median, in seconds."""
        return 1.2533 * self.sigma / len(self.seconds) ** 0.5

    def __add__(self, other: Samples) -> Samples:
        """Returns the samples of both."""
        return Samples(self.seconds + other.seconds, self.method, self.kernels)


def method() -> str:
    """Returns how time is taken on the default device.

    Example:
        >>> import jax
        >>> method() if jax.default_backend() == "cpu" else "wall clock"
        'wall clock'
    """
    backend = jax.default_backend()
    if backend == "tpu":
        return "profiler"
    return "cupti" if backend == "gpu" and _jax.has_cupti() else WALL


def measure(
    programs: Sequence[Program],
    inputs: Sequence[Sequence[Any]],
    turns: int = 20,
    *,
    by: str | None = None,
    until: float | None = None,
    turn_s: float = TURN_S,
) -> list[Samples]:
    """Returns the times of programs that take turns.

    Args:
        programs: Compiled functions of one set of inputs. Each has run before.
        inputs: Sets of inputs, used one after the other by all programs.
        turns: Samples of each program.
        by: ``"cupti"``, ``"profiler"`` or ``"wall clock"``; by default what the
            device allows, and the wall clock where it saw nothing, as of a program
            that only returns its arguments.
        until: A `time.monotonic` after which no turn begins; every program has had
            one turn at least.
        turn_s: The longest turn by the wall clock, after its first two runs.

    Raises:
        ValueError: If there are no inputs or no turns.
    """
    if not inputs or turns < 1:
        raise ValueError(f"{len(inputs)} sets of inputs, {turns} turns: want one each")
    try:
        return _in_turns(programs, inputs, turns, by or method(), until, turn_s)
    except _jax.NothingSeen:
        if by:
            raise
        return _in_turns(programs, inputs, turns, WALL, until, turn_s)


def _in_turns(
    programs: Sequence[Program],
    inputs: Sequence[Sequence[Any]],
    turns: int,
    by: str,
    until: float | None,
    turn_s: float,
) -> list[Samples]:
    times: list[list[float]] = [[] for _ in programs]
    names: list[tuple[str, ...]] = [()] * len(programs)
    for turn in range(turns):
        if turn and until is not None and time.monotonic() > until:
            break
        rotated = [inputs[(turn + k) % len(inputs)] for k in range(len(inputs))]
        order = range(len(programs))
        for i in order if turn % 2 == 0 else reversed(order):
            if by == "cupti":
                seconds, names[i] = _by_cupti(programs[i], rotated[0])
            elif by == "profiler":
                run = functools.partial(programs[i], *rotated[0])
                seconds, names[i] = profile.seconds(run)
            else:
                seconds = _by_wall_clock(programs[i], rotated, turn_s)
            times[i].append(seconds)
    return [Samples(tuple(t), by, n) for t, n in zip(times, names, strict=True)]


def _by_cupti(program: Program, args: Sequence[Any]) -> tuple[float, tuple[str, ...]]:
    kernels = _jax.kernel_seconds(lambda: program(*args))
    return sum(s for _, s in kernels), tuple(n for n, _ in kernels)


def _by_wall_clock(
    program: Program, sets: Sequence[Sequence[Any]], turn_s: float
) -> float:
    """Seconds of one run, among runs in a row.

    The first run does not count: it finds caches and idle cores as the previous program
    left them. Where launching is asynchronous, the timing waits for all runs together.
    """
    if jax.default_backend() == "cpu":
        return _one_by_one(program, sets, turn_s)
    jax.block_until_ready(program(*sets[0]))
    start = time.perf_counter()
    outs = [program(*sets[k % len(sets)]) for k in range(1, IN_A_ROW)]
    jax.block_until_ready(outs)
    return (time.perf_counter() - start) / (IN_A_ROW - 1)


def _one_by_one(
    program: Program, sets: Sequence[Sequence[Any]], turn_s: float
) -> float:
    runs: list[float] = []
    while len(runs) < 2 or (len(runs) < IN_A_ROW and sum(runs) < turn_s):
        args = sets[len(runs) % len(sets)]
        start = time.perf_counter()
        jax.block_until_ready(program(*args))
        runs.append(time.perf_counter() - start)
    return statistics.median(runs[1:])
