"""Runs tests that public packages ship with `rewriter.optimize` as their `jax.jit`.

    python3 -m tests.support.public_suites [optax haiku ...] [--part 1/4] [-k WORDS]

Each file that mentions ``jax.jit`` or ``nnx.jit`` runs twice: as it is, and with the
plugin `tests.support.optimized_jit`. Prints the tests that pass as they are and fail
with it, and exits with 1 if there are some. Those in `BY_IDENTITY` do not count.
``--json PATH`` keeps the figures of each file, also of parts that ran before. A folder,
a file or a module may be given in place of a package. flax has its tests in its source
distribution alone:

    pip download flax --no-deps --no-binary flax && tar xzf flax-*.tar.gz
    python3 -m tests.support.public_suites flax-*/tests

equinox ships no tests: what its own `jit` asks of ours is in `tests/frameworks`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from tests.bench import record

ROOT = pathlib.Path(__file__).parent.parent.parent
PACKAGES = ("optax", "haiku", "jmp")
PLUGIN = "tests.support.optimized_jit"
VERSIONS = ("jax", "optax", "dm-haiku", "flax")

BY_IDENTITY: Mapping[str, str] = {}
"""Tests that differ since they ask which object made a function, each with why."""


def modules(package: str) -> list[str]:
    """The test modules of a package, or the files of a folder, that call ``jit``.

    A file is itself, and so is a module of a package such as ``optax._src.base_test``.
    """
    folder = pathlib.Path(package).resolve()
    if folder.is_file():
        return [str(folder)]
    if "." in package and not folder.is_dir():
        return [package]
    if not folder.is_dir():
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            return []
        folder = pathlib.Path(spec.origin).parent
    files = sorted((*folder.rglob("*_test.py"), *folder.rglob("test_*.py")))
    files = [f for f in files if re.search(r"\b(jax|nnx)\.jit\b", f.read_text())]
    if folder == pathlib.Path(package).resolve():
        return list(map(str, files))
    return [".".join(f.relative_to(folder.parent).with_suffix("").parts) for f in files]


def outcomes(module: str, words: str, optimized: bool) -> tuple[dict[str, str], int]:
    """The outcome of each test of a module, and how many functions were optimized."""
    with tempfile.TemporaryDirectory() as folder:
        found = pathlib.Path(folder) / "found.xml"
        (pathlib.Path(folder) / "pytest.ini").write_text("[pytest]\n")
        command = [
            sys.executable, "-m", "pytest", "-q", "--pyargs", module, "--tb=line",
            "-c", f"{folder}/pytest.ini", f"--rootdir={folder}", f"--junitxml={found}",
            "-p", "no:cacheprovider", *(["-k", words] if words else []),
            *(["-p", PLUGIN] if optimized else []),
        ]  # fmt: skip
        beside = os.environ.get("PYTHONPATH", "")
        paths = os.pathsep.join([str(ROOT), *([beside] if beside else [])])
        env = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
        run = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, check=False
        )
        if not found.exists():
            return {module: run.stdout[-2000:] + run.stderr[-2000:]}, 0
        count = re.search(r"(\d+) functions optimized", run.stdout)
        cases = ET.parse(found).getroot().iter("testcase")
        return {
            f"{c.get('classname')}::{c.get('name')}": _outcome(c) for c in cases
        }, int(count[1]) if count else 0


def _outcome(case: ET.Element) -> str:
    """``""`` for a test that passed; what it said otherwise."""
    for kind in ("failure", "error", "skipped"):
        found = case.find(kind)
        if found is not None:
            return f"{kind}: {(found.get('message') or '').splitlines()[:1]}"
    return ""


def compared(module: str, words: str) -> dict[str, Any]:
    """The figures of one module.

    They are the tests that pass under ``jax.jit``, the functions that were optimized,
    the seconds of both ways, and by test what it said if it failed with us alone.
    """
    began = time.monotonic()
    plain, _ = outcomes(module, words, False)
    between = time.monotonic()
    ours, count = outcomes(module, words, True)
    passed = [name for name, outcome in plain.items() if not outcome]
    missing = "it did not run"
    return {
        "tests": len(passed),
        "optimized": count,
        "jit_s": round(between - began),
        "optimize_s": round(time.monotonic() - between),
        "differ": {n: why for n in passed if (why := ours.get(n, missing))},
    }


def all_compared(
    modules: Sequence[str], words: str, jobs: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each module with its figures, as they come; some modules run at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(compared, module, words): module for module in modules}
        for done in as_completed(running):
            yield running[done], done.result()


def differing(figures: Mapping[str, Any]) -> dict[str, str]:
    """The tests of a module that differ, but for those that ask who the caller is."""
    return {n: why for n, why in figures["differ"].items() if n not in BY_IDENTITY}


def label(module: str) -> str:
    """A module's name, or its file from the folder of its distribution."""
    path = pathlib.Path(module)
    if not path.is_absolute():
        return module
    at = path.parts.index("tests") if "tests" in path.parts else len(path.parts) - 1
    return "/".join(path.parts[max(1, at - 1) :])


def keep(path: pathlib.Path, new: Mapping[str, Any]) -> None:
    """Adds modules' figures to a record, which keeps those of other modules."""
    versions = {p: importlib.metadata.version(p) for p in VERSIONS}
    known = json.loads(path.read_text()) if path.exists() else {}
    of_these = known.get("packages") == versions
    modules = {**(known["modules"] if of_these else {}), **new}
    command = "python3 -m tests.support.public_suites"
    record.write(
        path, command, packages=versions, modules=dict(sorted(modules.items()))
    )


def main() -> None:
    """Runs the packages' modules, or a part of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    parser.add_argument("--part", default="0/1", help="such as 1/4")
    parser.add_argument("-k", default="", help="as for pytest", dest="words")
    parser.add_argument("--json", type=pathlib.Path, help="a record of the figures")
    parser.add_argument("--jobs", type=int, default=1, help="modules at a time")
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    every = [m for package in given.packages for m in modules(package)][part::parts]
    tests = functions = failed = 0
    for module, figures in all_compared(every, given.words, given.jobs):
        wrong = differing(figures)
        tests, functions = tests + figures["tests"], functions + figures["optimized"]
        failed += len(wrong)
        counts = f"{figures['tests']} tests, {figures['optimized']} optimized"
        print(f"{label(module)}: {counts}, {len(wrong)} differ", flush=True)
        for name, why in figures["differ"].items():
            print(f"  {name}: {BY_IDENTITY.get(name, why)}", flush=True)
        if given.json:
            keep(given.json, {label(module): figures})
    print(f"{tests} tests, {functions} functions optimized, {failed} differ")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
