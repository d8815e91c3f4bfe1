"""Proves that the ids of rows depend on the distance of two positions alone.

    ids[i, j] = f(j - i)        biases of buckets: f gives the bucket of a distance

Rows of one distance can then be added up before any id is read. The proof follows the
program's equations as the machine computes them: positions are whole numbers, which are
added and subtracted exactly, and everything else is computed from their difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from rewriter.algebra.canonicalize import Evaluator
from rewriter.algebra.normal_form import Index, OverBudget
from rewriter.algebra.normal_form.forms import TooMuchWork
from rewriter.ops.score import ELEMENTWISE, NAMED
from rewriter.program.graph import Node

EXACT = 1 << 23
"""Positions below it are exact in float32, and so are their differences."""

COMPARISONS = frozenset({"eq", "ge", "gt", "le", "lt", "ne"})

STEPS = 200
"""The most equations that a proof follows."""


@dataclass(frozen=True)
class Position:
    """``of_query * i + of_key * j``, and an integer that is the same everywhere.

    Those whose coefficients add up to 0 depend on the distance ``j - i`` alone.

    Attributes:
        of_query: The coefficient of a query's number.
        of_key: The coefficient of a key's number.
        moved: Whether there is such an integer. It may be of any size.
    """

    of_query: int = 0
    of_key: int = 0
    moved: bool = False

    @property
    def is_of_distance(self) -> bool:
        """Whether it depends on the distance alone, or on nothing."""
        return self.of_query + self.of_key == 0


SAME = Position()
DISTANCE = Position(-1, 1)
"""Stands for all that is computed from the distance."""


def keys_of_distances(
    ev: Evaluator, node: Node, rows: Sequence[tuple[int, int]], column: int
) -> int:
    """Returns the size of the last axis of rows if their ids are those of distances.

    Else, and where rows have other than two axes, it returns 0.

    Args:
        ev: An evaluator that can look through layouts of the ids.
        node: A scatter-add.
        rows: Axes of ids and of rows, as in `RowAxes`.
        column: The column of the ids.
    """
    alg, ids = ev.alg, node.ins[1]
    sizes = ev.g.shape(ids)[:-1]
    if tuple(k for k, _ in rows) != (0, 1) or len(sizes) != 2:
        return 0
    if not all(isinstance(n, int) and 1 < n < EXACT for n in sizes):
        return 0
    query, key = (alg.new_index(n) for n in sizes)
    at = (query, key, alg.affine(None, 1, column))
    found = _Proof(ev, query, key).of(ids, at)
    return sizes[1] if found is not None and found.is_of_distance else 0


@dataclass
class _Proof:
    """What is known of values at one query and one key."""

    ev: Evaluator
    query: int
    key: int
    known: dict[tuple[int, tuple[Index, ...]], Position | None] = field(
        default_factory=dict
    )

    def of(self, value: int, at: tuple[Index, ...]) -> Position | None:
        """Returns how a value depends on both positions; None if that is not known."""
        ids = set().union(*(self.ev.alg.index_ids(a) for a in at))
        if not ids & {self.query, self.key}:
            return SAME
        place = value, at
        if place not in self.known:
            self.known[place] = None  # not asked twice on the way
            if len(self.known) <= STEPS:
                self.known[place] = self._of(value, at)
        return self.known[place]

    def _of(self, value: int, at: tuple[Index, ...]) -> Position | None:
        ev, node = self.ev, self.ev.g.node_of(value)
        if node is None:
            return self._of_constant(value, at)
        try:
            moved = ev.moved(node, value, at)
        except TooMuchWork:
            raise
        except OverBudget:
            return None
        if moved is not None:
            source, there = moved
            return None if source is None else self.of(source, there)
        if node.prim == "iota":
            return self._counted(node, at)
        if node.prim not in ELEMENTWISE and node.prim not in NAMED:
            return None
        shapes = [ev.g.shape(x) for x in node.ins]
        found = [
            self.of(x, at if shape else ())
            for x, shape in zip(node.ins, shapes, strict=True)
        ]
        known = [x for x in found if x is not None]
        if len(known) < len(found):
            return None
        if all(x.is_of_distance for x in known):
            return SAME if all(x == SAME for x in known) else DISTANCE
        return self._combined(node, known)

    def _of_constant(self, value: int, at: tuple[Index, ...]) -> Position | None:
        """An array of numbers that the program has, such as one made by NumPy."""
        if at != (self.query, self.key) or value not in self.ev.g.constants:
            return None
        x = np.asarray(self.ev.g.constants[value])
        return DISTANCE if np.array_equal(x[1:, 1:], x[:-1, :-1]) else None

    def _counted(self, node: Node, at: tuple[Index, ...]) -> Position | None:
        """A position that an equation counts."""
        arg = at[int(node.params["dimension"])]
        if not _is_exact(self.ev.g.dtype(node.outs[0])):
            return None
        return {self.query: Position(1, 0), self.key: Position(0, 1)}.get(arg)

    def _combined(self, node: Node, found: list[Position]) -> Position | None:
        """What an exact equation makes of positions."""
        dtype = self.ev.g.dtype(node.outs[0])
        first, *rest = found
        if node.prim in COMPARISONS and not any(x.moved for x in found):
            apart = _sum(first, -1, rest[0]) if SAME not in found else None
            return DISTANCE if apart is not None and apart.is_of_distance else None
        if not _is_exact(dtype):
            return None
        if node.prim == "convert_element_type":
            exact = _is_exact(self.ev.g.dtype(node.ins[0])) and not first.moved
            return first if exact else None
        if node.prim in ("copy", "stop_gradient"):
            return first
        sign = {"add": 1, "sub": -1, "neg": -1}.get(node.prim)
        if sign is None:
            return None
        if jnp.issubdtype(dtype, jnp.floating) and any(
            x == SAME or x.moved for x in found
        ):
            return None  # what is the same everywhere may be no whole number
        if not rest:
            first, rest = SAME, [first]
        return _sum(first, sign, rest[0])


def _sum(one: Position, sign: int, other: Position) -> Position | None:
    """A sum or difference, if its coefficients are so small that it stays exact."""
    of_query = one.of_query + sign * other.of_query
    of_key = one.of_key + sign * other.of_key
    if max(abs(of_query), abs(of_key)) > 1:
        return None
    same = SAME in (one, other)
    return Position(of_query, of_key, same or one.moved or other.moved)


def _is_exact(dtype: np.dtype) -> bool:
    """Whether sums of two positions are exact in a dtype."""
    return dtype in (jnp.int32, jnp.int64, jnp.float32, jnp.float64)
