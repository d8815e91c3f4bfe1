"""The report of a rewritten program, for people: text, JSON, HTML."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jax.extend.core import ClosedJaxpr, jaxprs_in_params

from rewriter.errors import ConfigError, caller
from rewriter.find.match import NearMiss
from rewriter.measure.key import Key
from rewriter.ops.device import of
from rewriter.ops.registry import look_alikes, registry
from rewriter.program.collectives import Collectives, collectives_of
from rewriter.program.graph import Graph
from rewriter.program.propagation import Placement
from rewriter.reports.costs import Total, total
from rewriter.reports.difference import Difference, difference
from rewriter.reports.page import fragment, page
from rewriter.reports.rows import (
    equal,
    grouped,
    head,
    miss_head,
    miss_lines,
    row_text,
    site_lines,
    widths_of,
)
from rewriter.rewrite.beside_sites import Change
from rewriter.rewrite.passes.checkpoint_savings import Saved
from rewriter.rewrite.passes.flops import SITES
from rewriter.rewrite.plan import Site
from rewriter.support.sizes import size_text
from rewriter.support.verdict import Reason

ASCII = str.maketrans({
    "✓": "+", "✗": "!", "×": "x", "→": ">", "−": "-", "·": ";", "≥": ">=",
    "Σ": "sum", "ᵀ": "^T", "…": "...", "∞": "inf", "±": "+-", "–": "-", "µ": "u",
})  # fmt: skip


@dataclass(frozen=True)
class Report:
    """The recognised ops of one function, what became of each, and why.

    ``print(report)`` is plain text and complete.

    Attributes:
        name: The function's name.
        versions: The JAX version.
        target: The device kind built for.
        patterns: The patterns in force, in text.
        sites: All recognised ops, replaced or not.
        misses: Near misses.
        failures: What went wrong inside the rewriter, if anything.
        numerics: The numerics policy in force.
        seconds: Stage name to seconds; ``"trace"`` is JAX's own tracing.
        before: The program as written.
        after: The program as rewritten.
        key: The key under which the whole program is measured; None if nothing was
            replaced.
        placement: Where its inputs are, if it runs on several devices.
        changes: What passes changed beside the sites: each has the name of the pass as
            ``by``, ``what`` it changed, and ``where``.
        offered: Further values that a larger `checkpoint_memory` would save.

    Example:
        >>> import jax.numpy as jnp, rewriter
        >>> report = rewriter.explain(jnp.sin)(1.0)
        >>> report.counts()["attention"]
        0
    """

    name: str
    versions: str
    target: str
    patterns: str
    sites: tuple[Site, ...]
    misses: tuple[NearMiss, ...]
    failures: tuple[Reason, ...] = ()
    numerics: str = "default"
    seconds: Mapping[str, float] = field(default_factory=dict)
    before: ClosedJaxpr | None = field(default=None, repr=False)
    after: ClosedJaxpr | None = field(default=None, repr=False)
    key: Key | None = field(default=None, repr=False)
    placement: Placement | None = field(default=None, repr=False)
    changes: tuple[Change, ...] = ()
    offered: tuple[Saved, ...] = ()

    def counts(
        self, repeats: bool = True, backward: bool = False, replaced: bool = False
    ) -> dict[str, int]:
        """Returns how many sites of each op were recognised.

        A composite, such as a gated linear unit of ragged dots, counts as its parts.

        Args:
            repeats: Count a scan's body as often as it runs, else once.
            backward: Count only sites whose gradient was found as well.
            replaced: Count only sites that a kernel replaces.
        """
        found = Counter(dict.fromkeys(registry().counted(), 0))
        for site in self.sites:
            if site.backward >= backward and site.replaced >= replaced:
                for op in site.parts or (site.op,):
                    found[op] += site.repeats if repeats else 1
        return dict(found)

    def costs(self) -> Total | None:
        """Returns the times of all sites together; None where none is known.

        Times are those by which kernels were chosen: measured at these very shapes, or
        by a model of the device. Nothing is measured here.
        """
        return total(self.sites)

    def at(self, where: str) -> Report:
        """Returns the part of the report about one source line or file.

        Args:
            where: ``"model.py"`` or ``"model.py:88"``; also of the call of a library.
        """
        sites = tuple(s for s in self.sites if _is_at(s, where))
        misses = tuple(m for m in self.misses if _is_at(m, where))
        return self._only(sites, misses)

    def why_not(self, op: str = "") -> str:
        """Returns every reason why sites of an op were missed or left, in text.

        Args:
            op: An op's name; empty for all.
        """
        misses = tuple(m for m in self.misses if op in ("", m.op))
        sites = tuple(s for s in self.sites if op in ("", s.op) and not s.replaced)
        lines = [line for m in misses for line in miss_lines(m, full=True)]
        lines += [
            line
            for group in grouped(sites)
            for line in site_lines(group, rate=self._rate)
        ]
        if lines:
            return "\n".join(lines)
        done = tuple(s for s in self.sites if op in ("", s.op))
        if done:
            count = sum(s.repeats for s in done)
            where = ", ".join(dict.fromkeys(s.where for s in done))
            return f"all that is found is replaced: ×{count} at {where}"
        missing = f"nothing in {self.name} is close to {op or 'any pattern'}"
        known = [str(k) for k in self.look_alikes() if op in ("", k.op)]
        return "\n".join([missing, *known])

    def look_alikes(self) -> tuple[Any, ...]:
        """Returns words about operations that a reader might expect to be found.

        They are no sites and no near misses, and only looked for where there are none.
        Each has the ``op`` that one might expect, ``where`` it is, and a ``text``.
        """
        if self.sites or self.misses or self.before is None:
            return ()
        return tuple(look_alikes()(Graph(self.before)))

    def collectives(self) -> tuple[Collectives, Collectives]:
        """Compiles the program as written and as rewritten; returns their collectives.

        Returns:
            For each program, by kind, the number of collectives and the bytes of their
            results; empty for a program on one device.

        Raises:
            RewriterError: If the devices of an abstract mesh are not here.
        """
        if self.placement is None or self.before is None or self.after is None:
            return {}, {}
        before, after = (
            collectives_of(program, self.placement)
            for program in (self.before, self.after)
        )
        return before, after

    def text(self, ascii: bool = False) -> str:
        """Returns the report as text.

        Args:
            ascii: Use ASCII symbols only.
        """
        text = "\n".join(_lines(self))
        return text.translate(ASCII) if ascii else text

    def json(self) -> str:
        """Returns the report as JSON."""
        return json.dumps(self.as_dict(), indent=1, default=str)

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as plain dicts and lists."""
        return {
            "function": self.name,
            "jax": self.versions,
            "target": self.target,
            "patterns": self.patterns,
            "numerics": self.numerics,
            "counts": self.counts(),
            "replaced": self.counts(replaced=True),
            "costs": asdict(costs) if (costs := self.costs()) else None,
            "sites": [{**asdict_site(s)} for s in self.sites],
            "misses": [asdict(m) for m in self.misses],
            "failures": [asdict(r) for r in self.failures],
            "changes": [c.as_dict() for c in self.changes],
            "offered": [asdict(k) for k in self.offered],
            "seconds": dict(self.seconds),
        }

    def diff(self, after: Report | Mapping[str, Any]) -> Difference:
        """Returns what is not the same in a later report: sites, kernels and reasons.

        Args:
            after: The later report; also as data, read from what `json` wrote.

        Raises:
            ConfigError: It is neither.
        """
        later = json.loads(after.json()) if isinstance(after, Report) else after
        if not isinstance(later, Mapping) or "sites" not in later:
            raise ConfigError(
                f"after={later!r:.80}",
                wanted="a report, or what its json() or as_dict() gave",
                next_step="Pass rewriter.explain(fn)(*args)",
                where=caller(),
            )
        return difference(json.loads(self.json()), later)

    def svg(self, site: int | None = None) -> str:
        """Returns a picture of the program before and after.

        Args:
            site: The number of one site, which the text has behind ``#``; ``None``
                for the whole program.

        Raises:
            ValueError: No site has this number.
        """
        from rewriter.reports.draw import before_after

        return before_after(self.before, self.after, self.sites, site)

    def html(self, path: str | os.PathLike[str]) -> None:
        """Writes the report and its picture as one self-contained file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(page(self.name, self.text(), self.svg()))

    def _only(self, sites: Sequence[Site], misses: Sequence[NearMiss]) -> Report:
        from dataclasses import replace

        return replace(self, sites=tuple(sites), misses=tuple(misses))

    def __str__(self) -> str:
        return self.text()

    @property
    def _rate(self) -> float:
        """The target's bytes/s from memory; 0 if unknown."""
        return of(self.target, "").bandwidth

    def _repr_html_(self) -> str:
        return fragment(self.text(), self.svg())


