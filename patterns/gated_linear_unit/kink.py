"""Compares a program's derivatives at one number with those of the named function."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

BENDS = 4
"""How many times as much of second derivatives counts as rounding."""


@dataclass(frozen=True)
class Kink:
    """Derivatives at one number: slope, again and bend, as in `Derivatives`.

    Attributes:
        at: The number.
        own: The program's.
        usual: The named function's.
        near: The relative difference that counts as rounding.
    """

    at: float
    own: tuple[float, float, float]
    usual: tuple[float, float, float]
    near: float

    def entry(self) -> tuple[float | str, ...]:
        """What `Slopes` says of it; empty if it says nothing."""
        if self._alike(self.own, self.usual):
            return ()
        slope, *more = self.own
        implied = self._alike(self.own, (slope, slope, 0.0))
        return tuple(map(_named, (self.at, slope, *(() if implied else more))))

    def entry_beside_gradients(self) -> tuple[float | str, ...]:
        """The same beside gradients that are proved: they are the named function's.

        The program has been differentiated, so its value has its own slope.
        """
        if not math.isfinite(self.at):
            return self.entry()
        value, (slope, _, bend) = self.own[0], self.usual
        if self._alike((slope, value, bend), self.usual):
            return ()
        return tuple(map(_named, (self.at, slope, value, bend)))

    def _alike(
        self, some: tuple[float, float, float], others: tuple[float, float, float]
    ) -> bool:
        near = np.array([1, 1, BENDS]) * self.near
        return bool(np.isclose(some, others, near, near, equal_nan=True).all())


def _named(x: float) -> float | str:
    """A number that equals itself, and without a sign of zero."""
    return "nan" if math.isnan(x) else x + 0.0
