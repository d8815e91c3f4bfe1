"""Finds the one of many items that makes a step fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def failing(
    step: Callable[[Sequence[Item]], object], items: Sequence[Item]
) -> tuple[Item, Exception] | None:
    """Returns an item without which a step works on more of them, and the error.

    It is the last one of the fewest first items on which the step fails. It is ``None``
    if there are no items, or if the step does not fail when it is tried again.

    Args:
        step: A function of some of the items.
        items: All of them.

    Example:
        >>> failing(lambda numbers: [1 / n for n in numbers], [2, 1, 0, 3])
        (0, ZeroDivisionError('division by zero'))
    """
    works, fails = 0, len(items)
    error = _error(step, items)
    if error is None or not items:
        return None
    while fails - works > 1:
        half = (works + fails) // 2
        found = _error(step, items[:half])
        if found is None:
            works = half
        else:
            fails, error = half, found
    return items[fails - 1], error


def _error(
    step: Callable[[Sequence[Item]], object], items: Sequence[Item]
) -> Exception | None:
    """What a step raises on some items."""
    try:
        step(items)
    except Exception as error:
        return error
    return None
