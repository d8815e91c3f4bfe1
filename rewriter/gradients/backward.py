"""The gradients found for a match: which values of the program they are."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, eq=False)
class Backward:
    """Gradients found for a match.

    Attributes:
        cotangent: The value that is the cotangent of the match's result. Its dtype may
            be a wider one: a program may cast the result, and add up the cotangents of
            the casts.
        grads: Leaf (a value of the program) to the value that is its gradient.
        inner: Values between the leaves, the cotangent and the gradients.
        zeros: By leaf, further terms that become zero. They exist where its gradient is
            only a sum of terms; the term in `grads` becomes the whole gradient.
        unread: Leaves that no gradient depends on, such as a norm's bias. A checkpoint
            does not save them for its recomputation.
        pieces: Values that become zero where the program joins them to those of other
            ops. Then a gradient in `shared` is left with the share of the others.
        shared: Values in `grads` to which the gradient is added, where the program
            computes the sum of the gradient and of a share of other ops.
        by_value: Whether this is proved for the cotangent's own numbers, and not for
            any cotangent.
    """

    cotangent: int
    grads: Mapping[int, int]
    inner: frozenset[int]
    zeros: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    unread: frozenset[int] = frozenset()
    pieces: tuple[int, ...] = ()
    shared: frozenset[int] = frozenset()
    by_value: bool = False

    @property
    def others(self) -> tuple[int, ...]:
        """All values that become zero."""
        return (*itertools.chain.from_iterable(self.zeros.values()), *self.pieces)

    @property
    def results(self) -> tuple[int, ...]:
        """All values that are replaced."""
        return (*self.grads.values(), *self.others)
