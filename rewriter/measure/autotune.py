"""Measures the candidates of sites, except those that are already known.

A candidate is the op as XLA compiles it, or a kernel with a config, or one kernel's
forward with another's backward. Cached results are not measured again.

All of it happens in a thread of its own, so that it can be called while JAX traces.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import jax

from rewriter.errors import ConfigError, caller
from rewriter.hardware import ahead_of_time
from rewriter.measure import cache, static_cost
from rewriter.measure import isolate as isolation
from rewriter.measure.decision import fastest
from rewriter.measure.inputs import distributions
from rewriter.measure.key import FORWARD, Key, key_of
from rewriter.measure.measurement import ESTIMATES, Measurement, merge, time_text
from rewriter.measure.programs import Task
from rewriter.measure.race import Race
from rewriter.measure.tuned import Tuned
from rewriter.ops import device
from rewriter.ops.device import Device
from rewriter.ops.kernel import Kernel, worth_measuring
from rewriter.ops.registry import REFERENCE
from rewriter.site.implementation import XLA, Implementation, default_configs, settings
from rewriter.support.threads import check_stop, run_untraced

log = logging.getLogger("rewriter.tune")

Failed = tuple[Measurement, ...]

LEVELS = {"quick": 1, "full": 24}
"""The most configs of a kernel that are measured, by level."""

SITE_S = 15.0
"""Seconds for one site and pass, within the whole budget."""


# ------------------------------------------------------------------ candidates
def candidates(
    task: Task,
    on: Device,
    level: str,
    known: Sequence[Measurement] = (),
    isolate: bool = False,
) -> tuple[Implementation, ...]:
    """Returns the candidates worth measuring for a task, the program as written first.

    Args:
        task: The task.
        on: The device.
        level: ``"quick"``, one config of each kernel, or ``"full"``.
        known: Measurements of its forward; the best config of each kernel and the
            fastest kernel are taken from them.
        isolate: Whether kernels run in a child process first. Kernels whose code was
            never run on a device are candidates only then.
    """
    most = LEVELS[level]
    taking = [
        k for k in task.kernels
        if on.platform in k.platforms and (k.traits.tried or isolate)
        and k.limits.runs_on(on).ok and k.limits.supports(task.spec).ok
    ]  # fmt: skip
    found = [Implementation()]
    if task.passes == FORWARD:
        for k in taking:
            configs, _ = worth_measuring(k.space, task.spec, on, most)
            found += [Implementation(k.name, config=settings(c)) for c in configs]
        return tuple(found)
    for k in taking:
        forward = _best_of(k.name, known) or default_configs(task.spec, on, k)
        configs, _ = worth_measuring(k.backward_space, task.spec, on, most)
        found += [
            Implementation(k.name, "", forward.config, settings(c)) for c in configs
        ]
    if level == "full":
        found += _mixed(task, on, taking, known)
    return tuple(dict.fromkeys(found))


def _best_of(name: str, known: Sequence[Measurement]) -> Implementation | None:
    decision = fastest([m for m in known if m.implementation.forward == name])
    return decision.best.implementation if decision else None


def _mixed(
    task: Task, on: Device, taking: Sequence[Kernel], known: Sequence[Measurement]
) -> list[Implementation]:
    """The fastest forward with backwards of other kernels that need no residuals.

    A backward that reads residuals would run its own kernel's forward first, so it can
    only lose to that kernel's own pair.
    """
    decision = fastest(known)
    best = decision.best.implementation if decision else Implementation()
    first = REFERENCE if best.forward == XLA else best.forward
    config = None if best.forward == XLA else best.config
    others = [k for k in taking if k.name != first and _stands_alone(task, k)]
    implementations = [default_configs(task.spec, on, None, k) for k in others]
    return [replace(m, forward=first, config=config) for m in implementations]


def _stands_alone(task: Task, kernel: Kernel) -> bool:
    """Whether a kernel's backward reads no residuals."""
    if kernel.backward is None or kernel.traits.saves_out:
        return False
    spec = task.spec
    specs = {
        n: jax.ShapeDtypeStruct(spec.shape(n), spec.dtype(n)) for n in spec.operands
    }
    run = functools.partial(kernel.forward, **dict(spec.params), residuals=True)
    try:
        return not jax.tree.leaves(jax.eval_shape(lambda x: run(**x), specs)[1])
    except Exception:  # compiling it reports the error
        return False


# --------------------------------------------------------------------- driving
def measure(
    tasks: Sequence[Task],
    level: str = "full",
    budget_s: float = 600.0,
    progress: Callable[[str, int, int], None] | None = None,
    again: bool = False,
    isolate: bool = False,
    on: Device | None = None,
    spares: bool = True,
) -> Tuned:
    """Returns the measurements of tasks, cached ones included, and caches new ones.

    For a TPU generation that is not attached, times are its compiler's estimates.

    Args:
        tasks: What to measure; forward passes are measured before gradients.
        level: ``"quick"`` or ``"full"``.
        budget_s: Seconds of wall time; measurements that do not fit are skipped.
        progress: Called with the current task, the number of finished candidates, and
            their total.
        again: Measure cached candidates again.
        isolate: Run each kernel first in a child process.
        on: The device kind; the one attached by default.
        spares: Whether to skip XLA's programs whose operations alone take longer than
            the best kernel.

    Raises:
        ConfigError: If the device kind is not attached and cannot be compiled for.
        KeyboardInterrupt: If interrupted, within a second; finished measurements are in
            the cache.
    """
    so_far = _Progress()
    on = on or device.attached()
    if on != device.attached() and not ahead_of_time.can_compile(on):
        raise ConfigError(
            f"target={on.kind!r} is not attached, this is {device.attached().kind!r}",
            next_step="Tune on such a device and load the file there is; or, for TPU "
            "v4 to 7x on Linux, pip install 'jax[tpu]' for estimates by its compiler",
            where=caller(),
        )
    _measure(tasks, level, budget_s, so_far, on, progress, again, isolate, spares)
    return so_far.tuned


