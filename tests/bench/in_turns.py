"""Several processes prepare their programs side by side, then measure one by one.

Tracing and lowering hold Python's lock, so that one process prepares one model at a
time. A process has the device for itself while it measures, and ends then, which gives
the device's memory back. None measures before all are prepared.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

FOLDER, PART = "REWRITER_BENCH_TURNS", "REWRITER_BENCH_PART"
"""Environment variables: where processes meet, and ``"2/4"`` for the third of four."""


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options of every such script."""
    made = argparse.ArgumentParser(description=doc)
    made.add_argument("--only", default="", help="parts of names, by commas")
    made.add_argument("--passes", default="inference,step", help="by commas")
    made.add_argument("--small", action="store_true", help="to try it on a CPU")
    made.add_argument("--repeats", type=int, default=10)
    made.add_argument("--processes", type=int, default=1, help="that prepare")
    made.add_argument("--json", type=pathlib.Path)
    return made


def rows_of(
    module: str,
    names: Sequence[str],
    given: argparse.Namespace,
    measure: Callable[[argparse.Namespace, Sequence[str]], None],
) -> list[Any] | None:
    """Returns the rows of all processes; in one of those, measures and returns None.

    Args:
        module: The script, such as ``"tests.bench.models"``.
        names: All that it can measure; ``--only`` takes some of them.
        given: The script's arguments.
        measure: Measures some names within `turn`, and calls `write`.
    """
    asked = given.only.split(",")
    names = [name for name in names if any(part in name for part in asked)]
    if PART not in os.environ:
        return run(module, names, given)
    number, count = map(int, os.environ[PART].split("/"))
    measure(given, names[number::count])
    return None


def run(module: str, names: Sequence[str], given: argparse.Namespace) -> list[Any]:
    """Runs a script in several processes, and returns their rows in the names' order.

    Args:
        module: The script: the same arguments go to each process.
        names: What there is to measure; rows have one as their ``"model"``.
        given: The script's arguments.
    """
    count = min(given.processes, len(names))
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for k in range(count):
            env = {**os.environ, FOLDER: folder, PART: f"{k}/{count}"}
            command = [sys.executable, "-m", module, *sys.argv[1:]]
            command += ["--json", f"{folder}/rows-{k}.json"]  # the last one counts
            started.append(subprocess.Popen(command, env=env))
        while any(process.poll() is None for process in started):
            for k, process in enumerate(started):
                if process.poll() is not None:  # nobody waits for one that failed
                    pathlib.Path(folder, f"ready-{k}").touch()
            time.sleep(0.2)
        rows: list[Any] = []
        for k in range(count):
            path = pathlib.Path(folder, f"rows-{k}.json")
            rows += json.loads(path.read_text()) if path.exists() else []
    return sorted(rows, key=lambda row: names.index(row["model"]))


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """Waits until all processes are prepared, then for the device."""
    folder = pathlib.Path(os.environ[FOLDER])
    number, count = os.environ[PART].split("/")
    (folder / f"ready-{number}").touch()
    while len(list(folder.glob("ready-*"))) < int(count):
        time.sleep(0.2)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write(path: pathlib.Path, rows: Sequence[Any]) -> None:
    """Writes the rows so far, all of them or none."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(list(rows)))
    partial.replace(path)
