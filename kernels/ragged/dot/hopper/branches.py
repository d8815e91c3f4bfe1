"""The matrices that rows are multiplied by: their place in shared memory and in sums.

One matrix per group makes one branch. Several branches lie side by side in a tile, so
that one product of a tile of rows computes all: a gated linear unit has two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from rewriter.kernels.ragged.dot.hopper.config import Tiles
from rewriter.kernels.shared import pallas_gpu

WIDE = 64
"""Columns of a piece of a tile of several branches: a row of 128 bytes."""


@dataclass(frozen=True)
class Branch:
    """Some columns of a matrix per group: arrays, or references to them.

    Attributes:
        matrices: [g, k, n or more]; [g, n, k] if transposed.
        first: The first of its columns, a multiple of 64.
        bias: float32 [n], added to each row of the product.
        scale: float32 [g, n], multiplied with each row of the product before the bias.
        within: Floats [z, n] each, joined to the matrix while it is widened: a row for
            each z-th part of the summed axis. [g, n] if `of_groups`.
        of_groups: Whether `within` has a row for each group.
        split: Whether groups are parts of the summed axis of one matrix, in order:
            matrices are then [1, k, n], and rows [m, k / g].
    """

    matrices: Any
    first: int = 0
    bias: Any = None
    scale: Any = None
    within: tuple[Any, ...] = ()
    of_groups: bool = False
    split: bool = False

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All arrays, or references to them."""
        return self.matrices, self.bias, self.scale, self.within

    def of(self, arrays: tuple[Any, ...]) -> Branch:
        """Returns the branch with other arrays, in the order of `arrays`."""
        matrices, bias, scale, within = arrays
        return replace(self, matrices=matrices, bias=bias, scale=scale, within=within)


@dataclass(frozen=True)
class Along:
    """Values that a result joins to the rows or columns of a product.

    Attributes:
        values: Floats [n], or [m] padded to whole tiles: an array, or a reference.
        rows: Whether there is one for each row.
    """

    values: Any
    rows: bool

    def block(self, row: Any, column: Any, shape: tuple[int, int]) -> Any:
        """Returns the values for a block of a result: float32 of that shape.

        Args:
            row: The block's first row.
            column: Its first column.
            shape: [64, columns].
        """
        if self.rows:
            return pallas_gpu.column(self.values, row, shape)
        return pallas_gpu.row(self.values, column, shape)


@dataclass(frozen=True)
class Blocks:
    """Values that are joined to the product of each part of the summed axis.

    Attributes:
        values: Floats [parts, m or n], or [parts, n / 128 or fewer] for whole tiles of
            columns: an array, or a reference.
        kind: ``"rows"``, ``"columns"``, or ``"tiles"``.
        wide: The columns of a tile, for ``"tiles"``.
    """

    values: Any
    kind: str
    wide: int = 1

    def block(self, part: Any, row: Any, column: Any, shape: tuple[int, int]) -> Any:
        """Returns the values for a block of a part's product.

        Args:
            part: The index of the part.
            row: The block's first row.
            column: Its first column.
            shape: [64 a, columns].
        """
        part = part if self.values.shape[0] > 1 else 0
        if self.kind == "tiles":
            last = self.values.shape[1] - 1
            return self.values[part, jnp.minimum(lax.div(column, self.wide), last)]
        if self.kind == "rows":
            return pallas_gpu.column(self.values.at[part], row, shape)
        return pallas_gpu.row(self.values.at[part], column, shape)


@dataclass(frozen=True)
class Inside:
    """What is done to the product of each part of the summed axis.

    Attributes:
        result: A function of a block of the product, in the dtype of sums, and of
            blocks of `joined`. It returns float32.
        joined: What is joined to it.
    """

    result: Callable[..., Any]
    joined: tuple[Blocks, ...]

    def of(self, arrays: Sequence[Any]) -> Inside:
        """Returns the same with other values."""
        pairs = zip(self.joined, arrays, strict=True)
        return replace(self, joined=tuple(replace(j, values=x) for j, x in pairs))


