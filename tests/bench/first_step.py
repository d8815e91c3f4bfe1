"""How long a host takes until a public model's training step is lowered for an H200.

  python3 -m tests.bench.first_step [--only NAMES] [--json PATH]

No GPU is needed. Processor seconds of tracing, rewriting and lowering, with the first
imports of kernels, each in a process of its own: under `jax.jit`, and under
`rewriter.optimize` for that GPU. XLA's compiler comes after that, and is not counted.
Kernels are those of Pallas in the lowered program: each takes JAX 0.1 to 0.7 s, but
where an earlier process stored it. Another process may use the machine: the seconds are
the least of several runs.

Needs flax, optax and transformers before 5.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from tests.bench import record

COMMAND = "python3 -m tests.bench.first_step"
WAYS = ("written", "rewritten", "stored")
"""As written; rewritten, by the first process on a machine and by a later one."""

TARGET = "NVIDIA H200"


def step_of(name: str) -> tuple[Callable[..., Any], list[Any]]:
    """Returns a training step of flat arguments, and their shapes."""
    import jax

    from tests.bench.model_programs import programs_of
    from tests.bench.other_models import OTHER_MODELS
    from tests.bench.public_models import MODELS

    (model,) = (m for m in (*MODELS, *OTHER_MODELS) if m.family == name)
    made = programs_of(model)
    args = made.weights, made.state, made.given
    leaves, tree = jax.tree.flatten(args)
    flat = lambda *x: jax.tree.leaves(made.step(*jax.tree.unflatten(tree, x)))
    return flat, leaves


def lowered(name: str, way: str) -> dict[str, Any]:
    """Lowers one program in this process, for which nothing was traced before."""
    import jax

    import rewriter

    step, leaves = step_of(name)
    start = time.process_time()
    written = way == "written"
    jitted = jax.jit(step) if written else rewriter.optimize(step, target=TARGET)
    program = jitted.trace(*leaves).lower(lowering_platforms=("cuda",))
    seconds = time.process_time() - start
    return {"s": seconds, "kernels": program.as_text().count("@mosaic_gpu")}


def measured(name: str, runs: int) -> dict[str, Any]:
    """Returns a row: seconds of each way, and kernels of the rewritten program."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as kept:
            for way in WAYS:
                found[way].append(in_a_process(name, way, kept))
    least = {way: min(x["s"] for x in found[way]) for way in WAYS}
    row = {f"{way}_s": round(s, 2) for way, s in least.items()}
    times = round(least["rewritten"] / least["written"], 1)
    stored = round(least["stored"] / least["written"], 2)
    kernels = found["rewritten"][0]["kernels"]
    more = {"times": times, "times_stored": stored, "kernels": kernels}
    return {"model": name, **row, **more}


def in_a_process(name: str, way: str, kept: str) -> dict[str, Any]:
    """Lowers one program in a new process, which keeps kernels in a folder."""
    command = [sys.executable, "-m", "tests.bench.first_step", "--one", name, way]
    env = {**os.environ, "REWRITER_CACHE_DIR": kept}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return json.loads(ran.stdout.splitlines()[-1])


def main() -> None:
    """Prints a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="GPT2,Bert,ViT,OPT")
    parser.add_argument("--one", nargs=2)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(lowered(*given.one)))
        return
    rows = []
    for name in given.only.split(","):
        rows.append(measured(name, given.runs))
        print(json.dumps(rows[-1]), flush=True)
    if given.json:
        machine = f"{platform.machine()}, beside other work"
        record.write(given.json, COMMAND, target=TARGET, machine=machine, rows=rows)


if __name__ == "__main__":
    main()
