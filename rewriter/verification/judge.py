"""Judges whether rewritten results differ from the original by more than rounding.

Each row along the last axis is judged by itself. The allowed difference is the largest
of three numbers. One is the dtype's rounding of the row's own size. One is the change
of the original row if its arguments change by a rounding. The last is its distance from
a run in float64, which counts only where it is near. Where a fill of -1e9 absorbs a
score in float32 and not in float64, the program in its own types is what the user
wrote. Entries must be NaN and infinite where they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rewriter.measure.oracle import allowed as allowed_by_dtype

NEAR = 50.0
"""How many allowed errors away a float64 run may be to count, ..."""

NEAR_AT_MOST = 0.3
"""... and at most this share of a row."""

SHAKES = 16.0
"""How many times farther than a run with perturbed arguments a row may be."""

ZERO = 1e-10
"""The share of the arguments' size below which a float64 result counts as zero if the
program gives another number, ..."""

ROUNDINGS = 64.0
"""... and how many roundings of the arguments' size it may then be off by."""

ROOM = 16.0
"""The factor by which rows of unusual size must stay below their type's largest
number."""

FLOOR, FLOOR_OF_GRADIENTS = 0.05, 0.25
"""The least size of a row, as a share of the usual one; smaller rows are judged by it.

It is larger for gradients, where larger terms cancel.
"""

CANCELLED = 8.0
"""How many roundings of the largest row a gradient's row of zeros may be off by: what
cancels in it exactly as written cancels up to roundings in another order."""

FEW = 0.1
"""The share of a gradient's rows that may be off by as much, though they are not zero.
Such rows are small beside what cancels in them, and hold the roundings of that. A
program that computes something else is off in more of them."""

NOISE = 0.3
"""The share by which a row changes if it is made of roundings alone, and the program's
arguments move by a rounding. A wrong value changes by a few roundings."""

TOGETHER = 4.0
"""How many times farther than a run with perturbed arguments all rows together may be.
Single rows may be `SHAKES` times farther, which hides what is wrong in all of them."""

Runs = Callable[[], Sequence[Any]]


@dataclass(frozen=True)
class Verdicts:
    """The verdict on one result.

    Attributes:
        error: The largest error of a row against the reference, relative to the row.
        allowed: The allowed error of that row.
        original: The same for the program as written, against float64; 0 without it.
        differs: The differences, one sentence each; empty if there are none.
        entries: The entries that differ, flattened positions.
        unstable: The number of rows that rounding alone changes, so that they prove
            nothing.
        far: The number of rows where float64 gives grossly different values.
        worst: The index of the entry that is farthest off in the worst row.
    """

    error: float = 0.0
    allowed: float = 0.0
    original: float = 0.0
    differs: tuple[str, ...] = ()
    entries: tuple[int, ...] = ()
    unstable: int = 0
    far: int = 0
    worst: tuple[int, ...] = ()


def judged(
    written: Any,
    rewritten: Any,
    coarse: str,
    perturbed: Runs = tuple,
    exact: Callable[[], Any] | None = None,
    *,
    again: Runs = tuple,
    gradient: bool = False,
    scaled: bool = False,
    infinite: bool = False,
    always: bool = False,
    together: bool = False,
    unit: float = 0.0,
) -> Verdicts:
    """Returns the verdict on one result.

    Args:
        written: The result of the program as written.
        rewritten: That of the rewritten one.
        coarse: The coarsest dtype on the way to it.
        perturbed: Returns original results for arguments moved by a rounding; called
            only if the two differ.
        exact: Returns the result in float64; called likewise.
        again: Returns rewritten results for arguments moved by a rounding; called only
            if a gradient still differs.
        gradient: Whether rows that are exactly zero must stay so, but for roundings of
            what cancels.
        scaled: Whether the arguments are of unusual size. Then rows where float64 gives
            other values prove nothing, and gradients are only checked for being finite.
        infinite: Whether arguments hold an infinity or a NaN. Then what was finite must
            stay so. Entries that were not may be: a rewrite may leave out ``0 * nan``.
        always: Whether to call the other two in any case, for their errors.
        together: Whether to judge all rows of a gradient together, too.
        unit: The size of the program's arguments. Where float64 gives zero, roundings
            of that size are allowed.

    Example:
        >>> judged(np.ones(2), np.array([1.0, np.nan]), "float32").differs
        ('1 of 2 entries are NaN, where they were finite (the first at [1])',)
    """
    with np.errstate(all="ignore"):
        return _judged(
            written, rewritten, coarse, perturbed, exact, again=again,
            gradient=gradient, scaled=scaled, infinite=infinite, always=always,
            together=together, unit=unit,
        )  # fmt: skip


