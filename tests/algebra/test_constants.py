"""What is read off constant arrays is what their numbers are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rewriter.program import equal_constants
from rewriter.program.constant_tables import (
    affine_constant,
    banded_constant,
    two_numbers,
)

pytestmark = pytest.mark.once

DRAW = np.random.default_rng(0)


def banded(rows: int, columns: int, lower: int, upper: int) -> np.ndarray:
    diff = np.arange(columns)[None] - np.arange(rows)[:, None]
    return (diff >= lower) & (diff <= upper)


@pytest.mark.parametrize(("rows", "columns"), [(5, 5), (4, 9), (9, 4)])
def test_bands_are_found_as_they_are(rows: int, columns: int) -> None:
    for lower, upper in itertools.product(range(-rows - 1, columns + 2), repeat=2):
        mask = banded(rows, columns, lower, upper)
        varies = [d for d in (0, 1) if (mask != mask.take([0], axis=d)).any()]
        found = banded_constant(mask)
        if not mask.any():
            assert found is None
        elif len(varies) == 2:
            assert found is not None
            row, column, low, high = found
            low = -rows if low is None else low
            high = columns if high is None else high
            assert (row, column) == (0, 1)
            assert np.array_equal(banded(rows, columns, low, high), mask)


def is_as_found(mask: np.ndarray) -> bool:
    """Whether a mask is no band, or the band that is found."""
    found = banded_constant(mask)
    if found is None:
        return True
    row, column, low, high = found
    low, high = (-9 if low is None else low), (9 if high is None else high)
    expected = banded(*mask.shape, low, high)
    if row is None:
        along = np.arange(mask.shape[column])
        expected = np.expand_dims((along >= low) & (along <= high), 1 - column)
    return np.array_equal(np.broadcast_to(expected, mask.shape), mask)


def test_no_other_mask_is_a_band() -> None:
    for _ in range(2000):
        assert is_as_found(DRAW.random((4, 5)) < DRAW.choice([0.3, 0.8]))


def test_a_hole_in_a_band_is_seen_wherever_it_is() -> None:
    for lower, upper in ((-3, 0), (-9, 2), (0, 3)):
        mask = banded(6, 6, lower, upper)
        assert banded_constant(mask) is not None
        for at in np.ndindex(mask.shape):
            other = mask.copy()
            other[at] ^= True
            assert is_as_found(other)


def test_two_numbers() -> None:
    band = banded(6, 6, -2, 0)
    for dtype in (np.float32, np.float64, np.float16):
        low, high, pattern = two_numbers(np.where(band, 0, -1e4).astype(dtype))
        assert (low, high) == (-1e4, 0)
        assert pattern == banded_constant(band)
    numbers = np.where(band, 0.0, -np.inf)
    assert two_numbers(numbers)[:2] == (-np.inf, 0.0)
    for value in (np.nan, 1.0):  # not a number, and a third number
        other = np.where(banded(40, 40, -2, 0), 0.0, -1.0)
        other[-1, 3] = value
        assert two_numbers(other) is None
    assert two_numbers(np.zeros((4, 4))) is None
    assert two_numbers(np.zeros((0, 4))) is None


def test_affine() -> None:
    at = 2 * np.arange(5)[:, None] - 3 * np.arange(4) + 7
    assert affine_constant(at) == (7.0, (2.0, -3.0))
    for place in np.ndindex(at.shape):
        other = at.copy()
        other[place] += 1
        assert affine_constant(other) is None


@pytest.mark.parametrize("swap", ["rows", "numbers of a row"])
def test_arrays_of_equal_sums_are_not_one(swap: str) -> None:
    first = DRAW.permutation(256).reshape(16, 16)
    second = first.copy()
    if swap == "rows":
        second[[5, 6]] = second[[6, 5]]
    else:
        second[5, [6, 7]] = second[5, [7, 6]]
    assert not np.array_equal(first, second)
    found = equal_constants.Constants()
    found.one(first)
    assert found.one(second) is second
    assert found.one(first.copy()) is first


@pytest.mark.parametrize(
    "array",
    [np.zeros((0, 3)), np.float32(2), np.ones((3, 5), bool), np.ones((2, 3, 4)).T],
)
def test_arrays_of_every_shape_are_compared(array: np.ndarray) -> None:
    found = equal_constants.Constants()
    assert found.one(array) is array
    assert found.one(array.copy()) is array
