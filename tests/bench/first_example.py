"""The README's first example: what it gains, and a picture of it.

  python3 -m tests.bench.first_example [--pairs N] [--write]

Prints report, time and temporary memory. ``--write`` keeps the figures for the README
and draws ``docs/first_example.svg``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from typing import Any

import jax

import rewriter
from tests.bench import record

ROOT = record.RESULTS.parent.parent.parent
PICTURE = ROOT / "docs" / "first_example.svg"


def example() -> dict[str, Any]:
    """Returns what the example defines, without what it prints."""
    page = (ROOT / "README.md").read_text()
    block = re.findall(r"```python\n(.*?)```", page, flags=re.S)[0]
    kept = "".join(x for x in block.splitlines(True) if not x.startswith("print("))
    defined: dict[str, Any] = {"__name__": "example"}
    exec(compile(kept, "example.py", "exec"), defined)
    return defined


def main() -> None:
    """Measures the example and draws it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    its = example()
    fast, values = its["fast"], (its["q"], its["k"], its["v"])
    report = fast.report(*values)
    result = rewriter.benchmark(fast, pairs=given.pairs)(*values)
    print(f"{report}\n{result}")
    if given.write:
        about = f"{os.cpu_count()} cores, {platform.machine()}, jax {jax.__version__}"
        command = f"python3 -m tests.bench.first_example --pairs {given.pairs} --write"
        what = "causal attention 1×2048×4×64"
        rows = [{"what": what, **row} for row in json.loads(result.json())["rows"]]
        text = f"{report}\n{result}"
        path = record.named("first_example")
        record.write(path, command, about=about, rows=rows, text=text)
        PICTURE.write_text(report.svg() + "\n")


if __name__ == "__main__":
    main()
