"""How a Hopper GPU shares the numbers of a group norm among its blocks and lanes.

Channels that stand last are taken in rows of as many positions as fill the lanes::

    x  [samples, positions, channels]     a row: k positions · channels, one after the
       [samples, rows, k · channels]      other in memory, spread over a team's lanes

A lane keeps the sums of its columns for all rows of its team. The sums of columns of
the same channel are added up at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from rewriter.kernels.shared.hopper import PROCESSORS

LANES = 128
"""Lanes of a warpgroup."""

TOGETHER = 8
"""The most warpgroups that share a row."""

BLOCK = 4
"""Warpgroups of a block, if rows are so narrow that several teams fit into one."""

COLUMNS = 12
"""The most columns of a lane: three float32 sums of each are in registers."""

UNROLLED = 4
"""Rows whose loads are on their way at once."""

BYTES = 16
"""The most bytes that a lane loads at once."""


@dataclass(frozen=True)
class Work:
    """How sums over positions are computed.

    Attributes:
        samples: The number of samples.
        rows: Rows of a sample.
        width: Columns of a row.
        channels: Channels of a position.
        vector: Neighbouring columns that a lane loads at once.
        warpgroups: Warpgroups of a team, which share the columns of a row.
        teams: Teams of a block, each with rows of its own.
        blocks: Blocks of a sample.
    """

    samples: int
    rows: int
    width: int
    channels: int
    vector: int
    warpgroups: int
    teams: int
    blocks: int

    @property
    def steps(self) -> int:
        """Rows of a team."""
        return self.rows // (self.blocks * self.teams)

    @property
    def chunk(self) -> int:
        """Columns of a warpgroup that are loaded at once."""
        return LANES * self.vector

    @property
    def chunks(self) -> int:
        """Chunks of a warpgroup."""
        return self.width // (self.chunk * self.warpgroups)

    @property
    def out(self) -> int:
        """Columns of a result: one for each channel, or a few if they are not 128."""
        if self.channels >= LANES:
            return self.channels
        return math.lcm(self.channels, LANES)


def work_of(
    shape: Sequence[int], dtypes: Sequence[str], processors: int = PROCESSORS
) -> Work | None:
    """Returns how the sums of arrays [..., m, g, c, 1] are computed; None if not.

    Args:
        shape: The shape of x.
        dtypes: The dtypes of the arrays that are read.
        processors: Multiprocessors of the GPU.

    Example:
        >>> work = work_of((8, 64 * 64, 32, 10, 1), ["bfloat16"])
        >>> work.width, work.warpgroups, work.blocks, work.steps
        (5120, 5, 16, 16)
    """
    *lead, m, g, c, n = shape
    samples, channels = math.prod(lead), g * c
    if n != 1 or 0 in shape:
        return None
    vector = BYTES // max(jnp.dtype(t).itemsize for t in dtypes)
    while vector:
        width = math.lcm(channels, LANES * vector)
        together = _together(width, vector)
        if m % (width // channels) == 0 and together:
            rows = m // (width // channels)
            teams = math.gcd(max(1, BLOCK // together), rows)
            most = max(1, processors // samples)
            blocks = max(k for k in range(1, most + 1) if rows // teams % k == 0)
            return Work(samples, rows, width, channels, vector, together, teams, blocks)
        vector //= 2
    return None


def _together(width: int, vector: int) -> int:
    """The fewest warpgroups whose lanes can keep a row's sums; 0 if there are none."""
    chunks = width // (LANES * vector)
    fitting = (
        w
        for w in range(1, TOGETHER + 1)
        if chunks % w == 0 and chunks // w * vector <= COLUMNS
    )
    return next(fitting, 0)
