"""Counts what a reader of the package has to do with, before the folders and now.

    python -m tests.bench.structure [--tree FOLDER] [--write]

It counts ``rewriter``, ``patterns`` and ``kernels`` of a tree, this one by default.
``--write`` also counts the last tree without folders, which Git has, and keeps both in
``results/structure.json``. `tests.bench.tables` makes the table of docs/structure.md.

Files that run are those with a function that is called while a small attention is
rewritten for the first time in the process. Bodies of modules and classes, which run at
import, do not count. Seconds are those of the processor. Places repeat each other if
six lines or more are the same, but for blank lines, comments, imports and white space.
"""

from __future__ import annotations

import argparse
import ast
import collections
import inspect
import io
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from typing import Any

from tests.bench import record

BEFORE = "545372ca~1"
"""The last commit without folders."""

ROOT = pathlib.Path(__file__).parent.parent.parent
FOLDERS = ("rewriter", "patterns", "kernels")
LONG = 60
"""Lines of a function that is counted as long."""

REPEATED = 6
"""Lines from which on two places repeat each other."""

COMMON = 8
"""The most places of one text; more are a form that files share, such as a header."""


def sources(tree: pathlib.Path) -> dict[pathlib.Path, str]:
    """Returns the text of every module of a tree; links are not followed."""
    found = (p for folder in FOLDERS for p in (tree / folder).rglob("*.py"))
    linked = tuple(str(tree / "rewriter" / name) for name in ("kernels", "patterns"))
    kept = (p for p in found if not str(p).startswith(linked))
    return {p.relative_to(tree): p.read_text() for p in kept}


def counts(texts: Mapping[pathlib.Path, str]) -> dict[str, Any]:
    """Returns what can be counted in the text alone."""
    lines = {p: len(text.splitlines()) for p, text in texts.items()}
    nodes = [n for text in texts.values() for n in ast.walk(ast.parse(text))]
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef)]
    long = [n for n in functions if n.end_lineno - n.lineno >= LONG]  # type: ignore
    folders = collections.Counter(p.parent for p in texts if p.name != "__init__.py")
    fullest, most = folders.most_common(1)[0]
    longest = max(lines, key=lambda p: lines[p])
    return {
        "modules": most,
        "fullest": str(fullest),
        "folders": len(folders),
        "modules_of": {str(f): n for f, n in sorted(folders.items())},
        "longest": lines[longest],
        "longest_file": str(longest),
        "long": len(long),
        "functions": len(functions),
        "repeated": repeated(texts),
        "lines": sum(lines.values()),
    }


def repeated(texts: Mapping[pathlib.Path, str]) -> int:
    """Returns how many pairs of places repeat each other."""
    starts: dict[tuple[str, ...], list[tuple[pathlib.Path, int]]] = {}
    for path, text in texts.items():
        lines = [" ".join(line.split()) for line in text.splitlines()]
        told = [
            x for x in lines if x and not x.startswith(("#", "import ", "from ", '"""'))
        ]
        for k in range(len(told) - REPEATED + 1):
            starts.setdefault(tuple(told[k : k + REPEATED]), []).append((path, k))
    pairs: set[tuple[tuple[pathlib.Path, int], tuple[pathlib.Path, int]]] = set()
    for places in starts.values():
        if len(places) <= COMMON:
            pairs |= set(itertools.combinations(sorted(places), 2))
    return sum(((a, i - 1), (b, j - 1)) not in pairs for (a, i), (b, j) in pairs)


def _attention() -> tuple[Any, Any]:
    """Returns a small attention, and an array for each of its operands."""
    import jax
    import jax.numpy as jnp

    def attention(q, k, v):  # type: ignore[no-untyped-def]
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 8
        seen = jnp.tril(jnp.ones((64, 64), bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    return attention, jnp.ones((1, 64, 2, 64))


def _in_a_process(function: Any, tree: pathlib.Path, **env: str) -> Any:
    """Returns what a function of this file prints as JSON in a new process.

    Args:
        function: It is called without arguments.
        tree: Where its process finds the package.
        env: Further variables of its environment.
    """
    sources = "\n".join(map(inspect.getsource, (_attention, function)))
    code = f"from typing import Any\n{sources}\n{function.__name__}()"
    env = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu", **env}
    said = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(said.stdout.splitlines()[-1])


def running(tree: pathlib.Path) -> dict[str, Any]:
    """Returns how many files and functions of each folder run for a small attention.

    The files of ``rewriter`` are also named, as ``running``.
    """
    ran = {tuple(x) for x in _in_a_process(_trace, tree)}
    made: dict[str, Any] = {}
    for folder in FOLDERS:
        home = (tree / folder).resolve()
        mine = {(f, n) for f, n in ran if home in pathlib.Path(f).parents}
        made[f"{folder}_files"] = len({f for f, _ in mine})
        made[f"{folder}_functions"] = len(mine)
    engine = (tree / "rewriter").resolve()
    places = {pathlib.Path(f) for f, _ in ran if engine in pathlib.Path(f).parents}
    made["running"] = sorted(str(p.relative_to(engine).with_suffix("")) for p in places)
    return made


def _trace() -> None:
    """Prints the file and name of each function that runs, in a process of its own."""
    import inspect
    import json
    import os
    import sys

    import rewriter

    codes = set()

    def note(frame, event, _):  # type: ignore[no-untyped-def]
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            codes.add(frame.f_code)

    attention, x = _attention()
    fast = rewriter.optimize(attention)
    sys.setprofile(note)
    try:
        fast.jaxpr(x, x, x)
    finally:
        sys.setprofile(None)
    print(json.dumps([(os.path.realpath(c.co_filename), c.co_qualname) for c in codes]))


def cold(tree: pathlib.Path) -> dict[str, float]:
    """Returns seconds of processor time that a first rewriting takes, from bytecode.

    ``import_s`` is what the import takes after that of JAX, and ``first_s`` what
    rewriting one attention takes then. Each is the median of five processes.
    """
    with tempfile.TemporaryDirectory() as bytecode:
        env = {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
        # The first one compiles.
        seconds = [_in_a_process(_first, tree, **env) for _ in range(6)]
    medians = (statistics.median(x) for x in zip(*seconds[1:], strict=True))
    return dict(zip(("import_s", "first_s"), medians, strict=True))


def _first() -> None:
    """Prints the seconds of an import and of a first rewriting, in a new process."""
    import json
    import time

    attention, x = _attention()
    started = time.process_time()
    import rewriter

    imported = time.process_time()
    rewriter.optimize(attention).jaxpr(x, x, x)
    ended = time.process_time()
    print(json.dumps([round(imported - started, 3), round(ended - imported, 3)]))


def of_tree(tree: pathlib.Path) -> dict[str, Any]:
    """Returns all figures of a tree."""
    return {**counts(sources(tree)), **running(tree), **cold(tree)}


def before() -> dict[str, Any]:
    """Returns the figures of the last tree without folders, as Git has it."""
    packed = subprocess.run(
        ["git", "archive", BEFORE], cwd=ROOT, capture_output=True, check=True
    )
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as files:
            files.extractall(folder, filter="tar")
        return of_tree(pathlib.Path(folder))


def main() -> None:
    """Prints the figures, or keeps those of both trees."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=pathlib.Path, default=ROOT)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    now = of_tree(asked.tree.resolve())
    print(json.dumps(now, indent=1))
    if asked.write:
        command = "python3 -m tests.bench.structure --write"
        path = record.named("structure")
        record.write(path, command, before=before(), now=now)


if __name__ == "__main__":
    main()
