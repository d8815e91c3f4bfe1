"""Gated linear units of few rows and stored matrices: both branches in one launch.

A block of threads computes as many columns of either branch. Half of its warpgroups
take the numbers of the gate's matrix, the others those of the other one. So rows are
copied once for both. In the end sums of both branches are joined, and stored once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.quantized_dot.few_rows import totals
from rewriter.kernels.quantized_dot.few_rows.kernel import (
    PART,
    Block,
    Use,
    shared_memory,
)
from rewriter.kernels.shared import pallas_gpu

if TYPE_CHECKING:
    from jax import Array


@dataclass(frozen=True)
class Branch:
    """A branch of a unit.

    Attributes:
        matrix: The array that has its matrix, [k, columns].
        first: The first of its columns there.
        joined: Arrays [z, f] of `Use.steps`, a row for each z-th part of k.
        behind: Arrays float32 [f] of `Use.behind`.
    """

    matrix: Any
    first: int
    joined: Sequence[Any]
    behind: Sequence[Any]


def unit(
    name: str,
    lhs: Array,
    branches: tuple[Branch, Branch],
    f: int,
    activation: tuple[str, float],
    use: Use,
) -> Array:
    """Returns ``act(gate) · up`` of rows.

    Args:
        name: The name of the kernel in profiles.
        lhs: [m, k], bfloat16 or float16, m at most 64.
        branches: The gate, and the other branch, of arrays of the same shapes.
        f: Their columns.
        activation: The gate's, see `totals.join_branches`.
        use: How either is computed. Two warpgroups share a step.

    Returns:
        [m, f], of `Use.dtype`.
    """
    config, gate = use.config, branches[0]
    assert config.across == len(branches)
    arrays = [x for b in branches for x in (b.matrix, *b.joined, *b.behind)]
    counts = len(gate.joined), len(gate.behind)
    copies = len(branches) * counts[0]
    scratch = shared_memory(use, lhs, gate.matrix.dtype, gate.joined, copies)

    def body(lhs: Any, *references: Any, **shared: Any) -> None:
        *given, out = references
        each, joined = len(given) // 2, 1 + counts[0]
        own = [
            Branch(x[0], b.first, x[1:joined], x[joined:])
            for b, x in zip(branches, (given[:each], given[each:]), strict=True)
        ]
        _Unit(
            use, lhs, own[0].matrix, own[0].joined, own[0].behind, out, shared,
            branches=(own[0], own[1]), activation=activation,
        ).run()  # fmt: skip

    return pallas_gpu.kernel(
        body, name, [jax.ShapeDtypeStruct((lhs.shape[0], f), use.dtype)], scratch,
        f // (config.block_n // 2), config.computing + 1, config.splits, PART,
    )(lhs, *arrays)[0]  # fmt: skip


@dataclass(frozen=True)
class _Unit(Block):
    """The work of one block of threads of a unit."""

    branches: tuple[Branch, ...] = ()
    activation: tuple[str, float] = ("identity", 1.0)

    @property
    def half(self) -> int:
        """The block's columns of a branch."""
        return self.use.config.block_n // 2

    @property
    def column(self) -> Any:
        """The block's first column of each branch."""
        return pl.multiple_of(lax.axis_index(pallas_gpu.PROGRAM) * self.half, self.half)

    def source(self, tile: int) -> tuple[Any, Any]:
        """The matrix of a tile, and the tile's first column there."""
        which, at = divmod(tile * self.use.width, self.half)
        branch = self.branches[which]
        return branch.matrix, self.column + (branch.first + at)

    def copy_joined(self, row: Any, slot: Any, ready: Any) -> None:
        """Copies the parts of both branches' arrays that a step reads."""
        across = pl.ds(self.column, self.half)
        for which, branch in enumerate(self.branches):
            own = pl.ds(which * self.half, self.half)
            for values, place in zip(branch.joined, self.shared["joined"], strict=True):
                count = place.shape[1]
                plgpu.copy_gmem_to_smem(
                    self.groups_of(values, row, count, across),
                    place.at[slot, pl.ds(0, count), own],
                    ready,
                )

    def finish(self) -> None:
        """Joins both branches, and stores the block's part of the result."""
        across = pl.ds(self.column, self.half)
        behind = [[x.at[across] for x in b.behind] for b in self.branches]
        totals.join_branches(
            self.shared["partial"], self.out.at[:, across], behind,
            self.use.config, self.use.behind, self.activation,
        )  # fmt: skip
