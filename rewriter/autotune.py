"""Sites in, measurements out: every candidate compiled, checked and timed.

A candidate is the op's plain form as XLA compiles it, or a kernel with a config, or
one kernel's forward with another's backward. Candidates are compiled side by side in
threads, then run one by one: each must first give the reference's numbers on the
inputs it is timed on. Those that are far behind after a few runs are dropped. One
that fails, hangs in compilation or gives other numbers is a measurement with a
problem instead of a time; the others go on.

All of it happens in a thread of its own, so that it may be asked for while JAX traces.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from rewriter import cache, device, oracle, site, timing
from rewriter.device import Device
from rewriter.implementation import (
    XLA,
    Implementation,
    build,
    by_thumb,
    settings,
)
from rewriter.kernel import Kernel, Spec, worth_measuring
from rewriter.op import Op
from rewriter.registry import REFERENCE
from rewriter.tuned import (
    FORWARD,
    PROGRAM,
    Key,
    Measurement,
    Tuned,
    decide,
    key_of,
    merge,
    time_text,
    version_of,
)

log = logging.getLogger("rewriter.tune")

Compiled = Any

LEVELS = {"quick": 1, "full": 24}
"""How many configs of a kernel are measured at most."""

SITE_S = 15.0
"""Seconds that one site and pass may take, within the whole budget."""

COMPILING = 0.5
"""The share of a site's seconds after which no compilation begins."""

HUNG_S = 60.0
"""Seconds after which a compilation is not waited for any more."""

STAGES = ((1, 3.0), (3, 1.3), (10, 1.1), (20, math.inf))
"""After so many turns, candidates that take so many times the best's are dropped."""

WHOLE_TURNS = 12
"""Turns of whole programs."""

TURN_S = 0.05
"""Seconds of a turn by the wall clock."""


@dataclass(frozen=True)
class Task:
    """A use of an op to be measured in one pass; equal sites are one task.

    Attributes:
        op: The op.
        spec: Shapes, dtypes and parameters.
        kernels: The op's kernels, best first.
        passes: ``"forward"`` or ``"forward_and_vjp"``.
    """

    op: Op
    spec: Spec
    kernels: tuple[Kernel, ...]
    passes: str

    def key(self, on: Device) -> Key:
        """Returns the key of its measurements."""
        return key_of(self.spec, self.passes, on.kind)


def side_by_side(
    jobs: Sequence[Callable[[], Any]], start_by: float, end_by: float
) -> list[Any]:
    """Runs jobs in threads with this thread's settings; returns results in order.

    In the place of a result is a text where there is none: the job failed, was not
    begun in time, or did not end in time and was left behind.

    Args:
        jobs: Functions without arguments, the most wanted first.
        start_by: The `time.monotonic` after which no job but the first begins.
        end_by: The `time.monotonic` after which none is waited for.
    """
    results: dict[int, Any] = {}
    waiting, lock = collections.deque(range(len(jobs))), threading.Lock()
    ready = _settings()

    def work() -> None:
        while True:
            with lock:
                late = time.monotonic() > start_by
                if not waiting or (late and waiting[0] != 0):
                    return
                i = waiting.popleft()
                results[i] = HUNG
            try:
                with ready():
                    results[i] = jobs[i]()
            except BaseException as problem:
                results[i] = f"does not compile: {_line(problem)}"

    count = min(len(jobs), max(1, (os.cpu_count() or 1) // 2), 8)
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end_by - time.monotonic()))
    return [results.get(i, LATE) for i in range(len(jobs))]


LATE = "was not compiled within the time for one site"
HUNG = "hangs in compilation"


