"""The rows of a report in text: sites, near misses, and what is said below each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rewriter.find.match import NearMiss
from rewriter.reports.costs import costs_text
from rewriter.reports.use import large_operands, parameters, summaries
from rewriter.rewrite.plan import Site
from rewriter.support.verdict import Reason

MEASURED = ("tuned", "cached", "shipped", "nearest")
"""Origins of choices made by measuring."""

CALLERS = 4
"""How many of the user's lines a row shows at most."""


def grouped(sites: Sequence[Site]) -> list[list[Site]]:
    """Returns the sites that one row shows, for each row."""
    groups: dict[Any, list[Site]] = {}
    for s in sites:
        key = (s.op, s.where, s.kernel, s.origin, s.scope, s.shapes, s.not_chosen,
               s.backward, s.again, s.sharding, s.form, s.costs)  # fmt: skip
        groups.setdefault(key, []).append(s)
    return list(groups.values())


def equal(misses: Sequence[NearMiss]) -> list[tuple[NearMiss, int]]:
    """Returns near misses with how often each is there."""
    groups: dict[Any, list[NearMiss]] = {}
    for m in misses:
        key = (m.op, m.where, m.reasons, m.suggestion, m.called_from)
        groups.setdefault(key, []).append(m)
    return [(g[0], len(g)) for g in groups.values()]


def head(group: Sequence[Site]) -> tuple[str, str, str, str]:
    """Returns the cells of a row of sites."""
    site, count = group[0], sum(s.repeats for s in group)
    inside = f" in {site.scope}" if site.scope else ""
    kernel = f"{_kernel(site)}  {numbers([s.index for s in group])}"
    return site.op, f"×{count}{inside}", site.where, kernel


def numbers(found: Sequence[int]) -> str:
    """Returns numbers of sites in words.

    Example:
        >>> numbers([0, 1, 2, 5])
        '#0-2, 5'
    """
    runs: list[list[int]] = []
    for n in sorted(found):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    words = [f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs]
    return f"#{', '.join(words)}"


def miss_head(miss: NearMiss, count: int = 1) -> tuple[str, str, str, str]:
    """Returns the cells of a row of a near miss."""
    return miss.op, f"×{count}", miss.where, _near(miss)


def widths_of(rows: Sequence[tuple[str, ...]]) -> tuple[int, int, int]:
    """Returns the widths of the columns."""
    widths = [max((len(r[i]) for r in rows), default=0) for i in range(3)]
    return widths[0], widths[1], min(widths[2], 44)


def row_text(
    mark: str, row: tuple[str, ...], widths: tuple[int, ...] = (0, 0, 0)
) -> str:
    """Returns a row with its mark."""
    cells = [f"{c:<{w}}" for c, w in zip(row, widths, strict=False)]
    return f" {mark} {'  '.join([*cells, *row[3:]])}".rstrip()


def site_lines(
    group: Sequence[Site], widths: tuple[int, ...] = (0, 0, 0), rate: float = 0.0
) -> Iterator[str]:
    """Returns the lines about sites of one row.

    Args:
        group: The sites.
        widths: The widths of the columns.
        rate: The target's bytes/s from memory; 0 if unknown.
    """
    site = group[0]
    yield row_text("✓" if site.replaced else "=", head(group), widths)
    callers: Counter[str] = Counter()
    for s in group:
        callers[s.called_from] += s.repeats
    yield from _callers(callers)
    yield from (f"     {line}" for line in _details(site, rate))


def miss_lines(
    miss: NearMiss,
    count: int = 1,
    widths: tuple[int, ...] = (0, 0, 0),
    full: bool = False,
) -> Iterator[str]:
    """Returns the lines about equal near misses.

    Args:
        miss: One of them.
        count: How many they are.
        widths: The widths of the columns.
        full: Whether to show the difference beside reasons.
    """
    yield row_text("✗", miss_head(miss, count), widths)
    yield from _callers({miss.called_from: count})
    yield from (f"     {_reason(miss, reason)}" for reason in miss.reasons[1:])
    if miss.difference and (full or not miss.reasons):
        yield f"     {miss.difference}"
    if miss.suggestion:
        yield f"   next: {miss.suggestion}"


def _kernel(site: Site) -> str:
    if site.replaced or site.origin in MEASURED:
        form = f"{site.form} " if site.form else ""
        return f"{form}{site.kernel} [{site.origin}]"
    why = dict(site.not_chosen)
    reason = next(iter(why.values()), "as fast") if len(set(why.values())) < 2 else ""
    if reason and len(why) == 1 and site.origin == "estimated":
        reason = f"{next(iter(why))} is {reason}"  # otherwise the time would seem XLA's
    return f"xla: {reason}" if reason else "xla: kept"


def _near(miss: NearMiss) -> str:
    """The first reason against a near miss."""
    if not miss.reasons:
        return f"computes something else than {miss.op}"
    return _reason(miss, miss.reasons[0])


def _reason(miss: NearMiss, reason: Reason) -> str:
    """A reason, with its line where that is not the near miss's own."""
    return reason.text if reason.where == miss.where else str(reason)


def _callers(counts: Mapping[str, int]) -> Iterator[str]:
    """The user's lines that call a library's, with how often where they are several."""
    known = {text: n for text, n in counts.items() if text}
    several = len(known) > 1
    words = [f"{text} ×{n}" if several else text for text, n in known.items()]
    if len(words) > CALLERS:
        words[CALLERS - 1 :] = [f"{len(words) - CALLERS + 1} other lines"]
    if words:
        yield f"     from {', '.join(words)}"


def _details(site: Site, rate: float) -> Iterator[str]:
    facts = ["forward and backward"] * site.backward
    if site.again:
        facts.append(f"the forward runs again in {site.again}")
    if text := costs_text(site.costs, site.replaced):
        yield text
    if site.sharding:
        yield f"on each device: {site.sharding}"
    facts += [*parameters(site), *summaries(site)]
    if facts:
        yield "; ".join(facts)
    yield from large_operands(site, rate)
    if site.config and site.origin in MEASURED:
        yield f"config: {site.config}"
    if site.numerics:
        yield "numerics: " + "; ".join(site.numerics)
    others = [(k, r) for k, r in site.not_chosen if site.replaced or k != "xla"]
    several = len(set(dict(site.not_chosen).values())) > 1
    if others and (site.replaced or site.origin in MEASURED or several):
        by_reason: dict[str, list[str]] = {}
        for kernel, reason in others:
            by_reason.setdefault(reason, []).append(kernel)
        texts = (f"{', '.join(names)} ({r})" for r, names in by_reason.items())
        yield "not chosen: " + " · ".join(texts)
