"""Cases of which only some run by default: the others with ``pytest -m slow``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first(count: int, cases: Iterable[Any], several: bool = False) -> list[Any]:
    """Returns parameters of a test, of which those behind the first ones are slow.

    Args:
        count: How many run by default.
        cases: The parameters.
        several: Whether a case is a tuple of several parameters.
    """
    return [
        case
        if i < count
        else pytest.param(*(case if several else (case,)), marks=pytest.mark.slow)
        for i, case in enumerate(cases)
    ]
