"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(head: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a table; cells are written by `str`.

    Example:
        >>> print(table(("op", "ms"), [("attention", 2)]))
        | op | ms |
        | --- | --- |
        | attention | 2 |
    """
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
