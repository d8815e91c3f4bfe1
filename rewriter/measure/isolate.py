"""Runs each candidate once in a child process, and drops those that crash.

A kernel may crash, hang, or leave the device in an error that every later call gets.
None of it can be caught. So each candidate is compiled and run once in a child process,
which is started again after a failure. The child finds op and kernels by import: a
pattern must be at the top level of a module that is not the script itself.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import jax

from rewriter.find.pattern import Pattern
from rewriter.measure.inputs import inputs
from rewriter.measure.programs import Task, function
from rewriter.ops import device
from rewriter.ops.kernel import Kernel, Spec
from rewriter.ops.op import Op
from rewriter.ops.registry import registry
from rewriter.site.implementation import Implementation
from rewriter.support.threads import STEP_S, check_stop, first_line

START_S = 120.0
"""Seconds within which a child must be ready."""

BEHIND: Any = {"process_group": 0} if os.name == "posix" else {}
"""Options that keep Ctrl-C from a child: otherwise it would seem to crash."""

RUN_S = 60.0
"""Seconds within which a candidate must compile and run once."""


@dataclass(frozen=True)
class Place:
    """The import path by which another process finds an op and its kernels.

    Attributes:
        modules: Modules to import, which may register kernels.
        module: The module that holds the pattern; ``""`` for the registry's op.
        attribute: The pattern's name there.
    """

    modules: tuple[str, ...]
    module: str = ""
    attribute: str = ""

    def find(self, op: str) -> tuple[Op, tuple[Kernel, ...]]:
        """Returns the op and its kernels."""
        for name in self.modules:
            importlib.import_module(name)
        if not self.module:
            return registry().op(op), registry().kernels(op)
        found: Pattern = getattr(importlib.import_module(self.module), self.attribute)
        return found.op, tuple(found.kernels)


@dataclass(frozen=True)
class Order:
    """An order to a child, with all that it needs to make the same programs."""

    place: Place
    spec: Spec
    passes: str
    samples: tuple[tuple[str, Any], ...]
    wanted: tuple[Implementation, ...]
    x64: bool
    precision: str | None
    platforms: str | None


def place_of(task: Task) -> Place | None:
    """Returns where another process finds a task's op and kernels; None if nowhere."""
    homes = {getattr(k.forward, "__module__", "") for k in task.kernels}
    if "__main__" in homes:
        return None
    modules = tuple(sorted(homes - {"", "functools"}))
    if task.op.name in registry().ops() and registry().op(task.op.name) is task.op:
        places = [Place(modules)]
    else:
        places = [
            Place(modules, name, attribute)
            for name, module in list(sys.modules.items())
            if name != "__main__"
            for attribute, value in list(getattr(module, "__dict__", {}).items())
            # By its type: a module's own objects may warn when they are asked.
            if issubclass(type(value), Pattern) and value.op is task.op
        ]
    for place in places:
        if set(task.kernels) <= set(place.find(task.op.name)[1]):
            return place
    return None


# ---------------------------------------------------------------------- parent
def first_runs(
    task: Task, wanted: Sequence[Implementation]
) -> tuple[dict[Implementation, str], str]:
    """Runs candidates once in a child process.

    Args:
        task: The task.
        wanted: The candidates.

    Returns:
        By candidate, why it cannot run; and why the rest could not be tried, or ``""``.
    """
    place = place_of(task)
    if place is None:
        return {}, (
            "not run: isolate=True, and no other process can import it. Define the "
            "pattern and its kernels at the top level of a module"
        )
    problems: dict[Implementation, str] = {}
    left = list(wanted)
    while left:
        try:
            order = pickle.dumps(order_of(task, place, left))
        except Exception as problem:  # pickle's errors are of several kinds
            return problems, f"not run: isolate=True, and {first_line(problem)}"
        done, why, ready = _child(order)
        if not ready:
            return problems, f"not run: its child process {why}"
        if done < len(left):
            problems[left[done]] = why
        left = left[done + 1 :]
    return problems, ""


def order_of(task: Task, place: Place, wanted: Sequence[Implementation]) -> Order:
    """Returns an order with which a child makes the same programs as this process."""
    config = jax.config
    return Order(
        place, task.spec, task.passes, task.samples, tuple(wanted),
        bool(config.jax_enable_x64),  # pyright: ignore
        config.jax_default_matmul_precision,  # pyright: ignore
        config.jax_platforms,  # pyright: ignore
    )  # fmt: skip


def _child(order: bytes) -> tuple[int, str, bool]:
    """How many candidates ran, why the next failed, and whether the child began."""
    path = os.pathsep.join(p for p in sys.path if p)
    env = {**os.environ, "PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    process = subprocess.Popen(
        [sys.executable, "-c", "from rewriter.measure.isolate import child; child()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, **BEHIND,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    done, ready, why = 0, False, ""
    try:
        process.stdin.write(order)
        process.stdin.close()
        limit = lambda: RUN_S if ready else START_S
        for line in _lines(process.stdout, limit):
            said = json.loads(line)
            ready = True
            if "problem" in said:
                why = said["problem"]
                break
            done = said["done"]
        else:
            why = f"crashes: {_ending(process.wait(START_S))}"
    except (TimeoutError, subprocess.TimeoutExpired):
        why = f"hangs: it was ended after {limit():.0f} s"
    except BrokenPipeError:
        why = f"crashes: {_ending(process.wait(START_S))}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    return done, why, ready


def _lines(stream: BinaryIO, limit: Callable[[], float]) -> Iterator[str]:
    """Lines of a stream, each within its time limit.

    Raises:
        TimeoutError: If a line is late.
        Stopped: If the caller was interrupted.
    """
    text = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        until = time.monotonic() + limit()
        while True:
            left = max(0.0, until - time.monotonic())
            if not selector.select(min(STEP_S, left)):
                check_stop()
                if left <= STEP_S:
                    raise TimeoutError
                continue
            more = os.read(stream.fileno(), 65536)
            if not more:
                return
            *lines, text = (text + more).split(b"\n")
            for line in lines:
                yield line.decode()
            if lines:
                until = time.monotonic() + limit()


def _ending(code: int) -> str:
    if code >= 0:
        return f"the process ended with status {code}"
    return f"the process was ended by {signal.Signals(-code).name}"


# ----------------------------------------------------------------------- child
def child() -> None:
    """Reads an order, runs its candidates, and writes a line for each.

    It ends after a failure: the state of the device may make the next one fail.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of candidates is no answer

    def say(**words: Any) -> None:
        print(json.dumps(words), file=answers, flush=True)

    order: Order = pickle.load(sys.stdin.buffer)
    if order.platforms:
        jax.config.update("jax_platforms", order.platforms)
    jax.config.update("jax_enable_x64", order.x64)
    jax.config.update("jax_default_matmul_precision", order.precision)
    op, kernels = order.place.find(order.spec.op)
    task = Task(op, order.spec, kernels, order.passes, order.samples)
    drawn = inputs(task, device.attached(), once=True)
    say(done=0)
    for number, implementation in enumerate(order.wanted, 1):
        try:
            run = jax.jit(function(task, implementation))
            for d in drawn:
                jax.block_until_ready(run(*d.sets[0]))
        except Exception as problem:
            say(problem=f"does not run: {first_line(problem)}")
            return
        say(done=number)
