"""A traced call in, its rewritten program and report out, remembered by signature.

Whatever fails inside leaves the program as it was, with a warning; with
``strict=True`` it raises.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from rewriter import _jax, deferred, oracle, trace
from rewriter.config import Config, resolve
from rewriter.deferred import INSIDE, Deferred
from rewriter.device import attached, named
from rewriter.errors import (
    RequirementNotMet,
    RewriterError,
    RewriterWarning,
    UnknownPattern,
    VerificationFailed,
    caller,
    known,
)
from rewriter.pipeline import rewrite
from rewriter.placement import Later, placed
from rewriter.propagation import Placement
from rewriter.registry import registry
from rewriter.replace import Rewritten
from rewriter.report import Report
from rewriter.trace import Bound, Traced
from rewriter.verdict import Reason

log = logging.getLogger("rewriter.analysis")
REMEMBERED = 64  # signatures per function; a record holds two jaxprs


@dataclass(frozen=True)
class Record:
    """The analysis of one signature."""

    traced: Traced
    rewritten: Rewritten
    bound: Bound
    report: Report


@dataclass
class Analysis:
    """The pipeline for one function, remembering what it found."""

    original: Callable[..., Any]
    inner: Any
    options: Mapping[str, Any]
    user_patterns: tuple[Any, ...]
    shardings: Mapping[str, Any] = field(default_factory=dict)
    records: OrderedDict[Any, Record] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, args: Any, kwargs: Any) -> Record:
        """Returns the analysis for these arguments, made at most once."""
        traced, placement = self.traced(args, kwargs)
        if isinstance(placement, Later):
            placement = INSIDE
        return self.of(traced, placement)

    def traced(self, args: Any, kwargs: Any) -> tuple[Traced, Any]:
        """Returns the traced call, and where its arrays are."""
        return placed(self.inner, args, kwargs, self.shardings)

    def of(
        self,
        traced: Traced,
        placement: Placement | str | None,
        config: Config | None = None,
    ) -> Record:
        """Returns the analysis of a traced call, made at most once."""
        config = config or resolve(self.options)
        found = self._remembered(traced, config, placement)
        return found or self._made(traced, config, placement)

    def result(self, args: Any, kwargs: Any) -> Any:
        """Returns the result of the rewritten program."""
        traced, placement = self.traced(args, kwargs)
        leaves, _ = trace.split(self.inner, args, kwargs)
        if isinstance(placement, Later):
            program, config = traced.closed_jaxpr, resolve(self.options)
            if deferred.can_wait(program):
                waiting = Deferred(
                    program, placement, lambda p: self.of(traced, p, config).bound
                )
                call = functools.partial(deferred.call, waiting)
                return traced.calling(call, leaves)
            placement = INSIDE
        record = self.of(traced, placement)
        return record.traced.run(record.bound, leaves)

    def forget(self) -> None:
        """Forgets all that was found."""
        with self.lock:
            self.records.clear()

    def _key(self, traced: Traced, config: Config, placement: Any) -> Any:
        program = traced.call.params["jaxpr"] if traced.call else traced.outer
        consts = tuple(id(c) for c in traced.closed_jaxpr.consts)
        return id(program), consts, config, placement

    def _remembered(
        self, traced: Traced, config: Config, placement: Any
    ) -> Record | None:
        with self.lock:
            key = self._key(traced, config, placement)
            if key in self.records:
                self.records.move_to_end(key)
            return self.records.get(key)

    def _made(self, traced: Traced, config: Config, placement: Any) -> Record:
        record = analyze(traced, config, self.user_patterns, placement)
        if any(_jax.is_tracer(c) for c in traced.closed_jaxpr.consts):
            return record  # keeping it would keep the tracers alive
        with self.lock:
            self.records[self._key(traced, config, placement)] = record
            while len(self.records) > REMEMBERED:
                self.records.popitem(last=False)
        return record


def analyze(
    traced: Traced,
    config: Config,
    user_patterns: tuple[Any, ...],
    placement: Placement | str | None = None,
) -> Record:
    """Returns the rewritten program and its report; never fails unless strict."""
    check_patterns(config.patterns)
    _check_ops(config, user_patterns)
    start = time.perf_counter()
    rewritten = _rewritten(traced, config, user_patterns, placement)
    seconds = dict(rewritten.seconds) or {"match": time.perf_counter() - start}
    report = Report(
        name=traced.name,
        versions=jax.__version__,
        target=(named(config.target) if config.target else attached()).kind,
        patterns=config.patterns,
        sites=rewritten.sites,
        misses=rewritten.misses,
        failures=rewritten.failures,
        numerics=config.numerics,
        seconds={"trace": traced.seconds, **seconds},
        before=traced.closed_jaxpr,
        after=rewritten.closed_jaxpr,
        key=rewritten.key,
        placement=placement if isinstance(placement, Placement) else None,
        stacks=rewritten.stacks,
        kept=rewritten.kept,
        offered=rewritten.offered,
    )
    _log(report)
    _require(report, config)
    if config.verify == "once":
        _verify_sites(traced.name, rewritten.closed_jaxpr)
    return Record(traced, rewritten, Bound.of(rewritten.closed_jaxpr), report)


SETS = ("default", "none")


def check_patterns(text: str) -> None:
    """Raises for names of patterns that there are not.

    Raises:
        UnknownPattern: With the names there are.
    """
    names = registry()
    allowed = {*SETS, *names.patterns(), *names.ops()}
    for part in filter(None, (p.strip() for p in text.split(","))):
        if part.removeprefix("-") not in allowed:
            raise UnknownPattern(
                f"{part!r}", next_step=known(part, allowed), where=caller()
            )


def _check_ops(config: Config, user_patterns: tuple[Any, ...]) -> None:
    """Raises for options about an op that there is not."""
    own = {p.name for p in (*config.using, *user_patterns)}  # type: ignore[attr-defined]
    wanted = config.require
    required = [] if wanted is None else (
        [wanted] if isinstance(wanted, str) else [op for op, _ in wanted]
    )  # fmt: skip
    forced = [op for op, _, _ in config.implementation]
    names = registry()
    allowed = {*names.patterns(), *names.ops(), *own}
    for option, ops, more in (
        ("require", required, {"all"}),
        ("implementation", forced, set()),
    ):
        for op in ops:
            if op not in allowed | more:
                raise UnknownPattern(
                    f"{option} names {op!r}",
                    next_step=known(op, allowed | more),
                    where=caller(),
                )


def _rewritten(
    traced: Traced,
    config: Config,
    user_patterns: tuple[Any, ...],
    placement: Placement | str | None,
) -> Rewritten:
    before = traced.closed_jaxpr
    try:
        after = rewrite(before, config, user_patterns, placement)
        problem = _changed(before, after.closed_jaxpr)
        failures, error = after.failures, None
    except RewriterError:
        raise
    except Exception as caught:
        after, error = Rewritten(before), caught
        failures = (Reason("failure", f"{type(caught).__name__}: {caught}"),)
        problem = ""
        log.debug("rewriting %s failed", traced.name, exc_info=caught)
    if problem:
        failures = (*failures, Reason("signature", problem))
        after = Rewritten(before, failures=failures)
    if not failures:
        return after
    if config.strict:
        raise RewriterError(
            f"rewriting {traced.name} failed: {failures[0]}",
            next_step="Drop strict=True to leave the program as it was",
        ) from error
    for reason in failures:
        text = f"{traced.name}: left as written: {str(reason).splitlines()[0]}"
        warnings.warn(text, RewriterWarning, stacklevel=2)
    return Rewritten(
        after.closed_jaxpr, after.sites, after.misses, failures, after.seconds,
        after.key, after.stacks, after.kept, after.offered,
    )  # fmt: skip


def _changed(before: ClosedJaxpr, after: ClosedJaxpr) -> str:
    """What is different about the signature of two programs, or ''."""
    if not _jax.same_types(before.in_avals, after.in_avals):
        return f"inputs became {after.in_avals}; they are {before.in_avals}"
    if not _jax.same_types(before.out_avals, after.out_avals):
        return f"outputs became {after.out_avals}; they are {before.out_avals}"
    if set(before.effects) != set(after.effects):
        return f"effects became {after.effects}; they are {before.effects}"
    return ""


def _log(report: Report) -> None:
    """One line per stage, site and near miss, for ``REWRITER_LOG``."""
    for stage, seconds in report.seconds.items():
        logger = logging.getLogger(f"rewriter.{stage}")
        logger.info("%s: %s took %.3f s", report.name, stage, seconds)
    match, choose = (logging.getLogger(f"rewriter.{n}") for n in ("match", "choose"))
    for s in report.sites:
        match.debug("%s at %s: %s %s", s.op, s.where, s.shapes, dict(s.params))
        choose.info("%s at %s: %s [%s]", s.op, s.where, s.kernel, s.origin)
        for kernel, reason in s.not_chosen:
            choose.debug("%s at %s: not %s: %s", s.op, s.where, kernel, reason)
    for m in report.misses:
        reasons = "; ".join(map(str, m.reasons))
        match.info("near miss: %s at %s: %s", m.op, m.where, reasons)


def _verify_sites(name: str, program: ClosedJaxpr) -> None:
    with jax.ensure_compile_time_eval():
        results = oracle.check_sites(program)
    for what, error, limit in results:
        if not error <= limit:
            raise VerificationFailed(
                f"{name}: {what}: error {error:.1e}",
                wanted=f"at most {limit:.1e}",
                next_step="Report it with `python -m rewriter env --json`, and use "
                f"patterns='-{what.split()[0]}' meanwhile",
            )


def _require(report: Report, config: Config) -> None:
    wanted = config.require
    if wanted is None:
        return
    if wanted == "all":
        short = [f"{len(report.misses)} missed"] if report.misses else []
    else:
        pairs = ((wanted, 1),) if isinstance(wanted, str) else wanted
        found = report.counts()
        short = [f"{op}: {found.get(op, 0)} of {n}" for op, n in pairs
                 if found.get(op, 0) < n]  # fmt: skip
    if short:
        raise RequirementNotMet(
            f"{report.name}: {', '.join(short)}\n{report.why_not()}",
            next_step="See report.why_not(op)",
        )
