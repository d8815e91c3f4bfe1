"""Runs of other roundings: the order of products decides about infinities and NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from tests.soundness.rounding import ORDERS, rounded

HUGE = 3e38


def results(row: Sequence[float], column: Sequence[float], ragged: bool) -> list[float]:
    """One product of a row with a column, by each order of its addends."""
    x, w = np.array([row], "f4"), np.array(column, "f4")[:, None]
    sizes = np.array([1], "i4")

    def run(given: Sequence[Any]) -> Sequence[Any]:
        x, w = given
        return [jax.lax.ragged_dot(x, w[None], sizes) if ragged else x @ w]

    return [rounded(run, (x, w), (0, 1), s)[0].item() for s in range(len(ORDERS))]


@pytest.mark.parametrize("ragged", [False, True])
def test_products_that_overflow(ragged: bool) -> None:
    """A fused multiply-add keeps the first infinity; added by sign they are NaN."""
    assert np.isnan(results([HUGE, HUGE, 1], [9, -9, 1], ragged)[-1])


@pytest.mark.parametrize("ragged", [False, True])
def test_nothing_else_differs(ragged: bool) -> None:
    for row, column in (
        ([1, -2, 3], [4, 5, 6]),
        ([HUGE, 1, -1], [9, 2, 3]),  # overflows to one side only
        ([np.inf, 1, -1], [2, -3, 4]),
        ([HUGE, -HUGE], [0.5, 0.25]),
    ):
        first, *others = results(row, column, ragged)
        np.testing.assert_allclose(others, first, 1e-5)
