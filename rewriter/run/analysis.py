"""Rewrites the program of a traced call; remembers it and its report by signature.

A failure inside the rewriter leaves the program as it was, with a warning. With
``strict=True`` it is an error.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import ClosedJaxpr

from rewriter import _jax
from rewriter.choose.forced import check_names
from rewriter.choose.planner import DIFFERS
from rewriter.config import Config, resolve
from rewriter.errors import (
    RewriterError,
    RewriterWarning,
    UnknownPattern,
    VerificationFailed,
    caller,
    known,
)
from rewriter.frameworks import nnx_state
from rewriter.ops.device import attached, named
from rewriter.ops.registry import registry
from rewriter.program import trace
from rewriter.program.placement import Later, placed
from rewriter.program.propagation import Placement
from rewriter.program.trace import Bound, Traced
from rewriter.reports.report import Report
from rewriter.reports.required import check_required
from rewriter.rewrite.rewritten import Rewritten
from rewriter.run import deferred
from rewriter.run.deferred import INSIDE, Deferred
from rewriter.run.rewriting import has_sites, rewrite
from rewriter.support.requirement import ALL
from rewriter.support.verdict import Reason

if TYPE_CHECKING:
    from rewriter.verification.check_sites import Complaint, Key

log = logging.getLogger("rewriter.analysis")
REMEMBERED = 64  # signatures per function; a record holds two jaxprs


@dataclass(frozen=True)
class Record:
    """The analysis of one signature."""

    traced: Traced
    rewritten: Rewritten
    bound: Bound
    report: Report


@dataclass(frozen=True)
class Arguments:
    """A call's own arguments, flattened, and what they are called."""

    leaves: tuple[Any, ...]
    names: tuple[str, ...]


