"""Words for attention's parameters, in reports and in comparisons of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rewriter.ops.op import unsaid

EMPTY_ROWS = {
    "mean": "the mean of v",
    "mean_passing": "the mean of v",
    "nan": "NaN",
    "nan_passing": "NaN",
    "zero": "zero",
    "zero_nan_passing": "zero",
}
"""The result of a row without keys, by the parameter ``empty_rows``."""


def window(value: Any) -> str:
    """Returns a window of keys in words.

    Example:
        >>> window((None, 0)), window((127, 0)), window((3, 3))
        ('causal', 'window 127 back', 'window 3 back, 3 ahead')
    """
    if value == (None, 0):
        return "causal"
    left, right = value
    sides = [f"{left} back" if left is not None else "all before"]
    sides += [f"{right} ahead" if right is not None else "all after"]
    return "window " + ", ".join(s for s in sides if not s.startswith("0 "))


def shift(value: Any) -> str:
    """Returns the offset of a window in words; none for 0."""
    return f"shift {value}" if value else ""


def note(params: Mapping[str, Any]) -> str:
    """Returns what both programs give for rows without keys, in words."""
    rows = EMPTY_ROWS.get(str(params.get("empty_rows", "")))
    return f"fully masked rows: both give {rows}" if rows else ""


def has_zero_rows(params: Mapping[str, Any]) -> bool:
    """Whether rows without keys are 0, whatever the definition gives for them."""
    return str(params.get("empty_rows")).startswith("zero")


WORDS = {
    "window": window,
    "shift": shift,
    **dict.fromkeys(
        (
            "empty_rows", "heads_axis", "wraps", "fills", "promises", "unshifted",
            "weights", "fill", "fill_passes", "open_bias",
        ),
        unsaid,
    ),
}  # fmt: skip
"""Parameters that have words of their own, or none."""