# ------------------------------------------------------------------ candidates
def candidates(
    task: Task, on: Device, level: str, known: Sequence[Measurement] = ()
) -> tuple[Implementation, ...]:
    """Returns what is worth measuring for a task, the program as written first.

    Args:
        task: The task.
        on: The device.
        level: ``"quick"``, one config of each kernel, or ``"full"``.
        known: Measurements of its forward; the best config of each kernel and the
            fastest kernel are taken from them.
    """
    most = LEVELS[level]
    taking = [
        k for k in task.kernels
        if on.platform in k.platforms and k.supports(task.spec).ok
    ]  # fmt: skip
    found = [Implementation()]
    if task.passes == FORWARD:
        for k in taking:
            configs, _ = worth_measuring(k.space, task.spec, on, most)
            found += [Implementation(k.name, config=settings(c)) for c in configs]
        return tuple(found)
    for k in taking:
        forward = _best_of(k.name, known) or by_thumb(task.spec, on, k)
        configs, _ = worth_measuring(k.backward_space, task.spec, on, most)
        found += [
            Implementation(k.name, "", forward.config, settings(c)) for c in configs
        ]
    if level == "full":
        found += _mixed(task, on, taking, known)
    return tuple(dict.fromkeys(found))


def _best_of(name: str, known: Sequence[Measurement]) -> Implementation | None:
    decision = decide([m for m in known if m.implementation.forward == name])
    return decision.best.implementation if decision else None


def _mixed(
    task: Task, on: Device, taking: Sequence[Kernel], known: Sequence[Measurement]
) -> list[Implementation]:
    """The fastest forward with the backward of other kernels that need nothing of it.

    A backward that reads residuals would run its own kernel's forward first, and so
    can only lose to that kernel's own pair.
    """
    decision = decide(known)
    best = decision.best.implementation if decision else Implementation()
    first = REFERENCE if best.forward == XLA else best.forward
    config = None if best.forward == XLA else best.config
    others = [k for k in taking if k.name != first and _stands_alone(task, k)]
    made = [by_thumb(task.spec, on, None, k) for k in others]
    return [replace(m, forward=first, config=config) for m in made]


def _stands_alone(task: Task, kernel: Kernel) -> bool:
    """Whether a kernel's backward reads nothing that its forward saves."""
    if kernel.backward is None or kernel.saves_out:
        return False
    spec = task.spec
    specs = {
        n: jax.ShapeDtypeStruct(spec.shape(n), spec.dtype(n)) for n in spec.operands
    }
    run = functools.partial(kernel.forward, **dict(spec.params), residuals=True)
    try:
        return not jax.tree.leaves(jax.eval_shape(lambda x: run(**x), specs)[1])
    except Exception:  # it will say so when it is compiled
        return False


# --------------------------------------------------------------------- driving
def measure(
    tasks: Sequence[Task],
    level: str = "full",
    budget_s: float = 600.0,
    progress: Callable[[str, int, int], None] | None = None,
    again: bool = False,
) -> Tuned:
    """Returns the measurements of tasks, those of the cache included, and caches them.

    Args:
        tasks: What to measure; forward passes are measured before gradients.
        level: ``"quick"`` or ``"full"``.
        budget_s: Seconds of wall time; what does not fit is not measured.
        progress: Told what is measured now, how many candidates are done, of how many.
        again: Measure also what the cache has.
    """
    on = device.attached()
    until = time.monotonic() + budget_s
    made = _Made()
    stop = threading.Event()

    def run() -> None:
        ordered = sorted(tasks, key=lambda t: t.passes != FORWARD)
        for i, task in enumerate(ordered):
            left = until - time.monotonic()
            if stop.is_set() or left <= 0:
                made.skipped += len(ordered) - i
                return
            _measure_task(task, on, level, until, made, progress, again)

    _apart(run, stop)
    if made.skipped:
        log.warning("%d sites were not measured within %.0f s", made.skipped, budget_s)
    return made.tuned


def measure_missing(tasks: Sequence[Task], level: str) -> Tuned:
    """Measures what the cache lacks, for `optimize` while it traces.

    With several processes nothing is timed: all of them must compile one program.
    """
    if jax.process_count() > 1:
        log.warning("nothing is timed with several processes; share a Tuned instead")
        return Tuned()
    return measure(tasks, level, budget_s=SITE_S * len(tasks))


@dataclass
class _Made:
    """What a run has measured so far."""

    tuned: Tuned = field(default_factory=Tuned)
    skipped: int = 0