@dataclass
class Analysis:
    """The pipeline for one function, remembering what it found.

    Attributes:
        function: Gives the function, which is not kept alive by what is found of it.
        options: Fields of `Config`.
        user_patterns: Patterns beyond those that the configuration names.
        shardings: Options of ``jax.jit``, of which shardings and static ones matter.
        records: What was found, the latest last.
        given: Programs whose rewritten form JAX has got.
    """

    function: Callable[[], Callable[..., Any]]
    options: Mapping[str, Any]
    user_patterns: tuple[Any, ...]
    shardings: Mapping[str, Any] = field(default_factory=dict)
    records: OrderedDict[Any, Record] = field(default_factory=OrderedDict)
    given: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.watching = nnx_state.Watching(self.function)

    @property
    def original(self) -> Callable[..., Any]:
        """The function."""
        return self.function()

    @property
    def inner(self) -> Any:
        """The function under ``jax.jit``."""
        return trace.jitted(self.original, self.shardings)

    def inner_of(self, args: Any, kwargs: Any) -> Any:
        """The function under ``jax.jit``, watched if flax.nnx may lose its changes."""
        inner = self.inner
        if nnx_state.FLAX not in sys.modules:
            return inner
        if nnx_state.is_flaxs(_jax.jitted_function(inner)):
            return inner
        if not nnx_state.variables(trace.split_static(inner, args, kwargs)[0]):
            return inner
        static = _jax.jit_options(inner)
        names = ("static_argnums", "static_argnames")
        static = {k: v for k, v in static.items() if k in names}
        return jax.jit(self.watching, **static)

    def __call__(self, args: Any, kwargs: Any) -> Record:
        """Returns the analysis for these arguments, made at most once."""
        traced, placement = self.traced(args, kwargs)
        if isinstance(placement, Later):
            placement = INSIDE
        return self.of(traced, placement)

    def traced(self, args: Any, kwargs: Any) -> tuple[Traced, Any]:
        """Returns the traced call, and where its arrays are."""
        return placed(self.inner_of(args, kwargs), args, kwargs, self.shardings)

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
        traced, placement = self._traced_anew(args, kwargs)
        leaves, _ = trace.split(self.inner, args, kwargs)
        if isinstance(placement, Later):
            program, config = traced.closed_jaxpr, resolve(self.options)
            if deferred.can_wait(program) and self._recognised(program, config):
                waiting = Deferred(
                    program, placement, lambda p: self.of(traced, p, config).bound
                )
                return traced.result(deferred.call(waiting, leaves))
            placement = INSIDE
        record = self.of(traced, placement)
        return record.traced.run(record.bound, leaves)

    def _recognised(self, program: ClosedJaxpr, config: Config) -> bool:
        """Whether anything is, so that where arrays are makes a difference."""
        try:
            return has_sites(program, config, self.user_patterns)
        except Exception as error:  # told of where the program is rewritten
            log.debug("recognising failed", exc_info=error)
            return True

    def _traced_anew(self, args: Any, kwargs: Any) -> tuple[Traced, Any]:
        """The traced call, traced again if JAX has its program and asks once more.

        Then JAX has forgotten it, as by ``clear_cache``, and what the function read
        when it was traced may have changed.
        """
        traced, placement = self.traced(args, kwargs)
        if traced.kept in self.given:
            self.forget()
            self.inner_of(args, kwargs).clear_cache()
            traced, placement = self.traced(args, kwargs)
        self.given.add(traced.kept)
        return traced, placement

    def compare(self, args: Any, kwargs: Any) -> bool:
        """Compares the rewritten program with the one as written, on these arguments.

        What differs is left as written in this signature's analysis.

        Returns:
            Whether anything was.
        """
        traced, placement = self.traced(args, kwargs)
        if isinstance(placement, Later):
            placement = INSIDE
        config = resolve(self.options)
        leaves, _ = trace.split(self.inner, args, kwargs)
        names = trace.leaf_names(self.inner, args, kwargs)
        arguments = Arguments(tuple(leaves), tuple(names))
        record = self._made(traced, config, placement, arguments)
        return any(DIFFERS in why for why in _reasons(record.report))

    def forget(self) -> None:
        """Forgets all that was found."""
        with self.lock:
            self.records.clear()
            self.given.clear()

    def _key(self, traced: Traced, config: Config, placement: Any) -> Any:
        consts = tuple(id(c) for c in traced.closed_jaxpr.consts)
        return id(traced.kept), consts, config, placement

    def _remembered(
        self, traced: Traced, config: Config, placement: Any
    ) -> Record | None:
        with self.lock:
            key = self._key(traced, config, placement)
            if key in self.records:
                self.records.move_to_end(key)
            return self.records.get(key)

    def _made(
        self,
        traced: Traced,
        config: Config,
        placement: Any,
        arguments: Arguments | None = None,
    ) -> Record:
        record = analyze(traced, config, self.user_patterns, placement, arguments)
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
    arguments: Arguments | None = None,
) -> Record:
    """Returns the rewritten program and its report; never fails unless strict.

    Args:
        traced: The call.
        config: Options in force.
        user_patterns: Patterns beyond those that the configuration names.
        placement: Where its arrays are.
        arguments: The call's own, if they are known, to compare on.
    """
    check_patterns(config.patterns)
    _check_ops(config, user_patterns)
    start = time.perf_counter()
    rewritten = rewritten_of(traced, config, user_patterns, placement)
    if config.verify == "once" and not config.exporting:
        asked = traced, config, user_patterns, placement
        rewritten = _agreeing(*asked, rewritten, arguments)
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
        changes=rewritten.changes,
        offered=rewritten.offered,
    )
    _log(report)
    if config.require is not None:
        check_required(report, config.require)
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
    required = [] if isinstance(wanted, str) else [r.op for r in wanted or ()]
    forced = [op for op, _, _ in config.implementation]
    names = registry()
    allowed = {*names.patterns(), *names.ops(), *own}
    for option, ops, more in (
        ("require", required, {ALL}),
        ("implementation", forced, set()),
    ):
        for op in ops:
            if op not in allowed | more:
                raise UnknownPattern(
                    f"{option} names {op!r}",
                    next_step=known(op, allowed | more),
                    where=caller(),
                )
    _check_kernels(config, (*config.using, *user_patterns))


def _check_kernels(config: Config, own: Sequence[Any]) -> None:
    """Raises `UnknownKernel` for a kernel that neither its op nor a form of it has.

    A program that has no site of the op would not show the error.
    """
    names = registry()
    for op, forward, backward in config.implementation:
        if op not in names.ops():
            continue
        asked = *forward, *backward
        there = {k.name for k in names.kernels(op)}
        there |= {k.name for p in own for k in getattr(p, "kernels", ())}
        if not there.issuperset(asked):
            forms = [o for o in names.ops() if names.op(o).form_of == op]
            there |= {k.name for o in forms for k in names.kernels(o)}
        check_names(asked, op, sorted(there))


