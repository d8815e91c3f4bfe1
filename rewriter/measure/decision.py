"""Picks the fastest measurement, with the reasons against the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rewriter.measure.measurement import (
    BUNDLES,
    ESTIMATES,
    SIMULATED,
    Measurement,
    time_text,
)
from rewriter.site.implementation import XLA

TIE = 0.02
"""Two implementations whose times differ by less than this share are equally fast."""

UNMODELLED = 0.2
"""The same for the program as written, where times are simulated: the simulator does
not see the memory traffic of other copies."""

SAVING = 64 << 20
"""Saved bytes of temporary memory that decide between equally fast ones."""


@dataclass(frozen=True)
class Decision:
    """The best of some measurements.

    Attributes:
        best: What won.
        lost: (kernels' names, reason) for the others, fastest first.
    """

    best: Measurement
    lost: tuple[tuple[str, str], ...]


def fastest(measurements: Sequence[Measurement]) -> Decision | None:
    """Returns the fastest implementation; XLA unless one is clearly better.

    An implementation wins over the program as written in one of two ways. It is faster
    by more than 2 % and three standard errors (20 % if times are simulated). Or it
    saves half the temporary memory, and 64 MiB, at the same speed. Among equals the one
    with the least memory wins, then the fastest. Measurements take precedence over
    estimates.

    Returns:
        None if nothing has a time, or if only incomparable estimates exist: instruction
        bundles rank only the configs of one kernel.
    """
    timed = [m for m in measurements if m.median_us is not None]
    timed = [m for m in timed if m.method not in ESTIMATES] or timed
    if not timed or not _comparable(timed):
        return None
    shortest = min(timed, key=by_time)
    level = [m for m in timed if not _slower(m, shortest)]
    best = min(level, key=lambda m: (_rounded(m.temp_bytes), by_time(m)))
    written = next((m for m in timed if m.implementation.forward == XLA), None)
    if written is not None and best is not written and not _slower(written, best):
        level = [m for m in timed if not _slower(m, written) and _saves(m, written)]
        best = min(level, key=by_time) if level else written
    lost = tuple(
        (m.implementation.name, why_not(m, best))
        for m in sorted(measurements, key=by_time)
        if m is not best
    )
    return Decision(best, lost)


def _comparable(timed: Sequence[Measurement]) -> bool:
    counted = [m for m in timed if m.method == BUNDLES]
    return not counted or (
        len(counted) == len(timed)
        and len({m.implementation.kernels for m in timed}) == 1
    )


def within_kernel(m: Measurement, measurements: Sequence[Measurement]) -> str:
    """Returns a config's rank within its kernel in words, if nothing is decided."""
    same = [
        o
        for o in measurements
        if o.implementation.kernels == m.implementation.kernels
        and o.method == m.method
        and o.median_us is not None
    ]
    best = min(same, key=by_time)
    if len(same) == 1:
        return "not compared with others"
    if m is best:
        return "the best of its configs, not compared with others"
    return f"{by_time(m) / by_time(best):.2f} times as long as the best of its configs"


def by_time(m: Measurement) -> float:
    """Returns the time to sort by; infinite where there is none."""
    return math.inf if m.median_us is None else m.median_us


def _rounded(size: int | None) -> float:
    """Rounds a size, so that sizes with a small difference become equal."""
    return math.inf if size is None else round(math.log2(size + SAVING) * 4)


def _slower(m: Measurement, than: Measurement) -> bool:
    """Whether a time is longer by more than 2 % and three standard errors."""
    gap = by_time(m) - by_time(than)
    against_xla = XLA in (m.implementation.forward, than.implementation.forward)
    tie = UNMODELLED if against_xla and SIMULATED in (m.method, than.method) else TIE
    return gap > max(tie * by_time(than), 3 * math.hypot(m.error_us, than.error_us))


def _saves(m: Measurement, than: Measurement) -> bool:
    if m.temp_bytes is None or than.temp_bytes is None:
        return False
    saved = than.temp_bytes - m.temp_bytes
    return saved >= SAVING and 2 * m.temp_bytes <= than.temp_bytes


def why_not(m: Measurement, best: Measurement) -> str:
    """Returns in words why a measurement lost against the best."""
    if m.median_us is None:
        return m.problem
    if m.method in ESTIMATES and best.method not in ESTIMATES:
        return f"{time_text(m.median_us)} {m.method}, and others were measured"
    ratio = m.median_us / by_time(best)
    times = f"{time_text(m.median_us)} against {time_text(by_time(best))}"
    if ratio > 1 + TIE:
        return f"{ratio:.2f} times as long: {times}"
    return f"not faster by more than the noise, {times}, and saves no memory"