def _judged(
    written: Any,
    rewritten: Any,
    coarse: str,
    perturbed: Runs,
    exact: Callable[[], Any] | None,
    *,
    again: Runs,
    gradient: bool,
    scaled: bool,
    infinite: bool,
    always: bool,
    together: bool,
    unit: float,
) -> Verdicts:
    a, b = _host(written), _host(rewritten)
    if a.shape != b.shape or a.dtype != b.dtype:
        what = f"is {b.dtype}{list(b.shape)}, and was {a.dtype}{list(a.shape)}"
        return Verdicts(float("inf"), differs=(what,))
    if not a.size:
        return Verdicts()
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return _exactly(a, b, perturbed)
    seen = np.isfinite(a) | (not infinite)
    shown = lambda x: np.where(seen, x, x.dtype.type(0))
    a, b = shown(a), shown(b)
    floor = FLOOR_OF_GRADIENTS if gradient else FLOOR
    case = _Case(a, b, coarse, floor=floor)
    sizes = not (scaled and gradient)  # else roundings are of the size of what is left
    if case.fine(gradient, sizes) and not always:
        return case.verdicts(gradient, sizes)
    reference = None if exact is None else _wide(shown(_host(exact())))
    case = _Case(a, b, coarse, (), reference, scaled, floor, unit)
    if not case.fine(gradient, sizes):
        others = [_wide(shown(_host(x))) for x in perturbed()]
        case = _Case(a, b, coarse, others, reference, scaled, floor, unit)
        if gradient and sizes and together:
            case.compare_together()
        if gradient and sizes and not case.fine(gradient, sizes):
            case.note_roundings([_wide(shown(_host(x))) for x in again()])
    return case.verdicts(gradient, sizes)


def _exactly(a: np.ndarray, b: np.ndarray, perturbed: Runs) -> Verdicts:
    """Judges integers: they must be equal, except where rounding alone changes them."""
    off = a != b
    if off.any():
        for other in perturbed():
            off &= _host(other) == a
    if not off.any():
        return Verdicts()
    text = f"{off.sum()} of {a.size} entries differ{_first(off)}"
    where = tuple(np.flatnonzero(off)[:64].tolist())
    return Verdicts(float(off.mean()), 0.0, 0.0, (text,), where)


