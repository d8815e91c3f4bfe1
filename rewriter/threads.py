"""Jobs in, results out: threads with the settings of the one that asks."""

from __future__ import annotations

import collections
import contextlib
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

LATE = "was not compiled within the time for one site"
HUNG = "hangs in compilation"

AT_ONCE = 4
"""Jobs at once, at most."""


def side_by_side(
    jobs: Sequence[Callable[[], Any]],
    start_by: float,
    end_by: float,
    at_once: int = AT_ONCE,
    surely: int = 1,
    done_by: float = math.inf,
) -> list[Any]:
    """Runs jobs in threads with this thread's settings; returns results in order.

    In the place of a result is a text where there is none: the job failed, was not
    begun in time, or did not end in time and was left behind.

    Args:
        jobs: Functions without arguments, the most wanted first.
        start_by: The `time.monotonic` after which none but the first jobs begin.
        end_by: The `time.monotonic` after which none is waited for.
        at_once: Jobs at once, at most.
        surely: How many of the first jobs begin at any time.
        done_by: The `time.monotonic` after which none of the others begins that would
            not end before, if it took as long as those before did on average.
    """
    results: dict[int, Any] = {}
    waiting, lock = collections.deque(range(len(jobs))), threading.Lock()
    took: list[float] = []
    ready = settings()

    def work() -> None:
        while True:
            with lock:
                begin = time.monotonic()
                ends = begin + (statistics.fmean(took) if took else 0.0)
                late = begin > start_by or ends > done_by
                if not waiting or (late and waiting[0] >= surely):
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
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end_by - time.monotonic()))
    return [results.get(i, LATE) for i in range(len(jobs))]


def settings() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns this thread's settings that change what is compiled, for another one."""
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


def first_line(problem: BaseException) -> str:
    """Returns the first line of an error, with its kind."""
    text = str(problem).strip().splitlines()
    kind = type(problem).__name__
    if "RESOURCE_EXHAUSTED" in str(problem):
        kind = "out of memory"
    return f"{kind}: {text[0][:200]}" if text else kind
