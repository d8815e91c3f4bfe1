"""Checks programs in many processes, and outlives those that are lost.

Programs are checked together first. If their process is lost or takes too long, each is
checked in a process of its own. One that is lost again is compiled as users compile it.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from tests.soundness.worker import FAST, Key, Reply, Request, serve

TOGETHER = 15
"""Programs that are compiled together."""
USUAL = ""
"""XLA's flags as users have them."""
ABORTED = "compiler aborted"
UNFINISHED = "took too long"
NOT_REACHED = "not reached"


@dataclass(frozen=True)
class Task:
    """Programs that one process is to check.

    Attributes:
        request: What the process is asked.
        flags: What XLA is told.
    """

    request: Request
    flags: str = FAST


@dataclass(frozen=True)
class Checked:
    """Programs that were checked, and what came of it."""

    keys: tuple[Key, ...]
    reply: Reply


@dataclass(frozen=True)
class NotRun:
    """A program that was not checked.

    Attributes:
        key: Which.
        why: `ABORTED`, `UNFINISHED` or `NOT_REACHED`.
        rewritten: Whether it runs as it is written, and so the rewritten one does not.
    """

    key: Key
    why: str
    rewritten: bool = False


@dataclass
class Worker:
    """A process, and what it does at the moment."""

    process: SpawnProcess
    asked: Connection
    core: int
    folder: str
    flags: str
    task: Task | None = None
    until: float = field(default=float("inf"))


@dataclass(frozen=True)
class Limits:
    """How long things may take, in seconds.

    Attributes:
        task: Programs that are checked together, and each program that is alone.
        whole: Everything.
    """

    task: float
    whole: float = float("inf")


def run(
    keys: Sequence[Key], gradients: bool, processes: int, limits: Limits, folder: str
) -> Iterator[Checked | NotRun]:
    """Checks programs, and gives what comes of them as it comes.

    Args:
        keys: The programs.
        gradients: Whether to compare gradients, too.
        processes: How many processes to run at once.
        limits: How long they may take.
        folder: A folder for what processes write.
    """
    waiting = deque(
        Task(Request(tuple(keys[first : first + TOGETHER]), gradients))
        for first in range(0, len(keys), TOGETHER)
    )
    end = time.monotonic() + limits.whole
    workers = [_started(i, folder, FAST) for i in range(processes)]
    try:
        while (waiting or any(w.task for w in workers)) and time.monotonic() < end:
            workers = [_busy(w, waiting, limits) for w in workers]
            ready = wait(
                [w.asked for w in workers if w.task],
                max(0.0, min([end, *(w.until for w in workers)]) - time.monotonic()),
            )
            for i, worker in enumerate(workers):
                if worker.task is None:
                    continue
                if worker.asked in ready or time.monotonic() > worker.until:
                    workers[i], outcomes, more = _answered(worker)
                    waiting.extendleft(more)
                    yield from outcomes
    finally:
        for worker in workers:
            _stop(worker)
    left = [*(w.task for w in workers if w.task), *waiting]
    for key in sorted({k for t in left for k in t.request.keys}, key=lambda k: k.seed):
        yield NotRun(key, NOT_REACHED)


def _started(index: int, folder: str, flags: str) -> Worker:
    """A worker that waits for its first task."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    core, own = cores[index % len(cores)], os.path.join(folder, str(index))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=serve, args=(theirs, own, core, flags), daemon=True
    )
    process.start()
    theirs.close()
    return Worker(process, ours, index, own, flags)


def _again(worker: Worker, flags: str) -> Worker:
    """A new worker in the place of one that is lost, or has other flags."""
    _stop(worker)
    return _started(worker.core, os.path.dirname(worker.folder), flags)


def _stop(worker: Worker) -> None:
    worker.process.kill()
    worker.process.join()
    worker.asked.close()


def _busy(worker: Worker, waiting: deque[Task], limits: Limits) -> Worker:
    """The worker, with a task if there is one."""
    if worker.task or not waiting:
        return worker
    task = waiting.popleft()
    if worker.flags != task.flags:
        worker = _again(worker, task.flags)
    try:
        worker.asked.send(task.request)
    except OSError:  # it died without a task: a new one takes this one
        worker = _again(worker, task.flags)
        worker.asked.send(task.request)
    return replace(worker, task=task, until=time.monotonic() + limits.task)


def _answered(worker: Worker) -> tuple[Worker, list[Checked | NotRun], list[Task]]:
    """A worker that is free again, what came of its task, and what is to be tried."""
    task = worker.task
    assert task is not None
    try:
        if not worker.asked.poll():
            raise TimeoutError
        reply = worker.asked.recv()
    except (EOFError, ConnectionError, TimeoutError) as error:
        why = UNFINISHED if isinstance(error, TimeoutError) else ABORTED
        return _again(worker, FAST), *lost(task, why)
    free = replace(worker, task=None, until=float("inf"))
    if task.request.only_written:
        return free, [NotRun(k, ABORTED, rewritten=True) for k in task.request.keys], []
    return free, [Checked(task.request.keys, reply)], []


def lost(task: Task, why: str) -> tuple[list[Checked | NotRun], list[Task]]:
    """What follows if a process was lost with a task: outcomes, and what to try next.

    Args:
        task: The task.
        why: `ABORTED` or `UNFINISHED`.
    """
    request = task.request
    if len(request.keys) > 1:
        alone = [replace(request, keys=(key,)) for key in request.keys]
        return [], [Task(r) for r in alone]
    if why == UNFINISHED or request.only_written:
        return [NotRun(request.keys[0], why)], []
    if task.flags == FAST:
        return [], [replace(task, flags=USUAL)]
    return [], [replace(task, request=replace(request, only_written=True))]
