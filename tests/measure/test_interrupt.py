"""Ctrl-C while tuning: what was measured is kept, and nothing holds the process up."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from rewriter.measure import cache, race
from rewriter.measure.programs import Task
from rewriter.ops import device
from rewriter.ops.kernel import spec_of
from rewriter.site.implementation import Implementation
from rewriter.support import threads
from tests.support import stalling

pytestmark = pytest.mark.once

CODE = "from tests.support import stalling; stalling.main()"


@pytest.fixture
def process(tmp_path, request) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that tunes and stalls; and the one that its kernel stalls in."""
    mark = tmp_path / "stalled"
    env = {
        **os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path),
        "STALLED": str(mark), "WHERE": request.param,
    }  # fmt: skip
    made = subprocess.Popen(
        [sys.executable, "-c", CODE], env=env, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    while not mark.exists():
        assert made.poll() is None
        time.sleep(0.05)
    yield made, int(mark.read_text())
    made.kill()
    made.communicate()


def there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    "process",
    [
        "compiling",
        pytest.param("running", marks=pytest.mark.slow),
        pytest.param("tracing", marks=pytest.mark.slow),
        pytest.param("isolated", marks=pytest.mark.slow),
    ],
    indirect=True,
)
def test_an_interrupt(process, tmp_path: pathlib.Path) -> None:
    """A kernel stalls for an hour: whoever waits for it fails this test."""
    made, stalled = process
    made.send_signal(signal.SIGINT)
    out, err = made.communicate(f"{time.time()}\n", timeout=300)
    assert out.startswith("interrupted after")
    assert "KeyboardInterrupt" in err
    assert made.returncode < 0
    while there(stalled):  # the child process, too, is ended
        time.sleep(0.05)
    found = cache.entries(device.attached().kind, "gated")
    assert {dict(k.shapes)["x"][0] for k, _ in found} == {stalling.FIRST}
    assert all(m.median_us is not None for _, ms in found for m in ms)


def stopped_while(job) -> bool:
    """Whether a job is ended by an interrupt of the thread that waits for it."""
    begun, ended = threading.Event(), threading.Event()

    def run() -> None:
        begun.set()
        try:
            job()
        except threads.Stopped:
            ended.set()
            raise

    def interrupts(*args) -> bool:
        begun.wait()
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "GRACE_S", 60.0)
        first = [interrupts]
        wait = threading.Event.wait

        def waited(event, timeout=None):
            return first.pop()() if first and timeout else wait(event, timeout)

        patch.setattr(threading.Event, "wait", waited)
        with pytest.raises(KeyboardInterrupt):
            threads.run_untraced(run, lambda: None)
    return ended.is_set()


def test_what_waits_is_stopped() -> None:
    forever = threading.Event()
    hangs = lambda: forever.wait()
    later = time.monotonic() + 3600
    assert stopped_while(lambda: threads.side_by_side([hangs], later, later))
    assert stopped_while(lambda: threads.start_in_background(hangs)())
    inner = lambda: threads.side_by_side([hangs], later, later)
    assert stopped_while(lambda: threads.side_by_side([inner], later, later))
    forever.set()


def test_nothing_begins_behind_an_interrupt() -> None:
    begun: list[int] = []
    stop = threading.Event()

    def job() -> None:
        begun.append(1)
        stop.set()

    later = time.monotonic() + 3600
    with threads.settings(stop)(), pytest.raises(threads.Stopped):
        threads.side_by_side([job] * 5, later, later, at_once=1)
    assert len(begun) == 1
    assert not threads.stopping()


@pytest.mark.parametrize(("stages", "kept"), [(0, False), (1, False), (2, True)])
def test_a_race_is_kept_from_three_turns_on(monkeypatch, stages: int, kept) -> None:
    """One turn has no spread: its time would be believed and never taken again."""
    stop, left = threading.Event(), [stages]
    real = race.time_in_turns

    def timed(*args, **options):
        found = real(*args, **options)
        left[0] -= 1
        if left[0] <= 0:
            stop.set()
        return found

    monkeypatch.setattr(race, "time_in_turns", timed)
    if not stages:
        stop.set()
    pattern = stalling.gated
    x, w = stalling.operands(8)
    spec = spec_of(pattern.op, {"x": x, "w": w}, {})
    task = Task(pattern.op, spec, (), "forward")
    later = time.monotonic() + 3600
    run = race.Race(task, device.attached(), later, later, lambda done, of: None).run
    ends = contextlib.nullcontext() if kept else pytest.raises(threads.Stopped)
    with threads.settings(stop)(), ends:
        (found,) = run([Implementation()])
        assert found.runs == 3