def _measure(
    tasks: Sequence[Task],
    level: str,
    budget_s: float,
    so_far: _Progress,
    on: Device,
    progress: Callable[[str, int, int], None] | None = None,
    again: bool = False,
    isolate: bool = False,
    spares: bool = True,
) -> None:
    until = time.monotonic() + budget_s

    def run() -> None:
        ordered = sorted(tasks, key=lambda t: t.passes != FORWARD)
        for i, task in enumerate(ordered):
            left = until - time.monotonic()
            check_stop()
            if left <= 0:
                so_far.skipped += len(ordered) - i
                return
            _measure_task(
                task, on, level, until, so_far, progress, again, isolate, spares
            )

    run_untraced(run, _say_interrupted)
    if so_far.skipped:
        log.warning(
            "%d sites were not measured within %.0f s", so_far.skipped, budget_s
        )


def measure_missing(tasks: Sequence[Task], level: str) -> Tuned:
    """Measures candidates that are not cached, for `optimize` while it traces.

    With several processes nothing is timed: all of them must compile one program.

    Raises:
        KeyboardInterrupt: If interrupted; finished measurements are in the cache.
    """
    if jax.process_count() > 1:
        log.warning("nothing is timed with several processes; share a Tuned instead")
        return Tuned()
    so_far = _Progress()
    _measure(tasks, level, SITE_S * len(tasks), so_far, device.attached())
    return so_far.tuned


def _say_interrupted() -> None:
    log.warning("interrupted; what was measured is kept in %s", cache.path())


@dataclass
class _Progress:
    """The measurements of a run so far."""

    tuned: Tuned = field(default_factory=Tuned)
    skipped: int = 0


def _measure_task(
    task: Task,
    on: Device,
    level: str,
    latest: float,
    so_far: _Progress,
    progress: Callable[[str, int, int], None] | None,
    again: bool,
    isolate: bool,
    spares: bool,
) -> None:
    there = on == device.attached()
    if not there:
        task, isolate = replace(task, written=None), True
    key, forward = task.key(on), key_of(task.spec, FORWARD, on.kind)
    mine = Tuned(cache.entries(on.kind, task.spec.op)) | so_far.tuned
    known = _current(mine.find(forward), task, there)
    wanted = candidates(task, on, level, known, isolate)
    old = () if again else _current(mine.find(key), task, there)
    had = {m.implementation for m in old}
    missing = tuple(i for i in wanted if i not in had)
    left_out: tuple[Measurement, ...] = ()
    if there and isolate and missing:
        missing, crashed, left_out = _isolated(task, missing)
        cache.add(key, crashed)
        old = merge(old, crashed)
    if missing:
        say = functools.partial(progress or _no_progress, key.text)
        until = min(time.monotonic() + SITE_S, latest)
        if there:
            new = Race(task, on, until, latest, say, spares).run(missing)
        else:
            new = static_cost.estimated(task, on, missing, latest, say)
        cache.add(key, new)
        old = merge(old, new)
        _report_progress(key, old)
    by = {m.implementation: m for m in (*old, *left_out)}
    kept = tuple(by[i] for i in wanted if i in by)
    so_far.tuned |= Tuned(((key, kept),))


def _isolated(
    task: Task, missing: Sequence[Implementation]
) -> tuple[
    tuple[Implementation, ...], tuple[Measurement, ...], tuple[Measurement, ...]
]:
    """The candidates that run in a child; failed ones; ones that could not be tried."""
    kernels = [i for i in missing if i.kernels]
    problems, untried = isolation.first_runs(task, kernels) if kernels else ({}, "")

    def without(implementation: Implementation, why: str) -> Measurement:
        version = task.version_of(implementation)
        return Measurement(implementation, version, jax.__version__, None, problem=why)

    crashed = tuple(without(i, why) for i, why in problems.items())
    rest = [i for i in kernels if i not in problems] if untried else []
    left_out = tuple(without(i, untried) for i in rest)
    gone = {*problems, *rest}
    return tuple(i for i in missing if i not in gone), crashed, left_out


def _current(
    found: Sequence[Measurement], task: Task, there: bool
) -> tuple[Measurement, ...]:
    """Measurements that are still valid: this JAX, these kernel versions, this method.

    The inputs' distributions must be the same; without the device, the compiler. For
    XLA, the measured equations must be the task's own.
    """
    kernels = {k.name for k in task.kernels}
    drawn = tuple(filter(None, distributions(task)))

    def timed_alike(m: Measurement) -> bool:
        if not there:
            return m.method in ESTIMATES and m.driver == static_cost.compiler()
        return m.method not in ESTIMATES and tuple(n for n, _ in m.by_inputs) == drawn

    return tuple(
        m for m in found
        if m.jax == jax.__version__
        and all(n in kernels for n in m.implementation.kernels)
        and m.version == task.version_of(m.implementation)
        and (m.median_us is None or timed_alike(m))
    )  # fmt: skip


def _no_progress(text: str, done: int, of: int) -> None:
    del text, done, of


def _report_progress(key: Key, measured: Sequence[Measurement]) -> None:
    decision = fastest(measured)
    if decision is None:
        log.info("%s: nothing could be timed", key.text)
        return
    best = decision.best
    took = time_text(best.median_us or 0.0)
    log.info("%s: %s, %s", key.text, best.implementation.text, took)
    for name, why in decision.lost:
        log.debug("%s: not %s: %s", key.text, name, why)
