"""Costs of a site as written and as rewritten, where they are known."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rewriter.measure.decision import Decision
from rewriter.measure.measurement import ESTIMATES, Measurement
from rewriter.site.implementation import XLA

MEASURED = "measured"
SIMULATED = "simulated"
ESTIMATED = "estimated"


@dataclass(frozen=True)
class Costs:
    """Time and temporary memory of one run of a site on one device; None if not known.

    Attributes:
        before_us: Microseconds as written.
        after_us: Microseconds as chosen.
        before_bytes: Bytes of temporary memory as written.
        after_bytes: Bytes of temporary memory as chosen.
        source: ``"measured"``, ``"simulated"`` (by the device's compiler) or
            ``"estimated"`` (by a model of the device); ``""`` if nothing is known.
        passes: What runs: ``"forward"``, or ``"forward_and_vjp"``, with gradients.
    """

    before_us: float | None = None
    after_us: float | None = None
    before_bytes: int | None = None
    after_bytes: int | None = None
    source: str = ""
    passes: str = ""

    def __bool__(self) -> bool:
        return bool(self.source)

    @property
    def saved_bytes(self) -> int | None:
        """How much less temporary memory it takes, if known."""
        if self.before_bytes is None or self.after_bytes is None:
            return None
        return self.before_bytes - self.after_bytes


UNKNOWN = Costs()


def modelled_costs(
    before_s: float,
    after_s: float,
    passes: str,
    before_bytes: float | None = None,
    after_bytes: float | None = None,
) -> Costs:
    """Returns the costs by a model of the device.

    Args:
        before_s: Seconds as written; infinite if that does not fit into memory, and 0
            if they are not known.
        after_s: Seconds as chosen; 0 if they are not known.
        passes: What runs.
        before_bytes: Bytes of temporary memory as written, if known.
        after_bytes: Bytes of temporary memory as chosen, if known.

    Example:
        >>> modelled_costs(float("inf"), 2e-6, "forward")
        Costs(before_us=None, after_us=2.0, ..., source='estimated', passes='forward')
    """
    before, after = (1e6 * s if 0 < s < math.inf else None for s in (before_s, after_s))
    memory = [None if x is None else int(x) for x in (before_bytes, after_bytes)]
    if before is None and after is None and None in memory:
        return UNKNOWN
    return Costs(before, after, *memory, source=ESTIMATED, passes=passes)


def measured_costs(
    decision: Decision, found: tuple[Measurement, ...], passes: str
) -> Costs:
    """Returns the costs by measurements of these very shapes.

    Args:
        decision: What won, and what lost.
        found: The measurements that it was made of.
        passes: What runs.
    """
    best = decision.best
    written = [m for m in found if m.implementation.forward == XLA]
    written = [m for m in written if m.method == best.method]
    before = min(written, key=lambda m: m.median_us or math.inf, default=None)
    return Costs(
        before.median_us if before else None,
        best.median_us,
        before.temp_bytes if before else None,
        best.temp_bytes,
        SIMULATED if best.method in ESTIMATES else MEASURED,
        passes,
    )
