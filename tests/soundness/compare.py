"""Compares two results of a program: numbers, NaN and infinities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.soundness.tolerance import TINY, Variants, numbers, rounding_of, scale

NEAR = 1e-3
"""How far from float64 an entry may be that is right, beside one that is not."""


HUGE = 1e37
"""A sum of weights times values that are as large may overflow before its division, and
the order of any sum decides whether it overflows to a number that is as large."""


@dataclass(frozen=True)
class Difference:
    """What differs between two arrays.

    Attributes:
        what: Of what kind it is.
        count: In how many entries.
        size: Of how many.
        where: The index of the worst.
        original: What is there in the original.
        rewritten: What is there in the rewritten program.
    """

    what: str
    count: int
    size: int
    where: tuple[int, ...]
    original: float
    rewritten: float

    def __str__(self) -> str:
        return (
            f"{self.what} in {self.count} of {self.size} entries, as at {self.where}:"
            f" {self.original:.9g} -> {self.rewritten:.9g}"
        )


def difference(
    original: Any,
    rewritten: Any,
    tolerance: np.ndarray,
    ignored: np.ndarray | None = None,
) -> Difference | None:
    """The first kind of difference, if there is one.

    Args:
        original: An array.
        rewritten: What should be the same.
        tolerance: How far numbers may differ, of the same shape.
        ignored: Entries that do not count.
    """
    if original.dtype != rewritten.dtype or original.shape != rewritten.shape:
        what = f"{original.dtype}{original.shape} -> {rewritten.dtype}{rewritten.shape}"
        return Difference(what, 1, 1, (), 0.0, 0.0)
    a, b = numbers(original), numbers(rewritten)
    finite, also = np.isfinite(a), np.isfinite(b)
    counted = np.ones(a.shape, bool) if ignored is None else ~ignored
    if (lost := finite & ~also & counted).any():
        return _described("finite is no more", lost, lost, a, b)
    if (found := ~finite & also & counted).any():
        return _described("what is not finite is", found, found, a, b)
    with np.errstate(invalid="ignore"):
        excess = np.where(finite & also & counted, abs(a - b) / tolerance, 0.0)
    return _described("differs", excess > 1.0, excess, a, b)


def borderline(original: Any, others: Variants, which: int) -> np.ndarray:
    """Entries of which rounding decides whether they are finite."""
    mine = numbers(original)
    finite = np.isfinite(mine)
    runs = (others.eager, *others.nudged, *others.perturbed, *others.rounded)
    changes = [np.isfinite(r[which]) != finite for r in runs]
    later = others.shifted[which]
    changes.append((np.isfinite(later) != finite) | ((mine == 0) & (later != 0)))
    changes.append(finite & (abs(mine) > HUGE))
    lower = others.lowered[which]  # of sums that overflow, weights are 0
    with np.errstate(invalid="ignore"):
        changes.append(finite & (abs(lower - mine) > NEAR * scale(mine, False) + TINY))
    return np.logical_or.reduce(changes)


def in_range(
    original: Any,
    rewritten: Any,
    others: Variants,
    which: int,
    eps: float,
    strict: bool,
    floor: float = 0.0,
) -> np.ndarray:
    """Entries that the original has wrong for want of range, and that are right now.

    Squares or a sigmoid's exponentials may overflow in float32 and not in float64. A
    kernel that then gives what float64 does is no worse. Nor is one that hides what a
    fill is meant to hide, where scores are as large as the fill. If all scores that a
    row sees are -inf, the program weighs the hidden ones. It may be NaN now, or weigh
    all keys alike if the fill is chosen, and no more. Where a derivative is 0, what is
    not finite times it may be 0 now.

    Args:
        original: An array.
        rewritten: What should be the same.
        others: The original, computed in other ways.
        which: The number of the array.
        eps: The least step from 1 of the program's dtype.
        strict: Whether what is not finite must stay so, if no fill is to hide it.
        floor: The magnitude of what cancels.
    """
    a, b = numbers(original), numbers(rewritten)
    near = max(NEAR, 4 * eps)
    found = others.unseen[which] & np.isnan(b)
    found |= np.isinf(a) & np.isfinite(b) & (abs(b) > HUGE) & (np.sign(a) == np.sign(b))
    for exact in (others.exact[which], *(x[which] for x in others.right)):
        size = np.max(
            abs(exact), axis=-1, keepdims=True, initial=0, where=~np.isnan(exact)
        )
        with np.errstate(invalid="ignore"):
            loose = abs(b - exact) <= 1e-2 * abs(exact) + 8 * eps * size + TINY
            close = abs(b - exact) <= near * abs(exact) + max(1e-5, eps) * size
            close |= abs(b - exact) <= rounding_of(eps) * floor
        loose &= not strict
        found |= np.isfinite(exact) & np.where(np.isfinite(a), close, loose)
    zeros = others.of_chosen_zeros[which]
    with np.errstate(invalid="ignore"):
        chosen = abs(b - zeros) <= near * abs(zeros) + max(1e-5, eps) * scale(
            zeros, False
        )
    found |= ~np.isfinite(a) & np.isfinite(zeros) & chosen
    beside = others.beside[which]
    with np.errstate(invalid="ignore"):
        hides = abs(b - beside) <= near * abs(beside) + max(1e-5, eps)
    return found | (~np.isfinite(a) & np.isfinite(beside) & hides)


def _described(
    what: str, wrong: np.ndarray, how_wrong: np.ndarray, a: np.ndarray, b: np.ndarray
) -> Difference | None:
    if not wrong.any():
        return None
    where = np.unravel_index(np.argmax(how_wrong), wrong.shape)
    index = tuple(int(i) for i in where)
    total = int(wrong.sum())
    return Difference(what, total, wrong.size, index, float(a[where]), float(b[where]))
