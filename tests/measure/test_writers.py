"""Several writers of one key: nothing is lost, and nobody waits for the dead."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from rewriter.measure import cache
from rewriter.support import atomic, lock
from tests.measure.test_tuned import key, took

pytestmark = pytest.mark.once

fcntl = pytest.importorskip("fcntl", reason="locks of Unix")

WRITERS = """
import fcntl, sys, threading
from rewriter.measure import cache
from tests.measure.test_tuned import key, took

def unsupported(*args):
    raise OSError(37, "No locks available")

def write(t, me):
    for i in range(8):
        cache.add(key(t), [took("fast", 1.0 + i, rows=100 * me + i)])

print("ready", flush=True)
sys.stdin.readline()
for t in 64, 128:
    threads = [threading.Thread(target=write, args=(t, int(me))) for me in sys.argv[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fcntl.flock = unsupported
"""

HOLDER = """
import runpy, sys
with runpy.run_path(sys.argv[1])["only_writer"](sys.argv[2]) as alone:
    print(alone, flush=True)
    sys.stdin.readline()
"""


def python(code: str, *args: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(sys.path)
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, "-c", code, *args], env=env, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def holder_of(folder: pathlib.Path) -> subprocess.Popen[str]:
    """A process that is the folder's only writer."""
    made = python(HOLDER, lock.__file__, str(folder))
    assert made.stdout is not None
    assert made.stdout.readline() == "True\n"
    return made


def written(t: int = 64) -> set[int]:
    found = dict(cache.entries("cpu", "attention"))[key(t)]
    return {dict(m.implementation.config or ())["rows"] for m in found}


def test_two_threads_each_of_two_processes() -> None:
    """First with locks, then on a file system that has none."""
    writers = [python(WRITERS, *names) for names in (("0", "1"), ("2", "3"))]
    for w in writers:
        assert w.stdout is not None
        w.stdout.readline()
    for w in writers:
        assert w.stdin is not None
        w.stdin.write("go\n")
        w.stdin.flush()
    for w in writers:
        w.communicate()
    assert [w.returncode for w in writers] == [0, 0]
    every = {100 * k + i for k in range(4) for i in range(8)}
    assert (written(64), written(128)) == (every, every)


def test_four_threads() -> None:
    def write(me: int) -> None:
        for i in range(8):
            cache.add(key(), [took("fast", 1.0 + i, rows=100 * me + i)])

    threads = [threading.Thread(target=write, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert written() == {100 * k + i for k in range(4) for i in range(8)}


def test_threads_that_cannot_write_remember_everything(monkeypatch) -> None:
    def full(*args) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic, "write", full)
    monkeypatch.setattr(cache, "_warn", lambda *args: None)
    test_four_threads()


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    cache.add(key(), [took("fast", 5.0, rows=1)])
    (path,) = (tmp_path / "cache").rglob("*.json")
    return path.parent


def test_nobody_waits_for_a_writer_that_was_killed(folder, monkeypatch) -> None:
    monkeypatch.setattr(lock, "WAIT_S", 1e6)
    holder = holder_of(folder)
    holder.send_signal(signal.SIGKILL)
    cache.add(key(), [took("fast", 6.0, rows=2)])  # which waits no longer than that
    holder.communicate()
    assert written() == {1, 2}
    assert len(list(folder.iterdir())) == 1  # the lock is no file


def test_a_writer_that_hangs_is_left_behind(folder, monkeypatch) -> None:
    monkeypatch.setattr(lock, "WAIT_S", 0.05)
    holder = holder_of(folder)
    holder.send_signal(signal.SIGSTOP)
    with lock.only_writer(str(folder)) as alone:
        assert not alone
    cache.add(key(), [took("fast", 6.0, rows=2)])
    holder.kill()
    holder.communicate()
    assert written() == {1, 2}
    with lock.only_writer(str(folder)) as alone:
        assert alone
    with lock.only_writer(str(folder / "none")) as alone:
        assert not alone


def test_what_killed_writers_left_is_removed_when_it_is_old(folder) -> None:
    names = (".rewriter-1-0123abcd", ".rewriter-2-4567cdef", ".rewriter-notes", "x.tmp")
    for name in names:
        (folder / name).write_text("{")
    hour = time.time() - 2 * atomic.OLD_S
    for name in names[1:]:
        os.utime(folder / name, (hour, hour))
    cache.add(key(), [took("fast", 6.0, rows=2)])
    left = {p.name for p in folder.iterdir() if p.suffix != ".json"}
    assert left == {names[0], *names[2:]}
    assert written() == {1, 2}


def test_what_killed_writers_left_is_removed_at_once(folder) -> None:
    """If they ran on this machine; those of others may still run."""
    ended = python("print()")
    ended.communicate()
    here = atomic._machine()
    other = "0" * 8 if here != "0" * 8 else "1" * 8
    numbers = {here: (ended.pid, os.getpid(), 10**30), other: (ended.pid,)}
    names = [f".rewriter-{m}-{n}-0123abcd" for m, of in numbers.items() for n in of]
    for name in names:
        (folder / name).write_text("{")
    cache.add(key(), [took("fast", 6.0, rows=2)])
    left = {p.name for p in folder.iterdir() if p.suffix != ".json"}
    assert left == {*names[1:]}