def asdict_site(site: Site) -> dict[str, Any]:
    """Returns a site as a plain dict."""
    kept = {k: getattr(site, k) for k in site.__dataclass_fields__}
    kept["params"] = {k: str(v) for k, v in dict(site.params).items()}
    kept["costs"] = asdict(site.costs) if site.costs else None
    return kept


# ------------------------------------------------------------------- text
NOT_MODELLED = "times: not estimated on a CPU; rewriter.tune measures them"
"""Said where a CPU is the target, and none of its times were measured."""


def _lines(report: Report) -> Iterator[str]:
    yield (
        f"rewriter.explain({report.name})   jax {report.versions}   "
        f"{report.target}   patterns: {report.patterns}"
    )
    yield f" {_summary(report)}{_seconds(report.seconds)}"
    if costs := report.costs():
        yield f" {costs}"
    elif report.target == "cpu" and any(s.replaced for s in report.sites):
        yield f" {NOT_MODELLED}"
    if report.sites or report.misses or report.failures:
        yield ""
    groups = grouped(report.sites)
    widths = widths_of(
        [head(g) for g in groups] + [miss_head(m) for m in report.misses]
    )
    for group in groups:
        yield from site_lines(group, widths, report._rate)
    for miss, count in equal(report.misses):
        yield from miss_lines(miss, count, widths)
    yield from _beside_sites(report, widths)
    for op, count in Counter(_inside(report.before)).items():
        yield f" = {op} ×{count}: rewritten by an `optimize` inside, which reports it"
    for known in report.look_alikes():
        yield f"   no {known.op}  {known.where}  {known.text}"
    for reason in report.failures:
        yield f" ✗ left as written: {str(reason).splitlines()[0]}"


