"""Runs jobs in threads that have the settings of the calling thread.

Work of an interrupted thread stops at the next `check_stop`. A compilation is left
behind in its thread, which does not keep the process from ending.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import math
import os
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any

import jax

LATE = "was not compiled within the time for one site"
HUNG = "hangs in compilation"

AT_ONCE = 4
"""The most jobs that run at once."""

STEP_S = 0.05
"""Seconds between two checks for a stop."""

GRACE_S = 0.5
"""Seconds after an interrupt for saving finished measurements."""


class Stopped(BaseException):
    """The caller was interrupted; this is no failure of a candidate."""


# ------------------------------------------------------------------ interrupting
_STOP: ContextVar[threading.Event | None] = ContextVar("rewriter.stop", default=None)


def stopping() -> bool:
    """Returns whether the caller of this thread's work was interrupted."""
    stop = _STOP.get()
    return stop is not None and stop.is_set()


def check_stop() -> None:
    """Ends this thread's work if the caller was interrupted.

    Raises:
        Stopped: If so.
    """
    if stopping():
        raise Stopped


def run_untraced(run: Callable[[], None], interrupted: Callable[[], None]) -> None:
    """Runs a function in a thread without JAX's tracing, and waits for it.

    Args:
        run: The function; `check_stop` in it ends it after an interrupt.
        interrupted: Called after an interrupt, before `run` gets some time to save its
            results.

    Raises:
        KeyboardInterrupt: After an interrupt, whatever the function is doing.
        BaseException: What the function raises.
    """
    stop, done = threading.Event(), threading.Event()
    problems: list[BaseException] = []
    ready = settings(stop)

    def body() -> None:
        try:
            with ready():
                run()
        except Stopped:
            pass
        except BaseException as problem:
            problems.append(problem)
        finally:
            done.set()

    try:
        _started(body)
        while not done.wait(STEP_S):  # a join that is interrupted takes it for dead
            pass
    except KeyboardInterrupt:
        stop.set()
        interrupted()
        done.wait(GRACE_S)
        raise
    if problems:
        raise problems[0]


# ------------------------------------------------------------------- side by side
def start_in_background(job: Callable[[], Any]) -> Callable[[], Any]:
    """Runs a job in a thread beside this one, with its settings.

    Returns:
        A function that waits for the job, and returns its result or raises its error.
    """
    found: Future[Any] = Future()
    ready = settings()

    def work() -> None:
        try:
            with ready():
                found.set_result(job())
        except BaseException as problem:
            found.set_exception(problem)

    thread = _started(work)

    def result() -> Any:
        _wait_for(thread, math.inf)
        return found.result()

    return result


def _started(work: Callable[[], None]) -> threading.Thread:
    """A thread that does not keep the process from ending."""
    thread = threading.Thread(target=work, name="rewriter", daemon=True)
    _STARTED.add(thread)
    thread.start()
    return thread


@atexit.register
def _wait_a_little() -> None:
    """Waits briefly for abandoned threads to end.

    Before Python 3.14, a thread that returns from a compilation while Python exits
    aborts the process.
    """
    until = time.monotonic() + GRACE_S
    for thread in list(_STARTED):
        thread.join(max(0.0, until - time.monotonic()))


_STARTED: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _wait_for(thread: threading.Thread, until: float) -> None:
    """Waits for a thread, until a `time.monotonic` or an interrupt."""
    while thread.is_alive() and (left := until - time.monotonic()) > 0:
        thread.join(min(STEP_S, left))
        check_stop()
    check_stop()


def side_by_side(
    jobs: Sequence[Callable[[], Any]],
    start_by: float,
    end_by: float,
    at_once: int = AT_ONCE,
    surely: int = 1,
    done_by: float = math.inf,
) -> list[Any]:
    """Runs jobs in threads with this thread's settings; returns results in order.

    A text takes the place of a missing result: the job failed, did not begin in time,
    or did not end in time and was abandoned.

    Args:
        jobs: Functions without arguments, most important first.
        start_by: The `time.monotonic` after which only the first jobs may begin.
        end_by: The `time.monotonic` after which no job is waited for.
        at_once: Jobs at once, at most.
        surely: The number of first jobs that may begin at any time.
        done_by: The `time.monotonic` by which other jobs must be expected to end, or
            they do not begin. The average time of finished jobs is expected.

    Raises:
        Stopped: If the caller was interrupted; running jobs are abandoned.
    """
    results: dict[int, Any] = {}
    waiting, lock = collections.deque(range(len(jobs))), threading.Lock()
    took: list[float] = []
    ready = settings()
    stop = _STOP.get() or threading.Event()

    def work() -> None:
        while True:
            with lock:
                begin = time.monotonic()
                ends = begin + (statistics.fmean(took) if took else 0.0)
                late = begin > start_by or ends > done_by
                if stop.is_set() or not waiting or (late and waiting[0] >= surely):
                    return
                i = waiting.popleft()
                results[i] = HUNG
            try:
                with ready():
                    results[i] = jobs[i]()
            except BaseException as problem:
                results[i] = f"does not compile: {first_line(problem)}"
            took.append(time.monotonic() - begin)

    count = min(len(jobs), max(1, (os.cpu_count() or 1) // 2), at_once)
    threads = [_started(work) for _ in range(count)]
    for thread in threads:
        _wait_for(thread, end_by)
    return [results.get(i, LATE) for i in range(len(jobs))]


def settings(
    stop: threading.Event | None = None,
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns this thread's settings that affect compilation, for another thread.

    Args:
        stop: The event that stops the other thread; by default this thread's own.
    """
    stop = stop or _STOP.get()
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
            before = _STOP.set(stop)
            try:
                yield
            finally:
                _STOP.reset(before)

    return ready


def first_line(problem: BaseException) -> str:
    """Returns the first line of an error, with its kind."""
    text = str(problem).strip().splitlines()
    kind = type(problem).__name__
    if "RESOURCE_EXHAUSTED" in str(problem):
        kind = "out of memory"
    return f"{kind}: {text[0][:200]}" if text else kind
