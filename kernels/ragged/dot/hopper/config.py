"""Configs of the Hopper kernels, which fit into an SM, and what the kernels support."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rewriter.kernels.shared.hopper import PROCESSORS, SHARED_MEMORY
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec

KIB = 1 << 10
"""The most bytes of messages about tiles between warpgroups."""

BARRIERS = KIB
"""Bytes for barriers."""

STEP = 64
"""The extent of one product along the summed axis: a row of 128 bytes."""

WARPGROUPS = 2
"""Warpgroups that compute; one more copies."""

REGISTERS = (232, 40)
"""Registers per lane for those that compute, and for the one that copies. All lanes of
an SM have 512 x 128."""

STORED = 64 * 128
"""Bytes that a warpgroup stores at once: 64 rows of 128 bytes."""


@dataclass(frozen=True)
class Tiles:
    """The config of both passes.

    Attributes:
        block_m: Rows of a tile of the result; if rows are summed, the columns of lhs in
            a tile. Two warpgroups share 128 and 256 of them, and the columns of a tile
            of 64.
        block_n: Columns of a tile.
        stages: Parts of both operands, `STEP` deep, that shared memory holds.
        width: Rows of tiles that are computed together, column by column.
        behind: Whether a product may still run while the next one is prepared.
        apart: Whether each warpgroup has tiles of its own, so that one stores while
            the other multiplies.
        programs: Blocks of threads, which take one tile after the other.
        claimed: Whether blocks claim tiles from a work queue instead of taking every
            n-th: tiles of few rows take less time. From jax 0.11 on, not without
            groups, and for products of groups only with many rows.
    """

    block_m: int = 128
    block_n: int = 256
    stages: int = 4
    width: int = 8
    behind: bool = True
    apart: bool = False
    programs: int = PROCESSORS
    claimed: bool = True

    @property
    def by_columns(self) -> bool:
        """Whether the warpgroups share the columns of a tile, not its rows."""
        return self.block_m == 64 and not self.apart

    @property
    def sharing(self) -> int:
        """Warpgroups that share a tile."""
        return 1 if self.apart else WARPGROUPS

    @property
    def owners(self) -> int:
        """The number of sets of barriers: one, or one for each warpgroup.

        A warpgroup must wait for every completion of its barriers, so it cannot share
        them with the other one's tiles.
        """
        return WARPGROUPS // self.sharing

    @property
    def rows(self) -> int:
        """Rows of a warpgroup's part of a tile."""
        return self.block_m if self.by_columns else self.block_m // self.sharing

    @property
    def columns(self) -> int:
        """Columns of a warpgroup's part of a tile."""
        return self.block_n // self.sharing if self.by_columns else self.block_n

    @property
    def parts(self) -> int:
        """Parts of a tile's columns, one for each warpgroup that shares them."""
        return self.sharing if self.by_columns else 1

    @property
    def chunks(self) -> dict[str, tuple[int, int]]:
        """Warpgroups' parts of lhs and rhs, and 64 columns each of such a part.

        It is for summed rows; a part that both warpgroups need occurs once.
        """
        left, right = self.rows // 64, self.columns // 64
        if self.by_columns:
            return {"left": (1, left), "right": (self.sharing, right)}
        return {"left": (self.sharing, left), "right": (1, right)}

    def places(self, name: str) -> list[tuple[int, int]]:
        """Returns the places of 64 columns of ``"left"`` or ``"right"``, in order."""
        parts, each = self.chunks[name]
        return [(i, j) for i in range(parts) for j in range(each)]

    @property
    def copies(self) -> int:
        """The number of copies of 64 columns in a step, if rows are summed."""
        return (self.block_m + self.block_n) // 64

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory for 16-bit operands."""
        operands = 2 * STEP * self.stages * (self.block_m + self.block_n)
        claims = KIB if self.claimed else 0
        return operands + 2 * WARPGROUPS * STORED + BARRIERS + claims

    @property
    def registers(self) -> int:
        """Registers per lane for sums."""
        return self.rows * self.columns // 128


def default(spec: Spec, device: Device) -> Tiles:
    """Returns the default config, by rows of a group.

    On an H200, 256 2048 1536 128 (m, k, n, g): 64 x 256 152 us, 128 x 256 164 us. From
    256 rows a group on, 128 x 256 was the fastest or within 2 % of it.

    Claiming tiles of 128 rows took 0.95 to 0.97 of the time of taking turns. It took
    0.77 for 131072 7168 1024 256, and 0.86 for 131072 4096 1536 128. Tiles of 64 rows
    are alike: claiming them took 1.06 for 256 rows a group and 0.96 for two.
    """
    del device
    if _mean(spec) <= 32 and spec.param("mode") != "contracting":
        return Tiles(64, 256)
    return Tiles()


def configs(spec: Spec, device: Device) -> list[Tiles]:
    """Returns configs worth measuring, most promising first.

    None has `apart`: such configs were tested on an H200, but not timed.
    """
    del device
    made = [Tiles(width=4), Tiles(width=16), Tiles(256, 128)]
    if _mean(spec) <= 512 and spec.param("mode") != "contracting":
        made += [Tiles(128, 192), Tiles(64, 256, claimed=False), Tiles(64, 128, 6)]
    return made


def _mean(spec: Spec) -> int:
    return spec.shape("lhs")[0] // spec.shape("group_sizes")[0]


def fits(config: Tiles, spec: Spec, device: Device) -> Verdict:
    """Returns whether a config can run: shared memory, registers, block sizes."""
    del spec, device
    found = [YES]
    if config.block_m not in (64, 128, 256):
        found.append(no("block_m", f"{config.block_m} is not 64, 128 or 256"))
    if config.block_n % 64 or not 64 <= config.columns <= 256:
        text = f"{config.columns} columns a warpgroup, not 64 to 256 by 64"
        found.append(no("block_n", text))
    if config.stages < 2:
        found.append(no("stages", f"{config.stages} stages, fewer than 2"))
    if config.registers > 128:
        found.append(no("registers", f"{config.registers} for sums, of at most 128"))
    if (size := config.shared_memory) > SHARED_MEMORY:
        text = f"{size >> 10} KiB of shared memory of {SHARED_MEMORY >> 10} KiB"
        found.append(no("shared_memory", text))
    return all_of(*found)
