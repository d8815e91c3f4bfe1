"""What the kernels of gradients know while they are traced."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rewriter.kernels.attention.hopper import pallas, panels
from rewriter.kernels.attention.hopper.averaged_rows import Averages
from rewriter.kernels.attention.hopper.blocks import Mask, blocks_of
from rewriter.kernels.attention.hopper.order import Order
from rewriter.kernels.attention.hopper.terms import Terms
from rewriter.kernels.shared import work_stealing

if TYPE_CHECKING:
    from rewriter.ops.kernel import Heads


class Seen(enum.Enum):
    """What the rows of a tile see of a block."""

    ALL = enum.auto()
    SOME = enum.auto()
    """The visible range of some row may end within it."""
    ALIKE = enum.auto()
    """Rows without keys weigh all of it alike. No other row counts."""


@dataclass(frozen=True)
class Problem:
    """The problem as known while tracing.

    Attributes:
        mask: The mask between rows of a tile and columns of a block: queries and keys
            for dq, keys and queries for dk and dv.
        block: Columns of a block.
        heads: Heads of the arrays in tiles.
        group: Query heads that a tile of keys meets in turn; 1 for dq.
        shared: Heads in tiles of a key head: its query heads, or its parts for dk and
            dv.
        values: Blocks of the second streamed array in shared memory; `stages` is for
            the first.
        divided: Whether the warpgroups share 64 rows; see `Divided`.
        claimed: Whether blocks of threads claim tiles.
        by_rows: Whether arrays are copied by rows; see `panels`.
        packed: The heads of operands in the arrays that are read.
        joined: The heads of cotangents in the array that holds them.
        averages: How rows without keys weigh keys, if they pass something back.
        halves: Whether operands are float32, in two parts.
        ahead: Tiles whose resident arrays shared memory holds.
        chosen: The fill that a program chooses for hidden keys, which rows may weigh.
    """

    b: int
    heads: int
    group: int
    shared: int
    h: int
    e: int
    mask: Mask
    scale: float
    softcap: float | None
    block: int
    stages: int
    warpgroups: int
    programs: int
    terms: Terms
    values: int
    divided: bool = False
    claimed: bool = False
    by_rows: bool = False
    packed: tuple[tuple[str, Heads], ...] = ()
    joined: tuple[tuple[str, Heads], ...] = ()
    averages: Averages | None = None
    halves: bool = False
    ahead: int = 1
    chosen: float | None = None

    @property
    def tiles(self) -> Callable[..., Any]:
        """Makes shared memory of tiles."""
        return panels.panels if self.by_rows else pallas.tiles

    @property
    def copies(self) -> tuple[int, int]:
        """The copies that bring rows of width h, and of width e."""
        h, e = (
            panels.copies(x, pallas.swizzle(x, self.block), self.by_rows, self.halves)
            for x in (self.h, self.e)
        )
        return h, e

    @property
    def changes(self) -> int:
        """The products that make changes of weights: one for each panel, or three."""
        return self.copies[1] // 2 * 3 if self.halves else self.copies[1]

    @property
    def piece(self) -> int:
        """Columns of a result in float32 that are written at a time."""
        return 16 if self.h % 32 or self.e % 32 else 32

    @property
    def parts(self) -> int:
        """The number of 64-row parts of a tile."""
        return 1 if self.divided else self.warpgroups

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 64 * self.parts

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of numbers of queries."""
        return ("lse", "delta", "rest") if self.terms.unbounded else ("lse", "delta")

    @functools.cached_property
    def order(self) -> Order:
        """The order in which tiles are taken."""
        tiles = range(0, self.mask.t, self.rows)
        ranges = [
            blocks_of(self.mask, i, self.rows, self.block, self.mask.shift)
            for i in tiles
        ]
        return Order(
            pairs=self.b * self.heads,
            bytes_of_pair=max(
                1,
                2
                * (1 + self.halves)
                * self.mask.s
                * (self.h + self.e)
                * self.group
                // self.shared,
            ),
            programs=self.programs,
            work=tuple(
                self.group * (1 if self.terms.compares else r.count) for r in ranges
            ),
            claims=self.claimed and work_stealing.AVAILABLE,
        )
