"""Cycles or bundles of a program, by the TPU compiler, without a TPU.

Each estimate is made by a child process, since the compiler reads what it is to say
when it is loaded, and its simulator may end the process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

from rewriter.hardware import ahead_of_time
from rewriter.measure.static_cost import FLAGS
from tests.bench import record
from tests.support.kernels import tpu

Wanted = tuple[tuple[str, str, str], ...]
"""Modes ("cycles" or "bundles"), generations, and names of programs."""


def run(name: str, wanted: Wanted, seconds: float, of: tuple[str, ...] = ("",)) -> None:
    """Fills a record from the command line, as the main function of its module.

    Args:
        name: The record's, and its module's in ``tests.bench``.
        wanted: As for `fill`.
        seconds: How long each may take, unless ``--seconds`` says it.
        of: As for `fill`.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=pathlib.Path, default=record.named(name))
    parser.add_argument("--seconds", type=float, default=seconds)
    asked = parser.parse_args()
    fill(asked.json, f"tests.bench.{name}", wanted, asked.seconds, of)


def fill(
    path: pathlib.Path,
    module: str,
    wanted: Wanted,
    seconds: float,
    of: tuple[str, ...] = ("",),
) -> None:
    """Makes a record's estimates; of one that exists, what is missing.

    Args:
        path: The record.
        module: Whose ``program(name, generation)`` returns a function and its
            arguments.
        wanted: What is estimated.
        seconds: How long each may take.
        of: With what the names of operations begin that are kept.
    """
    found: dict[str, Any] = {}
    if path.is_file():
        found = json.loads(path.read_text())["estimates"]
    for mode, generation, name in wanted:
        key = f"{generation}, {name}, {mode}"
        if isinstance(found.get(key), dict):
            continue
        made = estimate(module, mode, generation, name, seconds)
        if isinstance(made, dict):
            made = {n: count for n, count in made.items() if n.startswith(of)}
        found[key] = made
        print(key, found[key], flush=True)
        record.write(path, f"python3 -m {module}", estimates=found)


def estimate(
    module: str, mode: str, generation: str, name: str, seconds: float
) -> dict[str, int] | str:
    """Returns cycles or bundles by operation, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ, **ahead_of_time.ENVIRONMENT, "JAX_PLATFORMS": "cpu",
            "LIBTPU_INIT_ARGS": FLAGS[mode].format(folder),
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.bench.estimates"]
        command += [module, mode, generation, name, folder]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, timeout=seconds,
                check=False, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"not within {seconds:.0f} s"
    if done.returncode:
        fatal = re.search(r"^F\d{4} .*?\d\] (.*)$", done.stderr, re.MULTILINE)
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return f"exit {done.returncode}: {(fatal[1] if fatal else last)[:200]}"
    return json.loads(done.stdout.splitlines()[-1])


def child(
    module: str, mode: str, generation: str, name: str, folder: str
) -> dict[str, int]:
    """Returns the same, in a process whose libtpu was told to."""
    function, arrays = importlib.import_module(module).program(name, generation)
    made = ahead_of_time.compiled(tpu.KINDS[generation], function, *arrays)
    if mode == "cycles":
        form = r'^\s*(?:ROOT )?%?([\w.\-]+) = .*"estimated_cycles":"(\d+)"'
        found = re.findall(form, made.as_text(), re.MULTILINE)
        return {operation: int(cycles) for operation, cycles in found}
    bundles = {}
    for path in pathlib.Path(folder).glob("*final_hlo-static-per-bundle-util*.txt"):
        table = path.read_text().split("UTILIZATION:")[1]
        operation = re.sub(r"^\d+-(.*)-\d+-final.*", r"\1", path.name)
        if not operation.startswith("<") and operation != "TLP":
            bundles[operation] = sum(1 for x in table.splitlines() if x.strip())
    return bundles


if __name__ == "__main__":
    print(json.dumps(child(*sys.argv[1:])))