def rewritten_of(
    traced: Traced,
    config: Config,
    user_patterns: tuple[Any, ...],
    placement: Placement | str | None,
) -> Rewritten:
    """Returns the rewritten program; the program itself where that fails."""
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
        what = "a part is " if reason.code == "internal" else ""
        text = f"{traced.name}: {what}left as written: {str(reason).splitlines()[0]}"
        warnings.warn(text, RewriterWarning, stacklevel=2)
    return replace(after, failures=failures)


def _changed(before: ClosedJaxpr, after: ClosedJaxpr) -> str:
    """What is different about the signature of two programs, or ''."""
    if not _jax.same_types(before.in_avals, after.in_avals):
        return f"inputs became {after.in_avals}; they are {before.in_avals}"
    if not _jax.same_types(before.out_avals, after.out_avals):
        return f"outputs became {after.out_avals}; they are {before.out_avals}"
    if set(before.effects) != set(after.effects):
        return f"effects became {after.effects}; they are {before.effects}"
    return ""


def _reasons(report: Report) -> list[str]:
    return [why for site in report.sites for _, why in site.not_chosen]


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


def _agreeing(
    traced: Traced,
    config: Config,
    user_patterns: tuple[Any, ...],
    placement: Placement | str | None,
    rewritten: Rewritten,
    arguments: Arguments | None,
) -> Rewritten:
    """The rewritten program with sites left as written whose numbers differ."""
    values = names = None
    if arguments is None and placement is not None:
        return rewritten  # drawn arguments are on one device
    if arguments is not None:
        values, names = arguments.leaves, arguments.names
    asked = traced, config, user_patterns, placement
    while rewritten.closed_jaxpr is not traced.closed_jaxpr:
        found = _found(traced, rewritten, values, names)
        if not found:
            break
        left: dict[Key, None] = dict.fromkeys(asked[1].differing)
        for complaint in found:
            sites = complaint.sites
            if complaint.whole:
                sites = _culprit(asked, sites, values, names)
            _complain(traced.name, sites, complaint.text, config)
            left.update(dict.fromkeys(sites))
        if set(left) == set(asked[1].differing):  # nothing more to leave
            return Rewritten(traced.closed_jaxpr, seconds=rewritten.seconds)
        asked = traced, replace(config, differing=tuple(left)), *asked[2:]
        rewritten = rewritten_of(*asked)
    return rewritten


def _found(
    traced: Traced, rewritten: Rewritten, values: Any, names: Any
) -> tuple[Complaint, ...]:
    from rewriter.verification.check_sites import complaints  # only if asked for

    # A shard_map does not run under the former; and nothing is traced where it is met.
    now = jax.ensure_compile_time_eval() if _jax.is_tracing() else nullcontext()
    with now:
        return complaints(traced.closed_jaxpr, rewritten, values, names or ())


TRIED = 6
"""Sites that are left as written one by one, where the whole program differs."""


def _culprit(
    asked: tuple[Traced, Config, tuple[Any, ...], Any],
    sites: tuple[Key, ...],
    values: Any,
    names: Any,
) -> tuple[Key, ...]:
    """The site without which nothing differs; all of them if there is not one."""
    traced, config, *others = asked
    for key in sites[:TRIED] if len(sites) > 1 else ():
        trial = replace(config, differing=(*config.differing, key))
        if not _found(traced, rewritten_of(traced, trial, *others), values, names):
            return (key,)
    return sites


def _complain(name: str, sites: tuple[Key, ...], text: str, config: Config) -> None:
    what = ", ".join(f"{op} at {where}" for op, where in sites) or "the program"
    got = f"{name}: {what}: differs from what is written, {text}"
    if config.strict:
        raise VerificationFailed(
            got,
            next_step="Report it with `python -m rewriter env --json`, and use "
            f"patterns='-{sites[0][0] if sites else 'default'}' meanwhile",
        )
    warnings.warn(f"{got}. Left as written", RewriterWarning, stacklevel=2)