def race_programs(
    programs: Mapping[str, Any], leaves: Sequence[Any]
) -> tuple[Measurement, ...]:
    """Returns the times of whole programs on the same arguments, in turns.

    Args:
        programs: Jitted functions by the name of what was done to them.
        leaves: Their arguments.
    """
    jobs = [lambda p=p: p.lower(*leaves).compile() for p in programs.values()]
    forever = time.monotonic() + 1e6
    made = dict(zip(programs, side_by_side(jobs, forever, forever), strict=True))
    problems = {n: p for n, p in made.items() if isinstance(p, str)}
    for name, program in made.items():
        if name not in problems:
            try:
                jax.block_until_ready(program(*leaves))
            except Exception as problem:
                problems[name] = f"does not run: {_line(problem)}"
    alive = [n for n in made if n not in problems]
    times = timing.measure([made[n] for n in alive], [leaves], WHOLE_TURNS)
    found = [
        measurement(Implementation(n), PROGRAM, s, made[n])
        for n, s in zip(alive, times, strict=True)
    ]
    failed = [
        Measurement(Implementation(n), PROGRAM, jax.__version__, None, problem=p)
        for n, p in problems.items()
    ]
    return (*found, *failed)


def measurement(
    made: Implementation, version: str, samples: timing.Samples, program: Compiled
) -> Measurement:
    """Returns the samples of a compiled program as a measurement."""
    return Measurement(
        made,
        version,
        jax.__version__,
        median_us=round(1e6 * samples.median, 3),
        sigma_us=round(1e6 * samples.sigma, 3),
        runs=len(samples.seconds),
        method=samples.method,
        temp_bytes=temp_bytes(program),
    )


def _apart(run: Callable[[], None], stop: threading.Event) -> None:
    """Runs a function in a thread without JAX's tracing, and waits for it.

    An interrupt lets it finish the site it is at, and keeps what was measured.
    """
    problems: list[BaseException] = []
    ready = _settings()

    def body() -> None:
        try:
            with ready():
                run()
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=body, name="rewriter-tune", daemon=True)
    thread.start()
    while thread.is_alive():
        try:
            thread.join(0.1)
        except KeyboardInterrupt:
            stop.set()
            log.warning("interrupted; what was measured is kept")
            thread.join(2 * SITE_S)
            break
    if problems:
        raise problems[0]


def _settings() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """This thread's settings that change what is compiled, for another thread."""
    x64 = bool(jax.config.jax_enable_x64)  # pyright: ignore
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore
    where = jax.config.jax_default_device  # pyright: ignore

    @contextlib.contextmanager
    def ready() -> Iterator[None]:
        with (
            jax.enable_x64(x64),
            jax.default_matmul_precision(precision),
            jax.default_device(where),
        ):
            yield

    return ready


def _measure_task(
    task: Task,
    on: Device,
    level: str,
    latest: float,
    made: _Made,
    progress: Callable[[str, int, int], None] | None,
    again: bool,
) -> None:
    key, forward = task.key(on), key_of(task.spec, FORWARD, on.kind)
    kernels = {k.name: k for k in task.kernels}
    mine = Tuned(cache.entries(on.kind, task.spec.op)) | made.tuned
    wanted = candidates(task, on, level, _current(mine.find(forward), kernels))
    old = () if again else _current(mine.find(key), kernels)
    had = {m.implementation for m in old}
    missing = tuple(i for i in wanted if i not in had)
    if missing:
        say = functools.partial(progress or _silent, key.text)
        until = min(time.monotonic() + SITE_S, latest)
        new = _Race(task, on, until, latest, say).run(missing)
        cache.add(key, new)
        old = merge(old, new)
        _tell(key, old)
    by = {m.implementation: m for m in old}
    kept = tuple(by[i] for i in wanted if i in by)
    made.tuned |= Tuned(((key, kept),))


def _current(
    found: Sequence[Measurement], kernels: Mapping[str, Kernel]
) -> tuple[Measurement, ...]:
    """Those of kernels as they are now, under this JAX."""
    return tuple(
        m for m in found
        if m.jax == jax.__version__
        and all(n in kernels for n in m.implementation.kernels)
        and m.version == version_of(m.implementation, kernels)
    )  # fmt: skip


def _silent(text: str, done: int, of: int) -> None:
    del text, done, of


