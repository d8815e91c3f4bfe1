"""Norms of rows by our kernel for Hopper GPUs and by XLA, over columns and sizes.

  python3 -m tests.bench.norms_grid [--processes N] [--seconds N] [--json PATH]
      [--norms NAMES] [--passes forward,both]

The choice between both rests on these times: see `rewriter.kernels.norms.estimate`.
Rows are of the kinds and dtypes that programs have, and are measured in an order drawn
by a seed, so that a run that was cut off has some of each. Microseconds are the
device's by CUPTI, medians of runs that take turns on sets of normal inputs. Processes
compile side by side, and have the device for themselves while they measure.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import starmap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rewriter.hardware import timing
from rewriter.ops.registry import registry
from tests.bench import record
from tests.bench.choices import Row, drawn, norming, of_pass

FOLDER, PART = "REWRITER_NORMS_GRID", "REWRITER_NORMS_GRID_PART"
"""Environment variables: where processes meet, and ``"2/4"`` for the third of four."""

COLUMNS = (64, 96, 128, 192, 256, 384, 512, 576, 640, 768, 1024, 1536, 2048, 2880, 4096)
MIB = {"bfloat16": (1.5, 4.0, 17.0, 48.0), "float32": (1.5, 6.0, 40.0)}
"""Sizes of x."""

ASKED = (
    ("layer", 105615, 96, "float32"), ("rms", 5735, 1536, "bfloat16"),
    ("rms", 1192, 640, "float32"), ("layer", 10751, 2880, "bfloat16"),
    ("layer", 1170, 2880, "float16"), ("rms", 58069, 576, "float32"),
    ("rms", 8192, 2880, "bfloat16"),
)  # fmt: skip
"""Norms that were drawn, or asked for, before: measured first."""

SETS, TURNS, SEED = 2, 9, 0
SOME = 1 << 16
"""Numbers at each end of a result that are compared."""


def grid() -> list[tuple[str, int, int, str]]:
    """Returns (kind, rows, columns, dtype) of every norm, those asked for first."""
    made = []
    for kind, columns, dtype in itertools.product(("layer", "rms"), COLUMNS, MIB):
        for number, mib in enumerate(MIB[dtype]):
            rows = int(mib * (1 << 20)) // (columns * jnp.dtype(dtype).itemsize)
            rows = rows | 1 if number % 2 else rows // 8 * 8
            made.append((kind, rows, columns, dtype))
    random.Random(SEED).shuffle(made)
    return [*ASKED, *made]


def norms_of(given: argparse.Namespace) -> list[tuple[str, int, int, str]]:
    """Returns the norms that are named, or else those of the grid."""
    found = []
    for name in filter(None, given.norms.split(";")):
        kind, sizes, dtype = name.split(" ")
        rows, columns = map(int, sizes.split("x"))
        found.append((kind, rows, columns, dtype))
    return found or grid()


def by_kernel(kind: str, passes: str) -> Callable[..., Any]:
    """Returns a function of a norm's arrays, by our kernel."""
    its = registry().kernel(f"{kind}_norm", "hopper")
    names = ("x", "scale", "bias")[: 3 if kind == "layer" else 2]
    eps = 1e-5 if kind == "layer" else 1e-6

    def forward(*args: Any) -> Any:
        return its.forward(**dict(zip(names, args, strict=True)), eps=eps)

    def both(*args: Any) -> Any:
        *given, up = args
        named = dict(zip(names, given, strict=True))
        made = its.backward(
            **named, eps=eps, out=None, residuals=(), cotangent=up, config=None
        )
        return forward(*given), tuple(made[name] for name in names)

    return forward if passes == "forward" else both


def compiled(row: Row, passes: str, kind: str) -> list[Any]:
    """Returns XLA's program and ours."""
    shapes = [jax.ShapeDtypeStruct(*x) for x in row.shapes]
    both = (row.fn, by_kernel(kind, passes))
    return [jax.jit(fn).lower(*shapes).compile() for fn in both]


def measured(row: Row, programs: list[Any], turns: int) -> dict[str, float]:
    """Returns microseconds by name, and how far results are apart."""
    sets = [drawn(row, seed) for seed in range(SETS)]
    results = [jax.tree.leaves(program(*sets[0])) for program in programs]
    apart = max(starmap(_apart, zip(*results, strict=True)))
    times = timing.measure(programs, sets, turns)
    names = ("xla", "hopper")
    made = {n: round(1e6 * t.median, 2) for n, t in zip(names, times, strict=True)}
    return made | {"apart": apart}


def _apart(exact: Any, mine: Any) -> float:
    """The norm of a difference at both ends, relative to a result's."""
    flat = [x.reshape(-1) for x in (exact, mine)]
    ends = [jnp.concatenate([x[:SOME], x[-SOME:]]) for x in flat]
    wanted, got = (np.asarray(x, np.float64) for x in ends)
    return float(f"{np.linalg.norm(wanted - got) / np.linalg.norm(wanted):.1e}")


def one_process(given: argparse.Namespace, begun: float) -> None:
    """Compiles its part of the norms, and measures each as soon as it is compiled."""
    number, count = map(int, os.environ[PART].split("/"))
    path = pathlib.Path(os.environ[FOLDER], f"rows-{number}.json")
    done = []
    for kind, rows, columns, dtype in norms_of(given)[number::count]:
        row = norming(kind, rows, columns, jnp.dtype(dtype))
        made: dict[str, Any] = {"row": row.name, "us": {}}
        for passes in given.passes.split(","):
            if time.time() - begun > given.seconds:
                path.write_text(json.dumps(done))
                return
            try:
                each = of_pass(row, passes)
                programs = compiled(each, passes, kind)
                with (path.parent / "lock").open("w") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    made["us"][passes] = measured(each, programs, given.turns)
            except Exception as problem:
                made.setdefault("failed", {})[passes] = repr(problem)[:160]
        done.append(made)
        print(json.dumps(made), flush=True)
    path.write_text(json.dumps(done))


def main() -> None:
    """Prints a line per norm, and writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--norms", default="", help="as rms 8192x4096 float32;...")
    parser.add_argument("--passes", default="forward,both")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--begun", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    if PART in os.environ:
        one_process(given, given.begun)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.bench.norms_grid", *sys.argv[1:]]
        command += ["--begun", str(time.time())]
        started = []
        for k in range(given.processes):
            env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
            env = {**env, FOLDER: folder, PART: f"{k}/{given.processes}"}
            started.append(subprocess.Popen(command, env=env))
        for process in started:
            process.wait()
        found = []
        for path in sorted(pathlib.Path(folder).glob("rows-*.json")):
            found += json.loads(path.read_text())
    if given.json:
        record.write(given.json, "python3 -m tests.bench.norms_grid", rows=found)


if __name__ == "__main__":
    main()
