"""Writes times and temporary memory of sites in words, and their totals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rewriter.measure.costs import Costs
from rewriter.measure.key import BOTH
from rewriter.measure.measurement import time_text
from rewriter.rewrite.plan import Site
from rewriter.support.sizes import size_text


@dataclass(frozen=True)
class Total:
    """Times of all sites whose times are known, each as often as it runs.

    Attributes:
        before_us: Microseconds as written.
        after_us: Microseconds as rewritten.
        known: The number of sites that are counted in, with their repeats.
        sites: The number of sites, with their repeats.
        most_before_bytes: The most temporary memory of one site as written, if known.
        most_after_bytes: The same as rewritten.
        sources: Where the times come from, such as ``("measured", "estimated")``.
    """

    before_us: float
    after_us: float
    known: int
    sites: int
    most_before_bytes: int | None
    most_after_bytes: int | None
    sources: tuple[str, ...]

    @property
    def saved_bytes(self) -> int | None:
        """How much less temporary memory the largest site takes, if known."""
        if self.most_before_bytes is None or self.most_after_bytes is None:
            return None
        return self.most_before_bytes - self.most_after_bytes

    @property
    def saved_us(self) -> float:
        """How much less time all sites take, in microseconds."""
        return self.before_us - self.after_us

    def __str__(self) -> str:
        """Both times, how many sites they are of, and memory where it is known.

        Example:
            >>> print(Total(2500.0, 500.0, 3, 4, None, None, ("measured",)))
            sites take 2.5 ms as written, 500 µs as rewritten (measured, 3 of 4 sites)
        """
        old, new = time_text(self.before_us), time_text(self.after_us)
        how = ", ".join((*self.sources, f"{self.known} of {self.sites} sites"))
        text = f"sites take {old} as written, {new} as rewritten ({how})"
        before, after = self.most_before_bytes, self.most_after_bytes
        if before is None or after is None or not (before or after):
            return text
        most = size_text(before), size_text(after)
        return f"{text}; temporary memory of the largest {' → '.join(most)}"


def total(sites: Iterable[Site]) -> Total | None:
    """Returns the times of all sites together; None if none is known.

    A site counts if both of its times are known. Memory is not added up: sites that run
    one after the other use the same memory.
    """
    sites = tuple(sites)
    known = [
        s for s in sites
        if s.costs.before_us is not None and s.costs.after_us is not None
    ]  # fmt: skip
    if not known:
        return None
    memory = [(s.costs.before_bytes, s.costs.after_bytes) for s in known]
    both = [(b, a) for b, a in memory if b is not None and a is not None]
    return Total(
        sum(s.repeats * (s.costs.before_us or 0.0) for s in known),
        sum(s.repeats * (s.costs.after_us or 0.0) for s in known),
        sum(s.repeats for s in known),
        sum(s.repeats for s in sites),
        max((b for b, _ in both), default=None),
        max((a for _, a in both), default=None),
        tuple(dict.fromkeys(s.costs.source for s in known)),
    )


def costs_text(costs: Costs, replaced: bool) -> str:
    """Returns a site's costs in words; empty if none is known.

    Args:
        costs: The costs.
        replaced: Whether the site is replaced by a kernel.

    Example:
        >>> costs_text(Costs(2500.0, 500.0, source="estimated"), True)
        '2.5 ms → 500 µs (estimated)'
    """
    parts = list(_pairs(costs, replaced))
    if not parts:
        return ""
    passes = ", forward and backward" if costs.passes == BOTH else ""
    return f"{'; '.join(parts)} ({costs.source}{passes})"


def _pairs(costs: Costs, replaced: bool) -> Iterator[str]:
    kinds = (
        ("", costs.before_us, costs.after_us, time_text),
        ("temporary memory ", costs.before_bytes, costs.after_bytes, size_text),
    )
    for what, before, after, text in kinds:
        if not (before or after):
            continue  # not known, or no temporary memory at all
        old, new = (None if x is None else text(x) for x in (before, after))  # type: ignore[operator]
        if not replaced:
            if old is not None or new is not None:
                yield f"{what}{old if old is not None else new} as written"
        elif old is not None and new is not None:
            yield f"{what}{old} → {new}"
        elif new is not None:
            yield f"{what}{new} as rewritten"