def _tell(key: Key, measured: Sequence[Measurement]) -> None:
    decision = decide(measured)
    if decision is None:
        log.info("%s: nothing could be timed", key.text)
        return
    best = decision.best
    took = time_text(best.median_us or 0.0)
    log.info("%s: %s, %s", key.text, best.implementation.text, took)
    for name, why in decision.lost:
        log.debug("%s: not %s: %s", key.text, name, why)


# ----------------------------------------------------------------- one task


@dataclass
class _Race:
    """The candidates of one task: compiled, checked, timed.

    Attributes:
        task: The task.
        on: The device.
        until: The `time.monotonic` by which it should be done.
        latest: The one at which the whole budget ends.
        say: Told how many candidates are done, of how many.
    """

    task: Task
    on: Device
    until: float
    latest: float
    say: Callable[[int, int], None]

    def run(self, wanted: Sequence[Implementation]) -> list[Measurement]:
        """Returns one measurement for each candidate."""
        try:
            sets = inputs(self.task, self.on)
        except Exception as problem:
            return [self._failed(i, f"no inputs: {_line(problem)}") for i in wanted]
        programs = self._compiled(wanted, sets[0])
        checked = self._checked(wanted, programs, sets[0])
        times, problems = self._timed(wanted, checked, sets)
        return [
            self._failed(i, problems[i])
            if i in problems
            else self._measured(i, times[i], checked[i])
            for i in wanted
        ]

    def _failed(self, made: Implementation, problem: str) -> Measurement:
        version = version_of(made, {k.name: k for k in self.task.kernels})
        return Measurement(made, version, jax.__version__, None, problem=problem)

    def _measured(
        self, made: Implementation, samples: timing.Samples, program: Compiled
    ) -> Measurement:
        version = version_of(made, {k.name: k for k in self.task.kernels})
        return measurement(made, version, samples, program)

    # ------------------------------------------------------------- compiling
    def _compiled(
        self, wanted: Sequence[Implementation], args: Sequence[Any]
    ) -> dict[Implementation, Compiled | str]:
        """Compiled programs, or why there is none.

        What has begun is waited for, since XLA times products on the device while it
        compiles and would disturb the timing of others; one that hangs is left behind.
        """
        jobs = [
            functools.partial(self._compile, function(self.task, made), args)
            for made in wanted
        ]
        left = max(0.0, self.until - time.monotonic())
        now = time.monotonic()
        begin = now + COMPILING * left
        found = side_by_side(jobs, start_by=begin, end_by=self._hung())
        return dict(zip(wanted, found, strict=True))

    def _hung(self) -> float:
        """When a compilation that begins now is left behind."""
        now = time.monotonic()
        return min(now + HUNG_S, max(self.latest, now + 1))

    def _compile(self, run: Callable[..., Any], args: Sequence[Any]) -> Compiled:
        return jax.jit(run).lower(*args).compile()

    # -------------------------------------------------------------- checking
    def _checked(
        self,
        wanted: Sequence[Implementation],
        programs: Mapping[Implementation, Compiled | str],
        args: Sequence[Any],
    ) -> dict[Implementation, Compiled | str]:
        """The programs whose numbers are right, or what is wrong with the others."""
        want, source = self._wanted(args)
        limits: list[float] = []
        checked: dict[Implementation, Compiled | str] = {}
        for i, made in enumerate(wanted):
            self.say(i, len(wanted))
            program = programs[made]
            if not isinstance(program, str):
                program = self._tried(program, args, want, made, limits, source)
            checked[made] = program
            if want is None and not isinstance(program, str):
                want = list(jax.tree.leaves(program(*args)))
                source = "the reference" if made.forward == XLA else made.name
        return checked

    def _wanted(self, args: Sequence[Any]) -> tuple[list[Any] | None, str]:
        """The reference's results, at full precision for wide operands.

        None where it cannot be run: then the first that runs is the measure.
        """
        wide = any(a.dtype.itemsize >= 4 for a in args if _is_float(a))

        def run() -> list[Any]:
            with jax.default_matmul_precision("highest" if wide else None):
                exact = reference(self.task)
                return list(jax.tree.leaves(jax.jit(exact)(*args)))

        now = time.monotonic()
        (out,) = side_by_side([run], start_by=now, end_by=self._hung())
        if isinstance(out, str):
            log.debug("%s: no exact reference: %s", self.task.spec.op, out)
            return None, ""
        return out, "the reference"

    def _tried(
        self,
        program: Compiled,
        args: Sequence[Any],
        want: list[Any] | None,
        made: Implementation,
        limits: list[float],
        source: str,
    ) -> Compiled | str:
        if problem := _too_large(program):
            return problem
        try:
            got = jax.tree.leaves(program(*args))
            jax.block_until_ready(got)
            if want is None:
                return program
            errors = [float(_error(g, w)) for g, w in zip(got, want, strict=True)]
        except Exception as problem:
            return f"does not run: {_line(problem)}"
        if made.forward == XLA:
            limits.extend(2 * e for e in errors)
            return program
        for n, (e, g) in enumerate(zip(errors, got, strict=True)):
            limit = max(oracle.allowed(g.dtype), limits[n] if limits else 0.0)
            if not e <= limit:
                which = "result" if n == 0 else f"gradient {n}"
                return f"wrong: {which} differs from {source} by {e:.1e}"
        return program

    # ---------------------------------------------------------------- timing
    def _timed(
        self,
        wanted: Sequence[Implementation],
        checked: Mapping[Implementation, Compiled | str],
        sets: Sequence[Sequence[Any]],
    ) -> tuple[dict[Implementation, timing.Samples], dict[Implementation, str]]:
        problems = {i: p for i, p in checked.items() if isinstance(p, str)}
        alive = [i for i in wanted if i not in problems]
        times: dict[Implementation, timing.Samples] = {}
        done = 0
        for turns, factor in STAGES:
            if not alive or (done and time.monotonic() > self.until):
                break
            programs = [checked[i] for i in alive]
            try:
                found = timing.measure(
                    programs, sets, turns - done, until=self.until, turn_s=TURN_S
                )
            except Exception as problem:
                text = f"does not run: {_line(problem)}"
                late = {i: text for i in alive if i not in times}
                return times, problems | late
            for i, samples in zip(alive, found, strict=True):
                times[i] = times[i] + samples if i in times else samples
            best = min(times[i].median for i in alive)
            alive = [i for i in alive if times[i].median <= factor * best]
            done = turns
            self.say(len(wanted) - len(alive), len(wanted))
        return times, problems