@dataclass(frozen=True)
class Piece:
    """The part of a step's matrices that one copy brings.

    Attributes:
        branch: The index of its branch.
        place: Its place in a stage of shared memory.
        column: Its first column in the tile of that branch.
        columns: How many it has.
    """

    branch: int
    place: tuple[int, ...]
    column: int
    columns: int


def pieces(config: Tiles, branches: int) -> list[Piece]:
    """Returns the copies of a step: each part whole, or 64 columns at a time.

    Args:
        config: The tiles.
        branches: The number of branches that share a tile's columns.

    Example:
        >>> [(p.branch, p.place, p.column) for p in pieces(Tiles(), 2)]
        [(0, (0, 0), 0), (0, (0, 1), 64), (1, (0, 2), 0), (1, (0, 3), 64)]
    """
    parts, columns = config.parts, config.columns
    if branches == 1:
        return [Piece(0, (i,), i * columns, columns) for i in range(parts)]
    own = columns // branches
    return [
        Piece(j // own, (i, j // WIDE), i * own + j % own, WIDE)
        for i in range(parts)
        for j in range(0, columns, WIDE)
    ]


@dataclass(frozen=True)
class Side:
    """Copies of matrices into shared memory, in the layout of tensor cores.

    Attributes:
        scratch: Shared memory for it.
        copied: The part of it that copies fill: [stages, *place, ...].
        taken: ``taken(memory, slot, part, i, within)`` gives a warpgroup's part of the
            i-th step of a tile, [*place, ...], once its copies have come. `within`
            holds, by branch, the rows of its columns of `Branch.within`.
    """

    scratch: Any
    copied: Callable[[Any], Any]
    taken: Callable[[Any, Any, Any, Any, Any], Any]


def side(
    config: Tiles, branches: int, transposed: bool, stored: Any, dtype: Any
) -> Side:
    """Returns the `Side` of matrices that tensor cores read as they are stored.

    Args:
        config: The tiles.
        branches: The number of branches that share a tile's columns.
        transposed: Whether the last axis of the matrices is summed.
        stored: Their dtype.
        dtype: That of the rows, the same; 8-bit floats may be of two kinds.
    """
    made = config.stages, config.parts, *part(config, branches, transposed, dtype)
    return Side(
        pallas_gpu.tiles(made, stored),
        lambda memory: memory,
        lambda memory, slot, part, i, within: memory.at[slot, part],
    )


def part(config: Tiles, branches: int, transposed: bool, dtype: Any) -> tuple[int, ...]:
    """Returns the shape of a warpgroup's part of a step, for products of a dtype."""
    step = pallas_gpu.columns(dtype)
    if branches > 1:
        return config.columns // WIDE, step, WIDE
    return (config.columns, step) if transposed else (step, config.columns)


def blocks(
    sums: Any,
    branches: Sequence[Branch],
    row: int,
    column: int,
    wide: int,
    first: Any,
    group: Any,
) -> Iterator[Any]:
    """Yields a block of 64 rows of each branch, with its scale and bias.

    Args:
        sums: float32 [rows, columns of all branches], in registers.
        branches: The branches, with references as biases and scales.
        row: The block's first row.
        column: Its first column in a branch.
        wide: Its columns.
        first: The column of the result where a branch's columns begin.
        group: The rows' group.
    """
    own = sums.shape[1] // len(branches)
    for i, branch in enumerate(branches):
        start = i * own + column
        block = sums[row : row + 64, start : start + wide]
        if branch.scale is not None:
            scale = branch.scale.at[group]
            block = block * pallas_gpu.row(scale, first + column, block.shape)
        if branch.bias is not None:
            block = block + pallas_gpu.row(branch.bias, first + column, block.shape)
        yield block
