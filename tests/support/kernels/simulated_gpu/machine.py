"""A block of warpgroups as Python threads: memory, barriers and turns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.experimental import pallas as pl

PATIENCE_S = 20.0


class Stuck(AssertionError):
    """A barrier was not passed, or was passed twice before it was waited for."""


class _Here(threading.local):
    """What belongs to one warpgroup."""

    warpgroup = 0
    program = 0
    programs = 1
    part = 0
    """The block's index in its cluster."""
    block: Block

    def __init__(self) -> None:
        self.products: list[Callable[[], None]] = []
        self.stores: list[Callable[[], None]] = []
        self.begun: list[Callable[[], None]] = []
        self.waits: dict[int, int] = {}


HERE = _Here()


class Block:
    """What the warpgroups of a block share."""

    def __init__(self, warpgroups: int):
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        self.turns = [0] * warpgroups
        self.met: dict[range, int] = {}
        """How many warpgroups of a range came to wait for the others of it."""
        self.first: int | None = None
        """The warpgroup that goes as far as it can before another passes a wait."""
        self.first_waits: Callable[[], bool] | None = None

    def wait(self, passed: Callable[[], bool], what: str) -> None:
        mine = HERE.warpgroup
        with self.changed:
            done = lambda: self.failure is not None or (passed() and self.may_go(mine))
            if mine == self.first:
                self.first_waits = passed
                self.changed.notify_all()
            if not self.changed.wait_for(done, PATIENCE_S):
                raise Stuck(f"warpgroup {mine} waits for {what}")
            if mine == self.first:
                self.first_waits = None
            if self.failure is not None:
                raise Stuck("another warpgroup failed")

    def may_go(self, warpgroup: int) -> bool:
        if self.first in (None, warpgroup):
            return True
        return self.first_waits is not None and not self.first_waits()

    def meet(self, warpgroups: range) -> None:
        """Waits until all of some warpgroups are here."""
        with self.changed:
            before = self.met.get(warpgroups, 0)
            self.met[warpgroups] = before + 1
            self.changed.notify_all()
        wanted = (before // len(warpgroups) + 1) * len(warpgroups)
        self.wait(lambda: self.met[warpgroups] >= wanted, f"all of {warpgroups}")

    def ended(self, warpgroup: int) -> None:
        with self.changed:
            if warpgroup == self.first:
                self.first_waits = lambda: False
            self.changed.notify_all()


class Reference:
    """Memory: an array, or a part of one that may reach over its edge."""

    def __init__(self, array: np.ndarray, index: tuple[Any, ...] = ()):
        self.array, self.index = array, index

    @property
    def at(self) -> Any:
        return _At(self)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view().shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def view(self) -> np.ndarray:
        at = [self.place(axis, i) for axis, i in enumerate(self.index)]
        return self.array[tuple(at)]

    def place(self, axis: int, index: Any) -> Any:
        if isinstance(index, slice):
            return index
        if not isinstance(index, pl.Slice):
            return int(index)  # an array of no axes would make a copy
        if index.size == self.array.shape[axis] == 1:
            return slice(0, 1)  # such an axis is dropped from copies, and its start
        return slice(int(index.start), int(index.start) + index.size)

    def sizes(self) -> list[int]:
        """Sizes of the part, also where it reaches over the edge."""
        rest = self.array.shape[len(self.index) :]
        return [i.size for i in self.index if isinstance(i, pl.Slice)] + list(rest)

    def __getitem__(self, index: Any) -> Any:
        return self.view()[index].copy()  # registers keep it when memory changes

    def __setitem__(self, index: Any, value: Any) -> None:
        place = self.view()
        assert place[index].shape == np.shape(value)
        place[index] = value

    def transpose(self, axes: tuple[int, ...]) -> Reference:
        return Reference(self.view().transpose(axes))


class _At:
    def __init__(self, reference: Reference):
        self.reference = reference

    def __getitem__(self, index: Any) -> Reference:
        index = index if isinstance(index, tuple) else (index,)
        if self.reference.index:
            return Reference(self.reference.view(), index)
        return Reference(self.reference.array, index)


class Barriers:
    """mbarriers: complete after so many arrivals, again and again."""

    def __init__(self, count: int, arrivals: int):
        self.arrivals = arrivals
        self.missing = [arrivals] * count
        self.completed = [0] * count
        self.anyway = False
        """Whether it may be passed at any time, by a warpgroup that is then ahead of
        the others: to try what happens then."""

    @property
    def at(self) -> Any:
        return _BarrierAt(self)


class _BarrierAt:
    def __init__(self, barriers: Barriers):
        self.barriers = barriers

    def __getitem__(self, index: Any) -> tuple[Barriers, int]:
        return self.barriers, int(index)


def arrive_at_barrier(barrier: tuple[Barriers, int]) -> None:
    of, i = barrier
    with HERE.block.changed:
        of.missing[i] -= 1
        if of.missing[i] == 0:
            of.missing[i] = of.arrivals
            of.completed[i] += 1
        HERE.block.changed.notify_all()


def wait_for_barrier(barrier: tuple[Barriers, int]) -> None:
    of, i = barrier
    if of.anyway:
        HERE.block.first = HERE.warpgroup
        return
    key = id(of) * 64 + i
    before = HERE.waits.get(key, 0)
    HERE.block.wait(lambda: of.completed[i] > before, f"phase {before}")
    if of.completed[i] > before + 1:
        raise Stuck("a barrier completed twice before it was waited for")
    HERE.waits[key] = before + 1


COUNTED = threading.Condition()
"""Held while blocks count events, of which they wait for those of others."""


def count(cell: Reference) -> None:
    with COUNTED:
        cell[0] = cell[0] + 1
        COUNTED.notify_all()


def wait_for_count(cell: Reference, least: int) -> None:
    with COUNTED:
        if not COUNTED.wait_for(lambda: cell[0] >= least, PATIENCE_S):
            raise Stuck(f"a block waits for {least} others")
