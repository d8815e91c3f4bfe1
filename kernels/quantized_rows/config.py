"""Configs of programs of rows on Hopper: teams of warpgroups, and what fits."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from rewriter.kernels.norms.hopper_config import (
    BARRIERS,
    LANES,
    MORE,
    TOGETHER,
    Teams,
    rows_of,
)
from rewriter.kernels.shared.hopper import PROCESSORS, SHARED_MEMORY
from rewriter.ops.row_program import COLUMN, FULL, RowProgram

NUMBERS = 32
"""The most numbers of a row that a lane holds: a norm and its rows in registers."""

FOUR = 4
"""Warpgroups of a block."""


@dataclass(frozen=True)
class Rows:
    """The rows of a program.

    Attributes:
        program: The program.
        m: How many there are.
        d: Their columns.
    """

    program: RowProgram
    m: int
    d: int

    @property
    def dtype(self) -> str:
        """The widest dtype of rows that are streamed."""
        return max(self._full(), key=_item)

    @property
    def out(self) -> str:
        """The same: results are no wider, or are stored in two parts."""
        return self.dtype

    @property
    def sums(self) -> int:
        """How many sums of a row it computes."""
        return sum(step.joins for step in self.program.steps)

    def _full(self) -> list[str]:
        return [dtype for kind, dtype in self.program.inputs if kind == FULL]

    def shared_memory(self, config: Teams) -> int:
        """Returns the bytes of shared memory that a block takes."""
        rows = rows_of(self.m, config)
        ring = config.teams * config.stages * rows * self.d
        ring *= sum(map(_item, self._full()))
        kept = [t for kind, t in self.program.inputs if kind == COLUMN]
        sums = 4 * max(self.sums, 2) * rows * 4 * config.warpgroups * config.teams
        return ring + self.d * sum(map(_item, kept)) + sums + MORE


def _item(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize


def fits(config: Teams, rows: Rows) -> bool:
    """Returns whether a config can run."""
    return (
        rows.d % (LANES * config.warpgroups) == 0
        and config.teams * config.warpgroups <= TOGETHER
        and config.teams * config.stages <= BARRIERS
        and rows.shared_memory(config) <= SHARED_MEMORY
    )


def likely(rows: Rows, processors: int = PROCESSORS) -> list[Teams]:
    """Returns configs that fit, most promising first.

    Example:
        >>> from rewriter.ops.row_program import FULL, RowProgram
        >>> program = RowProgram(((FULL, "bfloat16"),), (), ())
        >>> likely(Rows(program, 8192, 4096))[0]
        Teams(rows=1, warpgroups=1, teams=4, stages=2, programs=132, tiled=False)
    """
    made = []
    able = [w for w in (1, 2, 4, 8) if rows.d % (w * LANES) == 0]
    enough = [w for w in able if rows.d <= w * LANES * NUMBERS] or able[-1:]
    for warpgroups in enough:
        for teams in range(max(1, FOUR // warpgroups), 0, -1):
            for stages in (2, 3):
                made.append(Teams(1, warpgroups, teams, stages, processors))
    return [c for c in made if fits(c, rows)]
