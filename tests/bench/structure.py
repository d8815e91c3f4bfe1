"""Counts what a reader of the package has to do with: modules, lines, files that run.

    python -m tests.bench.structure

It counts ``rewriter``, ``patterns`` and ``kernels`` of this folder. Files that run are
those with a function that is called while a small attention is rewritten for the first
time in the process. Bodies of modules and classes, which run at import, do not count.
"""

from __future__ import annotations

import ast
import collections
import inspect
import pathlib
import sys
from typing import Any

FOLDERS = ("rewriter", "patterns", "kernels")
LONG = 60
"""Lines of a function that is counted as long."""


def sources() -> dict[pathlib.Path, str]:
    """Returns the text of every module; links are not followed."""
    found = (p for folder in FOLDERS for p in pathlib.Path(folder).rglob("*.py"))
    linked = ("rewriter/kernels/", "rewriter/patterns/")
    return {p: p.read_text() for p in found if not str(p).startswith(linked)}


def counts(texts: dict[pathlib.Path, str]) -> dict[str, Any]:
    """Returns what can be counted in the text alone."""
    lines = {p: len(text.splitlines()) for p, text in texts.items()}
    nodes = [n for text in texts.values() for n in ast.walk(ast.parse(text))]
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef)]
    long = [n for n in functions if n.end_lineno - n.lineno >= LONG]  # type: ignore
    folders = collections.Counter(p.parent for p in texts if p.name != "__init__.py")
    fullest, most = folders.most_common(1)[0]
    longest = max(lines, key=lambda p: lines[p])
    return {
        "modules in the fullest folder": f"{most} ({fullest})",
        "lines of the longest file": f"{lines[longest]} ({longest})",
        f"functions of more than {LONG} lines": f"{len(long)} of {len(functions)}",
        "lines": sum(lines.values()),
    }


def running() -> dict[str, int]:
    """Returns how many files and functions run for a small attention, by folder."""
    import jax
    import jax.numpy as jnp

    import rewriter

    def attention(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 8
        seen = jnp.tril(jnp.ones((64, 64), bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    codes: set[Any] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            codes.add(frame.f_code)

    x, fast = jnp.ones((1, 64, 2, 64)), rewriter.optimize(attention)
    sys.setprofile(note)
    try:
        fast.jaxpr(x, x, x)
    finally:
        sys.setprofile(None)
    ran = [(pathlib.Path(c.co_filename).resolve(), c.co_qualname) for c in codes]
    made: dict[str, int] = {}
    for folder in FOLDERS:
        mine = {x for x in ran if pathlib.Path(folder).resolve() in x[0].parents}
        made[f"files of {folder} that run for one attention"] = len(
            {f for f, _ in mine}
        )
        made[f"functions of {folder} that run for it"] = len(mine)
    return made


if __name__ == "__main__":
    for name, value in {**counts(sources()), **running()}.items():
        print(f"{name}: {value}")
