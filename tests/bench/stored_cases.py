"""The command line of benchmarks of stored matrices: kinds, sizes, numbers of rows."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable
from typing import Any

from tests.bench import record


def parser(doc: str | None, kinds: str) -> argparse.ArgumentParser:
    """Returns a parser with the options of every such script.

    Args:
        doc: The script's docstring.
        kinds: The kinds by default, by semicolons.
    """
    made = argparse.ArgumentParser(description=doc)
    made.add_argument("--kinds", default=kinds)
    made.add_argument("--rows", default="1;16;64;256")
    made.add_argument("--sizes", default="4096x14336;8192x28672")
    made.add_argument("--turns", type=int, default=10)
    made.add_argument("--json", type=pathlib.Path)
    return made


def run(
    given: argparse.Namespace,
    command: str,
    measured: Callable[[str, int, int, int], list[dict[str, Any]]],
) -> None:
    """Prints the figures of all cases, and writes them if there is a path.

    Args:
        given: The arguments.
        command: What is said to have made them.
        measured: ``measured(kind, m, k, n)`` returns the rows of a case.
    """
    rows: list[dict[str, Any]] = []
    for size in given.sizes.split(";"):
        k, n = map(int, size.split("x"))
        for kind in given.kinds.split(";"):
            for m in map(int, given.rows.split(";")):
                found = measured(kind, m, k, n)
                rows += found
                print(*map(json.dumps, found), sep="\n", flush=True)
    if given.json:
        record.write(given.json, command, results=rows)
