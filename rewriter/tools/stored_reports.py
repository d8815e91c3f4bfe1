"""Reports that the command line wrote, read again."""

from __future__ import annotations

import json
from typing import Any

from rewriter.errors import ConfigError

KEYS = {"function", "sites", "misses", "failures", "counts"}


def report_of(path: str) -> dict[str, Any]:
    """Returns a report as data, from the file that ``explain --json`` wrote.

    Raises:
        ConfigError: The file cannot be read, or holds something else.
    """
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        if isinstance(found, dict) and found.keys() >= KEYS:
            return found
        problem = "it holds something else"
    except (OSError, ValueError) as error:
        problem = str(error)
    raise ConfigError(
        f"{path}: {problem}",
        wanted="a report",
        next_step=f"Write one with explain ... --json > {path}",
    )
