"""Times compiled programs in turns, for each distribution of inputs.

Where operands are drawn from several distributions, each is timed alone, and the mean
of the medians counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from rewriter.hardware import timing
from rewriter.hardware.conditions import Conditions
from rewriter.measure.candidate import Compiled, temp_bytes
from rewriter.measure.inputs import Args, Inputs
from rewriter.measure.measurement import Measurement, by_inputs_text
from rewriter.site.implementation import Implementation
from rewriter.support.threads import first_line

SHORTEST_US = 0.001
"""What is rounded to no time at all: a record of none would be taken for damage."""


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


def time_in_turns(
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
        found = [timing.measure(*_given(compiled, d), turns, **options) for d in drawn]
    except Exception as problem:
        if len(compiled) == 1:
            return {compiled[0].name: f"does not run: {first_line(problem)}"}
        alone = [time_in_turns([c], drawn, turns, **options) for c in compiled]
        return {name: times for one in alone for name, times in one.items()}
    names = [d.drawn for d in drawn]
    return {
        c.name: Times(dict(zip(names, samples, strict=True)))
        for c, samples in zip(compiled, zip(*found, strict=True), strict=True)
    }


def _given(
    compiled: Sequence[Compiled], drawn: Inputs
) -> tuple[list[Callable[..., Any]], Sequence[Args]]:
    """Programs and the inputs they all take: operands, and leaves where there are."""
    if not any(c.of_leaves for c in compiled):
        return [c.program for c in compiled], drawn.sets

    def taking(c: Compiled) -> Callable[..., Any]:
        return lambda sets, leaves: c.program(*(leaves if c.of_leaves else sets))

    pairs = list(zip(drawn.sets, drawn.leaves, strict=True))
    return [taking(c) for c in compiled], pairs


def measurement(
    implementation: Implementation,
    version: str,
    times: Times,
    c: Compiled,
    at: Conditions,
) -> Measurement:
    """Returns the times of a compiled program as a measurement."""
    return Measurement(
        implementation,
        version,
        jax.__version__,
        median_us=max(_us(times.median), SHORTEST_US),
        sigma_us=_us(times.sigma),
        runs=times.runs,
        method=times.method,
        temp_bytes=temp_bytes(c.program),
        note=c.note,
        clock_mhz=at.clock_mhz,
        driver=at.driver,
        by_inputs=tuple(
            (name, max(_us(s.median), SHORTEST_US))
            for name, s in times.by_inputs.items()
            if name
        ),
    )


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)
