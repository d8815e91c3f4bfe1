"""Runs tests that public packages ship with `rewriter.optimize` as their `jax.jit`.

    python3 -m tests.support.public_suites [optax haiku ...] [--part 1/4] [-k WORDS]

Each file that mentions ``jax.jit`` or ``nnx.jit`` runs twice: as it is, and with the
plugin `tests.support.optimized_jit`. Prints the tests that pass as they are and fail
with it, and exits with 1 if there are some. A folder may be given in place of a
package. flax has its tests in its source distribution alone:

    pip download flax --no-deps --no-binary flax && tar xzf flax-*.tar.gz
    python3 -m tests.support.public_suites flax-*/tests

equinox ships no tests: what its own `jit` asks of ours is in `tests/frameworks`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET

ROOT = pathlib.Path(__file__).parent.parent.parent
PACKAGES = ("optax", "haiku", "jmp")
PLUGIN = "tests.support.optimized_jit"


def modules(package: str) -> list[str]:
    """The test modules of a package, or the files of a folder, that call ``jit``."""
    folder = pathlib.Path(package).resolve()
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
        env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
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


def compared(module: str, words: str) -> tuple[int, int, dict[str, str]]:
    """(tests that pass under ``jax.jit``, functions optimized, what fails beside)."""
    plain, _ = outcomes(module, words, False)
    ours, count = outcomes(module, words, True)
    passed = [name for name, outcome in plain.items() if not outcome]
    missing = "it did not run"
    wrong = {n: why for n in passed if (why := ours.get(n, missing))}
    return len(passed), count, wrong


def main() -> None:
    """Runs the packages' modules, or a part of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    parser.add_argument("--part", default="0/1", help="such as 1/4")
    parser.add_argument("-k", default="", help="as for pytest", dest="words")
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    every = [m for package in given.packages for m in modules(package)]
    tests = functions = failed = 0
    for module in every[part::parts]:
        passed, count, wrong = compared(module, given.words)
        print(f"{module}: {passed} tests, {count} optimized, {len(wrong)} differ")
        for name, why in wrong.items():
            print(f"  {name}: {why}", flush=True)
        tests, functions, failed = (
            tests + passed,
            functions + count,
            failed + len(wrong),
        )
    print(f"{tests} tests, {functions} functions optimized, {failed} differ")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
