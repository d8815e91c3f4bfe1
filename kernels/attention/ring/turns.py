"""Finds the turns in which devices see keys, from the window and sizes of parts.

Devices stand in a ring, each with as many queries as keys. In turn d a device has the
keys of the device d places before it. Keys of a device further along the sequence have
come around the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from rewriter.kernels.attention.visibility import Visibility

Window = tuple[int | None, int | None]


@dataclass(frozen=True)
class Seen:
    """The keys of one part that queries of another see, as the op's parameters.

    Attributes:
        window: The op's window; without limits if all pairs are seen.
        shift: The op's shift, as from the first query to the first key; 0 without
            a window.
    """

    window: Window
    shift: int


@dataclass(frozen=True)
class Turn:
    """One turn: the visible keys of the device some places before.

    Attributes:
        distance: How many places.
        before: The view of devices whose queries come after these keys; None for
            nothing.
        around: The view of the first `distance` devices, to which the keys came around
            the end; None for nothing.
    """

    distance: int
    before: Seen | None
    around: Seen | None


def turns(window: Window, shift: int, size: int, count: int) -> tuple[Turn, ...]:
    """Returns the turns in which some device sees a key, own keys first.

    Args:
        window: The op's window.
        shift: The op's shift.
        size: Queries of a part, and keys if there is a window.
        count: The number of parts.

    Example:
        >>> for turn in turns((None, 0), 0, 4, 3):  # causal
        ...     print(turn.distance, turn.before, turn.around)
        0 Seen(window=(None, 0), shift=0) None
        1 Seen(window=(None, None), shift=0) None
        2 Seen(window=(None, None), shift=0) None
        >>> [turn.distance for turn in turns((5, 0), 0, 4, 8)]
        [0, 1, 2]
    """
    found = [Turn(0, seen(window, shift, size), None)]
    for distance in range(1, count):
        before = seen(window, shift + distance * size, size)
        around = seen(window, shift + (distance - count) * size, size)
        if before or around:
            found.append(Turn(distance, before, around))
    return tuple(found)


def seen(window: Window, shift: int, size: int) -> Seen | None:
    """Returns the view of as many queries as keys; None if they see nothing."""
    limits = Visibility(size, size, *window, shift).limits()
    if limits is None:
        return None
    return Seen(limits, 0 if limits == (None, None) else shift)