def function(task: Task, made: Implementation) -> Callable[..., Any]:
    """Returns what is timed: a function of the operands, and of the cotangent.

    It returns the result; with gradients the result and the gradients of all floating
    operands, so that no part of the work can be left out. For ``"xla"`` it is the op
    as programs usually write it.

    Args:
        task: The task.
        made: The kernels.
    """
    names, params = task.spec.operands, dict(task.spec.params)
    if made.forward == XLA:
        return _plain(task, task.op.usual or task.op.reference)
    kernels = (("default", build(made, task.op, task.kernels)),)

    def result(*operands: Any) -> Any:
        named = dict(zip(names, operands, strict=True))
        return site.bind(task.op, named, params, kernels)

    return _in_passes(task, result)


def reference(task: Task) -> Callable[..., Any]:
    """Returns the same of the op's reference."""
    return _plain(task, task.op.reference)


def _plain(task: Task, form: Callable[..., Any]) -> Callable[..., Any]:
    names, params = task.spec.operands, dict(task.spec.params)

    def calling(form: Callable[..., Any]) -> Callable[..., Any]:
        named = lambda operands: dict(zip(names, operands, strict=True))
        return _in_passes(task, lambda *operands: form(**named(operands), **params))

    if task.passes == FORWARD or task.op.general is None:
        return calling(form)
    specs = [
        jax.ShapeDtypeStruct(task.spec.shape(n), task.spec.dtype(n)) for n in names
    ]
    try:
        out = jax.eval_shape(
            lambda *x: form(**dict(zip(names, x, strict=True)), **params), *specs
        )
        jax.eval_shape(calling(form), *specs, out)
    except Exception:  # what JAX says of a derivative it lacks has many kinds
        return calling(task.op.general)
    return calling(form)