def _inside(program: Any) -> Iterator[str]:
    """The ops that were replaced before: optimized functions were called."""
    for eqn in getattr(program, "jaxpr", program).eqns if program else ():
        if eqn.primitive in SITES:
            yield eqn.params["use"].op.name
        for body in jaxprs_in_params(eqn.params):
            yield from _inside(body)


def _beside_sites(report: Report, widths: tuple[int, ...]) -> Iterator[str]:
    """What was changed that is no site; equal changes share a row."""
    groups: dict[Any, list[Change]] = {}
    for change in report.changes:
        groups.setdefault((type(change), change.what, change.where), []).append(change)
    for (kind, what, where), same in groups.items():
        count, text, *more = kind.row(same)
        yield row_text("✓", (what, count, where, text), widths)
        yield from (f"     {line}" for line in more)
    if report.offered:
        yield f" = {_offer(report.offered)}"


def _offer(offered: Sequence[Saved]) -> str:
    flops, memory = (sum(getattr(k, n) for k in offered) for n in ("flops", "bytes"))
    best = max(offered, key=lambda k: k.flops / k.bytes)
    first = sum(k.bytes for k in offered if k.what == best.what)
    text = f"checkpoints compute {flops / 1e12:.3g} TFLOP again; checkpoint_memory "
    text += f"keeps all of it in {size_text(memory)}"
    return text + (f", {best.what} in {size_text(first)}" if first < memory else "")


def _summary(report: Report) -> str:
    if not report.sites and not report.misses:
        return "no candidates: nothing here is close to a pattern"
    done = sum(s.repeats for s in report.sites if s.replaced)
    kept = sum(s.repeats for s in report.sites if not s.replaced)
    missed = len(report.misses)
    parts = [f"{done} of {done + kept + missed} candidates rewritten"]
    parts += [f"{kept} kept"] * bool(kept) + [f"{missed} missed"] * bool(missed)
    return ", ".join(parts)


def _seconds(seconds: Mapping[str, float]) -> str:
    trace = seconds.get("trace", 0.0)
    rest = sum(v for k, v in seconds.items() if k != "trace")
    return f"    trace {trace:.2f} s, match {rest:.2f} s" if seconds else ""


def _is_at(place: Site | NearMiss, where: str) -> bool:
    lines = (text.split(" ")[0] for text in (place.where, place.called_from))
    return any(where in (line, line.rsplit(":", 1)[0]) for line in lines if line)