class _Case:
    """One result's rows, and what is allowed in them."""

    def __init__(
        self,
        written: np.ndarray,
        rewritten: np.ndarray,
        coarse: str,
        perturbed: Sequence[np.ndarray] = (),
        exact: np.ndarray | None = None,
        scaled: bool = False,
        floor: float = FLOOR,
        unit: float = 0.0,
    ) -> None:
        self.shape = written.shape
        self.unit = unit
        self.eps = float(jnp.finfo(coarse or written.dtype).eps)
        self.a, self.b = _rows(_wide(written)), _rows(_wide(rewritten))
        kinds_a, kinds_b = _kinds(self.a), _kinds(self.b)
        self.kinds = kinds_a, kinds_b
        self.moved = kinds_a != kinds_b
        self.tolerance = max(allowed_by_dtype(coarse or written.dtype), 1e-15)
        others = [_rows(x) for x in perturbed]
        for x in others:  # rounding alone decides here
            self.moved &= _kinds(x) == kinds_a
        exact = None if exact is None else _rows(exact)
        fine = (kinds_a == 0) & (kinds_b == 0)
        own = _norm(np.where(kinds_a == 0, self.a, 0))
        usual = float(np.median(own[own > 0])) if (own > 0).any() else 0.0
        tiny = float(jnp.finfo(written.dtype).tiny)
        least = self.tolerance * floor * usual
        self.rounding = self.eps * float(own.max(initial=0.0))
        self.least = max(least, CANCELLED * self.rounding)
        self.noise = np.zeros(own.shape, bool)
        self.size = np.maximum(own, floor * usual) + 64 * tiny
        self.gap = _norm(np.where(fine, self.b - self.a, 0))
        self.limit = self.tolerance * self.size
        self.large = fine.all(axis=1) & (own > floor * usual)
        self.moves = [_norm(np.where(fine & np.isfinite(x), x - self.a, 0))
                      for x in others]  # fmt: skip
        self.wrong_together = ""
        self.spread = self._sensitivity(others, fine)
        self.limit = np.maximum(self.limit, self.spread)
        self.unstable = int(np.sum(self.spread > NEAR_AT_MOST * self.size))
        near = self._float64(exact, fine)
        if scaled:
            most = np.abs(np.where(kinds_a == 0, self.a, 0)).max(axis=1)
            near &= most < float(jnp.finfo(written.dtype).max) / ROOM
            self.moved &= near[:, None]
            self.limit = np.where(near, self.limit, np.inf)

    def _sensitivity(
        self, others: Sequence[np.ndarray], fine: np.ndarray
    ) -> np.ndarray:
        """How far rows move with their arguments, at least as far as most rows do."""
        if not others:
            return np.zeros(self.size.shape)
        most = np.max(self.moves, axis=0)
        share = float(np.quantile(most / self.size, 0.9))
        return np.maximum(SHAKES * most, 2 * share * self.size)

    def _float64(self, exact: np.ndarray | None, fine: np.ndarray) -> np.ndarray:
        """Notes errors against float64; returns in which rows it counts."""
        self.before, self.after = np.zeros(self.gap.shape), self.gap
        self.far = 0
        if exact is None:
            return np.ones(self.gap.shape, bool)
        own = (self.kinds[0] == 0) & np.isfinite(exact)
        before = _norm(np.where(own, self.a - exact, 0))
        after = _norm(np.where(fine & own, self.b - exact, 0))
        share = min(NEAR * self.tolerance, NEAR_AT_MOST)
        near = before <= np.maximum(share * self.size, self.spread)
        near &= (self.kinds[0] == _kinds(exact)).all(axis=1)
        true = _norm(np.where(own, exact, 0))
        zero = own.all(axis=1) & (true <= ZERO * self.unit)
        zero &= (before >= true / 4) | (true == 0)  # else what is small is exact
        self.limit = np.where(
            zero, np.maximum(self.limit, ROUNDINGS * self.eps * self.unit), self.limit
        )
        near |= zero & (before <= self.limit)
        usual = np.median((before / self.size)[near]) if near.any() else 0.0
        roundings = np.maximum(4 * before, 8 * usual * self.size)
        self.before = before
        self.far = int(np.sum(~near))
        self.after = np.where(near, np.minimum(after, self.gap), self.gap)
        self.limit = np.where(near, np.maximum(self.limit, roundings), self.limit)
        return near

    def fine(self, gradient: bool, sizes: bool) -> bool:
        """Whether nothing differs, ignoring sizes if they prove nothing."""
        if self.moved.any() or not sizes:
            return not self.moved.any()
        off = (self.after > self.limit).any()
        zeros = gradient and self.no_zeros().any()
        return not (off or zeros or self.wrong_together)

    def compare_together(self) -> None:
        """Compares all rows but small ones at once: roundings do not add up there."""
        if not self.large.any() or not self.moves:
            return
        whole = lambda rows: float(np.sqrt(np.sum(rows[self.large] ** 2)))
        moved = TOGETHER * max(map(whole, self.moves))
        rounded = max(self.tolerance * whole(self.size), 8 * whole(self.before))
        gap, most, size = whole(self.after), max(moved, rounded), whole(self.size)
        if gap > most:
            self.wrong_together = (
                f"all rows together differ by {gap / size:.1e} of their size "
                f"(allowed {most / size:.1e})"
            )

    def no_zeros(self) -> np.ndarray:
        """Rows that were exactly zero, and are more than roundings now."""
        was = ~self.a.any(axis=1) & (self.kinds[0] == 0).all(axis=1)
        here = np.nan_to_num(np.abs(self.b)).max(axis=1)
        return was & (here > self.least) & (here > 0) & ~self.noise

    def note_roundings(self, moved: Sequence[np.ndarray]) -> None:
        """Allows what changes with the arguments' roundings, in rows that cancel.

        What cancels in a row is at most as large as the largest row. Where few rows are
        left that differ, roundings may also be the same however the arguments move: a
        result of 16 bits that is nearly one of its terms always loses the others.

        Args:
            moved: Rewritten results for arguments moved by a rounding.
        """
        changes = [_norm(np.nan_to_num(_rows(x) - self.b)) for x in moved]
        if not changes:
            return
        own = SHAKES * np.max(changes, axis=0)
        most = ROUNDINGS * self.rounding
        self.limit = np.maximum(self.limit, np.minimum(own, most))
        if np.mean(self.after > self.limit) <= FEW:
            self.limit = np.maximum(self.limit, CANCELLED * self.rounding)
        share = np.median(changes, axis=0) / np.maximum(_norm(self.b), 1e-300)
        self.noise = (share > NOISE) & (self.gap <= self.limit)

    def verdicts(self, gradient: bool, sizes: bool) -> Verdicts:
        """The verdict."""
        share = self.after / self.size
        off = (self.after > self.limit) & sizes
        gradient = gradient and sizes
        worst = int(np.argmax(np.where(off, share + 1e9, share / self.limit)))
        differs, where = [], np.zeros(self.a.shape, bool)
        if self.moved.any():
            differs += self._moved_text()
            where |= self.moved
        if off.any():
            differs.append(self._values_text(off, worst))
            big = np.abs(np.where(np.isfinite(self.b), self.b, 0) - self.a)
            where |= off[:, None] & (big == big.max(axis=1, keepdims=True))
        if self.wrong_together:
            differs.append(self.wrong_together)
        zeros = self.no_zeros() if gradient else np.zeros(off.shape, bool)
        if zeros.any():
            first = _first(np.broadcast_to(zeros[:, None], self.a.shape), self.shape)
            differs.append(f"{zeros.sum()} rows were exactly 0 and are not{first}")
            where |= zeros[:, None]
        return Verdicts(
            float("inf") if self.moved.any() else float(share[worst]),
            float((self.limit / self.size)[worst]),
            float((self.before / self.size)[worst]),
            tuple(differs),
            tuple(np.flatnonzero(where)[:64].tolist()),
            self.unstable,
            self.far,
            self._farthest(worst),
        )

    def _farthest(self, row: int) -> tuple[int, ...]:
        """The index of the entry of a row that is farthest off."""
        distance = np.abs(np.where(np.isfinite(self.b), self.b, 0) - self.a)[row]
        entry = row * distance.size + int(np.argmax(np.nan_to_num(distance)))
        parts = max(1, self.a.size // max(1, math.prod(self.shape)))  # of a complex one
        return tuple(map(int, np.unravel_index(entry // parts, self.shape)))

    def _moved_text(self) -> list[str]:
        """Which entries became finite, NaN or infinite."""
        before, after = self.kinds
        texts = []
        kinds = before * len(KINDS) + after
        for kind in np.unique(kinds[self.moved]):
            old, new = divmod(int(kind), len(KINDS))
            here = self.moved & (before == old) & (after == new)
            texts.append(
                f"{here.sum()} of {here.size} entries are {KINDS[new]}, where they "
                f"were {KINDS[old]}{_first(here, self.shape)}"
            )
        return sorted(texts)

    def _values_text(self, off: np.ndarray, worst: int) -> str:
        share, limit = self.after[worst] / self.size[worst], self.limit[worst]
        at = _first(np.broadcast_to(off[:, None], self.a.shape), self.shape, rows=True)
        return (
            f"{off.sum()} of {off.size} rows differ, by up to {share:.1e} of a row "
            f"(allowed {limit / self.size[worst]:.1e}){at}"
        )


KINDS = ("finite", "NaN", "inf", "-inf")


def _kinds(x: np.ndarray) -> np.ndarray:
    """The index in `KINDS` of each entry."""
    found = np.zeros(x.shape, np.int8)
    if not np.isfinite(x).all():
        found[np.isnan(x)], found[x == np.inf], found[x == -np.inf] = 1, 2, 3
    return found


def _norm(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        most = np.abs(x).max(axis=1, keepdims=True)
        safe = np.where(most > 0, most, 1)
        return (np.sqrt(np.sum((x / safe) ** 2, axis=1)) * safe[:, 0]).astype(float)


def _rows(x: np.ndarray) -> np.ndarray:
    """Reshapes an array into rows along the last axis."""
    return x.reshape(-1, x.shape[-1] if x.ndim else 1)


def _first(
    where: np.ndarray, shape: tuple[int, ...] | None = None, rows: bool = False
) -> str:
    shape = where.shape if shape is None else shape
    if not shape:
        return ""
    parts = max(1, where.size // max(1, math.prod(shape)))  # two of a complex number
    place = np.flatnonzero(where)[0] // parts
    at = [int(n) for n in np.unravel_index(place, shape)]
    if rows:
        return f" (the first at {at[:-1]})" if len(shape) > 1 else ""
    return f" (the first at {at})"


def _host(x: Any) -> np.ndarray:
    if jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended):
        x = jax.random.key_data(x)
    return np.asarray(x)


def _wide(x: np.ndarray) -> np.ndarray:
    """Floats as float64; complex numbers as pairs along the last axis."""
    if np.iscomplexobj(x):
        x = x.astype(np.complex128).reshape(x.shape or (1,)).view(np.float64)
        return x
    return x.astype(np.float64)
