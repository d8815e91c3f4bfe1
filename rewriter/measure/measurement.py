"""A measured time of an implementation, or the reason why it has none."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rewriter.measure.key import Key
from rewriter.ops.kernel import Kernel
from rewriter.site.implementation import XLA, Implementation

SIMULATED, BUNDLES = "simulated", "bundles"
"""Methods of estimates without the device: cycles of a whole program, or instruction
bundles of kernels times the steps that run them."""

ESTIMATES = (SIMULATED, BUNDLES)


@dataclass(frozen=True)
class Measurement:
    """One implementation's time, or why it has none.

    Attributes:
        implementation: The kernels and configs.
        version: The kernels' names and versions, such as ``"cudnn 1"``; ``"xla"`` for
            the op as it is usually written, ``"xla 9418af0a675a"`` for equations of
            a user's program with that digest.
        jax: The JAX version.
        median_us: Median device time of a run in microseconds; None if it failed.
        sigma_us: The spread of one run.
        runs: The number of runs.
        method: ``"cupti"``, ``"profiler"`` or ``"wall clock"``; or `SIMULATED` or
            `BUNDLES`.
        temp_bytes: Temporary memory of the compiled program, if known.
        problem: Why there is no time.
        by_inputs: (distribution of the inputs, median in microseconds) pairs where
            there were several; `median_us` is their mean.
        note: A remark, or ``""``.
        clock_mhz: The clock of a GPU's multiprocessors right after timing, if known.
        driver: The GPU's driver, if known; for an estimate, the compiler.
    """

    implementation: Implementation
    version: str
    jax: str
    median_us: float | None
    sigma_us: float = 0.0
    runs: int = 0
    method: str = ""
    temp_bytes: int | None = None
    problem: str = ""
    by_inputs: tuple[tuple[str, float], ...] = ()
    note: str = ""
    clock_mhz: int | None = None
    driver: str = ""

    @property
    def spelling(self) -> str:
        """For XLA, the digest of the equations measured; ``""`` for the usual ones."""
        first, _, digest = self.version.partition(" ")
        return digest if first == XLA else ""

    @property
    def error_us(self) -> float:
        """The standard error of the median, in microseconds."""
        return 1.2533 * self.sigma_us / max(1, self.runs) ** 0.5


Entry = tuple[Key, tuple[Measurement, ...]]


def version_of(
    implementation: Implementation, kernels: Mapping[str, Kernel], spelling: str = ""
) -> str:
    """Returns names and versions of an implementation's kernels, in words.

    Args:
        implementation: The implementation.
        kernels: Kernels by name.
        spelling: For XLA the digest of the equations that stand for it; empty for
            the op as it is usually written.
    """
    names = implementation.kernels
    plain = f"{XLA} {spelling}" if spelling else XLA
    return ", ".join(f"{n} {kernels[n].version}" for n in names) or plain


def spellings(measurements: Iterable[Measurement]) -> tuple[str, ...]:
    """Returns digests of equations XLA was measured on; ``""`` is the usual form."""
    found = (m.spelling for m in measurements if m.implementation.forward == XLA)
    return tuple(dict.fromkeys(found))


def of_spelling(
    measurements: Iterable[Measurement], spelling: str
) -> tuple[Measurement, ...]:
    """Returns the measurements of kernels, and the one of XLA for a spelling.

    XLA's is that of the spelling itself, else of the op as usually written, else of the
    fastest other spelling: a kernel must beat all that is known.
    """
    found = tuple(measurements)
    plain = [m for m in found if m.implementation.forward == XLA]
    if len(plain) < 2:
        return found
    by = {m.spelling: m for m in plain}
    fastest = min(plain, key=lambda m: m.median_us or math.inf)
    own = by.get(spelling) or by.get("") or fastest
    return tuple(m for m in found if m is own or m not in plain)


def merge(
    old: Iterable[Measurement], new: Iterable[Measurement]
) -> tuple[Measurement, ...]:
    """Merges two lists; of one implementation, version and JAX, the new one wins."""
    by = {(m.implementation, m.version, m.jax): m for m in old}
    by |= {(m.implementation, m.version, m.jax): m for m in new}
    return tuple(by.values())


def by_inputs_text(medians: Iterable[tuple[str, float]]) -> str:
    """Returns times by distribution in words; empty where there is none.

    Example:
        >>> by_inputs_text([("uniform", 10.0), ("one_hot", 20.0)])
        'mean of uniform 10 µs, one_hot 20 µs'
    """
    parts = ", ".join(f"{name} {time_text(us)}" for name, us in medians)
    return f"mean of {parts}" if parts else ""


def time_text(us: float) -> str:
    """Returns microseconds in words.

    Example:
        >>> time_text(412.13), time_text(999.9), time_text(5879.0), time_text(2.7e6)
        ('412 µs', '1 ms', '5.88 ms', '2.7 s')
    """
    for unit, size in (("µs", 1.0), ("ms", 1e3)):
        if us < 999.5 * size:
            return f"{us / size:.3g} {unit}"
    return f"{us / 1e6:.3g} s"
