"""Measures the sites of a function, with a progress bar."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from rewriter.config import as_list, in_step, resolve
from rewriter.errors import ConfigError, caller, known
from rewriter.measure import cache
from rewriter.measure.decision import fastest
from rewriter.measure.end_to_end_race import race_programs
from rewriter.measure.measurement import of_spelling, spellings
from rewriter.measure.program_key import REWRITTEN, WITHOUT
from rewriter.measure.programs import Task
from rewriter.measure.tuned import Tuned
from rewriter.ops import device
from rewriter.program import trace
from rewriter.program.placement import placed
from rewriter.run import rewriting
from rewriter.run.optimize import optimize, with_patterns
from rewriter.site.implementation import XLA
from rewriter.support.threads import run_untraced

Progress = Callable[[str, int, int], None]


def tune(
    fn: Callable[..., Any],
    /,
    *,
    level: str = "full",
    budget_s: float = 600.0,
    grad: bool = False,
    again: bool = False,
    end_to_end: bool = False,
    sample: Mapping[str, Any] | None = None,
    isolate: bool = False,
    patterns: Any = None,
    **options: Any,
) -> Callable[..., Tuned]:
    """Returns a function that measures the kernels of every site on this device.

    Equal sites are measured once, on inputs that the op draws: normal numbers, or
    several distributions where times depend on values, whose mean decides. A site whose
    gradient is in the program is measured with it. The cache keeps the measurements
    (see `rewriter.cache`), and `optimize` finds them there.

    Args:
        fn: Any callable that ``optimize`` takes, or an optimized function.
        level: ``full``, every config worth trying, or ``quick``, one of each kernel.
        budget_s: Seconds of wall time; measurements that do not fit are skipped.
        grad: Measure gradients too where the program has none.
        again: Measure cached candidates again.
        end_to_end: Then time the whole program on these arguments, which must be
            arrays. An op without which it is faster is left as written from then on.
        sample: By op, a function ``sample(key, operands, params)`` that draws arrays by
            name for shapes by name, or several such functions by name.
        isolate: Run each kernel once in a child process first, so that one that crashes
            or hangs costs only itself.
        patterns: As in ``optimize``.
        **options: As in ``optimize``. For a TPU as ``target`` that is not attached,
            times are estimates by the TPU compiler.

    Returns:
        A function of the same arguments (arrays or ``ShapeDtypeStruct``) to `Tuned`.

    Raises:
        ConfigError: For an unknown level, no time, or samples of an op not found.
        KeyboardInterrupt: From the function, within a second of Ctrl-C.

    Example:
        >>> import jax.numpy as jnp, rewriter
        >>> tuned = rewriter.tune(jnp.sin)(jnp.ones(3))
        >>> len(tuned)
        0
        >>> fast = rewriter.optimize(jnp.sin, tuned=tuned)
    """
    _require_possible(level, budget_s)
    how = _How(level, budget_s, grad, again, end_to_end, sample or {}, isolate)
    given = options if patterns is None else {**options, "patterns": patterns}
    return _measuring(_Program.of(fn, given), how)


@dataclass(frozen=True)
class _How:
    """The arguments of `tune` that say how to measure."""

    level: str
    budget_s: float
    grad: bool
    again: bool
    end_to_end: bool
    sample: Mapping[str, Any]
    isolate: bool


@dataclass(frozen=True)
class _Program:
    """The function to measure, with all options.

    Attributes:
        fn: The function.
        jit_options: The options of ``jax.jit`` for it.
        options: Ours.
        patterns: The user's own patterns.
    """

    fn: Callable[..., Any]
    jit_options: Mapping[str, Any]
    options: Mapping[str, Any]
    patterns: Sequence[Any]

    @classmethod
    def of(cls, fn: Callable[..., Any], given: Mapping[str, Any]) -> _Program:
        """Reads the options in force."""
        fn, ours, jit_options = trace.options_in_force(fn, given)
        ours, patterns = with_patterns(ours, ours.pop("patterns", "default"))
        return cls(fn, jit_options, ours, patterns)


def _measuring(program: _Program, how: _How) -> Callable[..., Tuned]:
    """The function that `tune` returns."""
    from rewriter.measure import autotune

    config = resolve(program.options)
    inner = trace.jitted(program.fn, program.jit_options)

    @in_step
    def run(*args: Any, **kwargs: Any) -> Tuned:
        start = time.monotonic()
        on = device.named(config.target) if config.target else device.attached()
        if how.end_to_end:
            _require_attached(on)
        traced, placement = placed(inner, args, kwargs, program.jit_options)
        if how.end_to_end:
            _require_one_device(placement)
        found = rewriting.tasks(
            traced.closed_jaxpr, config, program.patterns, how.grad, placement
        )
        found = _sampled(found, how.sample)
        with _progress() as progress:
            tuned = autotune.measure(
                found, how.level, how.budget_s, progress, how.again, how.isolate, on
            )
        if how.end_to_end:
            plain = trace.jitted(program.fn, program.jit_options)
            leaves, call = trace.split(plain, args, kwargs)
            tuned |= _end_to_end(call, leaves, _options_again(program), tuned)
        _summary(tuned, on, len(found), time.monotonic() - start)
        return tuned

    return run


def _options_again(program: _Program) -> dict[str, Any]:
    """Our options as `optimize` takes them, with the user's own patterns."""
    named = program.options["patterns"].split(",")
    return {**program.options, "patterns": [*named, *program.patterns]}


