"""Files of a folder that name arguments for functions, found without running any."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator

WITHOUT = frozenset({"__pycache__", "node_modules", "site-packages"})
"""Folders that hold no code of the repository's own."""


def files_with_arguments(
    folder: str, makes_arguments: Callable[[str], bool]
) -> list[str]:
    """Returns the Python files below a folder that define arguments, sorted.

    Hidden folders and virtual environments are passed over.

    Args:
        folder: The folder.
        makes_arguments: Whether a name is that of arguments.
    """
    return [f for f in _files(folder) if any(map(makes_arguments, defined(f)))]


def _files(folder: str) -> Iterator[str]:
    """Python files below a folder."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(
            f for f in folders
            if f[0] != "." and f not in WITHOUT
            and not os.path.exists(os.path.join(place, f, "pyvenv.cfg"))
        )  # fmt: skip
        yield from (os.path.join(place, f) for f in sorted(files) if f.endswith(".py"))


def defined(file: str, functions: bool = False) -> list[str]:
    """Returns the names that a file defines at its top; it is not run.

    Args:
        file: The file; one that cannot be read or parsed defines none.
        functions: Whether to return functions alone.
    """
    try:
        with open(file, encoding="utf-8") as opened:
            body = ast.parse(opened.read()).body
    except (OSError, SyntaxError, ValueError):
        return []
    found = [n.name for n in body if isinstance(n, ast.FunctionDef)]
    if functions:
        return found
    targets = [t for n in body if isinstance(n, ast.Assign) for t in n.targets]
    return found + [t.id for t in targets if isinstance(t, ast.Name)]
