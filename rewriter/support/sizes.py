"""Bytes in words."""

from __future__ import annotations


def size_text(count: int) -> str:
    """Returns bytes in words.

    Example:
        >>> size_text(52_428_800)
        '50 MiB'
    """
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} GiB"
