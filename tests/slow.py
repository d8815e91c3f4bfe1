"""Cases of which only some run by default: the others with ``pytest -m slow``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


def unless(
    quick: Callable[..., bool], cases: Iterable[Any], several: bool = False
) -> list[Any]:
    """Returns parameters of a test, slow unless they are quick.

    Args:
        quick: Whether a case runs by default.
        cases: The parameters.
        several: Whether a case is a tuple of several parameters.
    """
    made = [case if several else (case,) for case in cases]
    return [
        pytest.param(*case, marks=() if quick(*case) else pytest.mark.slow)
        for case in made
    ]