def _require_possible(level: str, budget_s: float) -> None:
    from rewriter.measure import autotune  # what times kernels is seldom needed

    if level not in autotune.LEVELS:
        choose = ", ".join(autotune.LEVELS)
        raise ConfigError(
            f"level={level!r}", next_step=f"Choose {choose}", where=caller()
        )
    if not budget_s > 0:
        raise ConfigError(
            f"budget_s={budget_s!r}", wanted="seconds above 0", where=caller()
        )


def _require_attached(on: device.Device) -> None:
    if on != device.attached():
        raise ConfigError(
            f"end_to_end=True for {on.kind!r}",
            wanted="the attached device, on which the program can run",
            where=caller(),
        )


def _require_one_device(placement: Any) -> None:
    if placement is not None:
        raise ConfigError(
            "end_to_end=True for a program on several devices",
            wanted="one device",
            next_step="Tune its kernels alone, and compare by rewriter.benchmark",
            where=caller(),
        )


def _sampled(tasks: Sequence[Task], sample: Mapping[str, Any]) -> list[Task]:
    """The tasks with the user's own inputs."""
    ops = list(dict.fromkeys(t.op.name for t in tasks))
    for name in sample:
        if name not in ops:
            raise ConfigError(
                f"sample={{{name!r}: ...}}, and the program has no such site",
                next_step=known(name, ops),
                where=caller(),
            )
    own = {n: s if isinstance(s, Mapping) else {"sample": s} for n, s in sample.items()}
    return [
        replace(t, samples=tuple(own[t.op.name].items())) if t.op.name in own else t
        for t in tasks
    ]


def _end_to_end(
    call: Callable[..., Any], leaves: list[Any], options: dict[str, Any], by_site: Tuned
) -> Tuned:
    """Times of the whole program: as written, rewritten, and without each op."""
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        raise ConfigError(
            "end_to_end=True with shapes as arguments",
            wanted="arrays, on which the program can run",
            where=caller(),
        )
    forced = dict(options.pop("implementation", {}))
    tuned = [*as_list(options.pop("tuned", ())), by_site]
    options = {**options, "tuned": tuned, "end_to_end": False}

    def without(*ops: str) -> Any:
        given = {**forced, **dict.fromkeys(ops, XLA)}
        return optimize(call, **options, implementation=given)

    report = without().report(*leaves)
    if report.key is None:
        return Tuned()
    ops = sorted({s.op for s in report.sites if s.replaced})
    programs = {XLA: jax.jit(call), REWRITTEN: without()}
    if len(ops) > 1:
        programs |= {f"{WITHOUT}{op}": without(op) for op in ops}
    key, found = report.key, []

    def race() -> None:
        found.extend(race_programs(programs, leaves))
        cache.add(key, found)

    run_untraced(race, lambda: None)
    return Tuned(((key, tuple(found)),))


def _is_on_a_terminal() -> bool:
    return sys.stderr.isatty()


@contextlib.contextmanager
def _progress() -> Iterator[Progress | None]:
    """One bar on a terminal, nothing elsewhere."""
    if not _is_on_a_terminal():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("tuning {task.description}"), BarColumn(),
               MofNCompleteColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1)

        def progress(text: str, done: int, of: int) -> None:
            bar.update(task, description=text, completed=done, total=of)

        yield progress


def _summary(tuned: Tuned, on: device.Device, wanted: int, seconds: float) -> None:
    if not _is_on_a_terminal() or not wanted:
        return
    kernels = sum(
        (d := fastest(of_spelling(ms, spelling))) is not None
        and d.best.implementation.name != XLA
        for _, ms in tuned.entries
        for spelling in spellings(ms)[:1]
    )
    print(
        f"tuned {len(tuned)} of {wanted} sites and passes in {seconds:.0f} s on "
        f"{on.kind}: a kernel for {kernels}, XLA for the rest. "
        'Keep it: tuned.save("tuned.json")',
        file=sys.stderr,
    )