def _in_passes(task: Task, result: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, or one of the cotangent too that gives gradients too."""
    if task.passes == FORWARD:
        return result
    moving = [
        i
        for i, name in enumerate(task.spec.operands)
        if jnp.issubdtype(task.spec.dtype(name), jnp.inexact)
    ]

    def both(*args: Any) -> Any:
        operands, cotangent = list(args[:-1]), args[-1]

        def of(*chosen: Any) -> Any:
            full = list(operands)
            for i, value in zip(moving, chosen, strict=True):
                full[i] = value
            return result(*full)

        out, back = jax.vjp(of, *(operands[i] for i in moving))
        return out, back(cotangent.astype(out.dtype))

    return both


def inputs(task: Task, on: Device) -> list[list[Any]]:
    """Returns sets of realistic operands, and a normal cotangent for gradients.

    They come from the op's `sample`, which states how lengths, masks and group sizes
    are drawn. On a GPU there are as many sets as exceed its cache twice, from three to
    eight, so that none is found there by the next run; elsewhere there is one.

    Raises:
        ValueError: If the op has integer operands and no `sample`.
    """
    spec = task.spec
    specs = {
        n: jax.ShapeDtypeStruct(spec.shape(n), spec.dtype(n)) for n in spec.operands
    }
    sample = task.op.sample or _normal
    params = dict(spec.params)
    out = jax.eval_shape(lambda **x: task.op.reference(**x, **params), **specs)

    def one(key: Any) -> list[Any]:
        made = sample(key, specs, params)
        values = [made[n] for n in spec.operands]
        if task.passes == FORWARD:
            return values
        own = jax.random.fold_in(key, 1)
        return [*values, jax.random.normal(own, out.shape).astype(out.dtype)]

    make = jax.jit(one)
    first = make(jax.random.key(0))
    count = 1
    if on.platform == "cuda":
        size = max(1, sum(x.nbytes for x in first))
        count = max(3, min(8, math.ceil(2 * (on.cache or 64 << 20) / size)))
        if count * size > (on.memory or 16 << 30) / 8:
            count = 3
    return [first, *(make(jax.random.key(i)) for i in range(1, count))]


def _normal(key: Any, operands: Mapping[str, Any], params: Any) -> dict[str, Any]:
    """Normal operands, for ops without a `sample` of their own."""
    del params
    for name, x in operands.items():
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise ValueError(
                f"operand {name} is {x.dtype} and the op has no sample=: what its "
                "values look like is not known"
            )
    keys = jax.random.split(key, len(operands))
    return {
        n: jax.random.normal(k, x.shape).astype(x.dtype)
        for k, (n, x) in zip(keys, operands.items(), strict=True)
    }


def temp_bytes(program: Compiled) -> int | None:
    """Returns a compiled program's temporary memory, where the backend says."""
    try:
        return int(program.memory_analysis().temp_size_in_bytes)
    except Exception:  # a backend without the analysis
        return None


def _too_large(program: Compiled) -> str:
    """Why a program will not fit into what is left of the device's memory, or ''."""
    need = temp_bytes(program)
    stats = jax.devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    if need is None or not limit:
        return ""
    free = limit - stats.get("bytes_in_use", 0)
    if need <= free:
        return ""
    return f"out of memory: takes {need / 2**30:.1f} GiB of {free / 2**30:.1f} GiB"


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


@jax.jit
def _error(got: Any, want: Any) -> Any:
    """The norm of the difference over that of ``want``, where ``want`` is finite."""
    wide = jnp.promote_types(jnp.result_type(got, want), jnp.float32)
    got, want = got.astype(wide), want.astype(wide)
    fine = jnp.isfinite(want)
    gap = jnp.where(fine, got - want, 0)
    norm = lambda x: jnp.sqrt(jnp.sum(jnp.square(jnp.abs(x))))
    size = norm(jnp.where(fine, want, 0))
    error = norm(gap) / jnp.where(size > 0, size, 1)
    return jnp.where(jnp.all(jnp.isfinite(gap)), error, jnp.inf)


def _line(problem: BaseException) -> str:
    """The first line of an error, with its kind."""
    text = str(problem).strip().splitlines()
    kind = type(problem).__name__
    if "RESOURCE_EXHAUSTED" in str(problem):
        kind = "out of memory"
    return f"{kind}: {text[0][:200]}" if text else kind
