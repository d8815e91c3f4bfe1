"""Configs of the kernel for latent caches, and which of them fit into an SM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rewriter.kernels.shared.hopper import PROCESSORS, SHARED_MEMORY, processors
from rewriter.support.verdict import Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec

ROWS = 64
"""Query rows of a block of threads: the rows of a product of tensor cores."""

KEYS = 64
"""Keys of a block. Weights [64, 64] then fit where 64 rotary columns were."""

TILES = 2
"""Blocks of keys in shared memory: one for each warpgroup that computes."""

REGISTERS = (240, 24)
"""Registers per lane: of the two warpgroups that compute, and of the copying one."""

BARRIERS = 3 << 10
"""Bytes for barriers, maxima, sums and alignment, at most."""

FEWEST = 0.93
"""The share of readers that may be used so that sequences are not cut."""


@dataclass(frozen=True)
class Programs:
    """The config of the kernel.

    Attributes:
        programs: Blocks of threads.
    """

    programs: int = PROCESSORS

    def readers(self, b: int, groups: int) -> int:
        """Returns how many readers share the cache; each is a block for each group.

        A sequence that one reader reads whole has one piece. So fewer readers are
        better where they divide the sequences, or sequences divide them.

        Args:
            b: Sequences.
            groups: Groups of `ROWS` query rows.

        Example:
            >>> [Programs(132).readers(b, 2) for b in (1, 64, 100, 128)]
            [66, 64, 66, 64]
        """
        most = max(1, self.programs // groups)
        for readers in range(most, int(FEWEST * most), -1):
            if readers % b == 0 or b % readers == 0:
                return readers
        return most


def groups_of(t: int, n: int) -> int:
    """Returns the groups of `ROWS` query rows of a sequence."""
    return -(-t * n // ROWS)


def shared_memory(c: int, r: int) -> int:
    """Returns bytes of shared memory.

    Args:
        c: Width of the latent.
        r: Width of the rotary keys.
    """
    weights = 0 if r == KEYS else TILES * ROWS * KEYS
    return 2 * ((ROWS + TILES * KEYS) * (c + r) + weights) + BARRIERS


def default(spec: Spec, device: Device) -> Programs:
    """Returns the default config."""
    return configs(spec, device)[0]


def configs(spec: Spec, device: Device) -> list[Programs]:
    """Returns configs worth measuring, most promising first."""
    del spec
    return [Programs(processors(device))]


def fits(config: Programs, spec: Spec, device: Device) -> Verdict:
    """Returns whether a config can run."""
    del spec, device
    if config.programs < 1:
        return no("programs", f"{config.programs} blocks of threads, not 1 or more")
    return all_of()


def fits_widths(c: int, r: int) -> Verdict:
    """Returns whether the widths of a cache fit: products, and shared memory."""
    found = []
    if c % 128 or not 128 <= c <= 512:
        found.append(no("width", f"a latent of {c} columns, not 128, 256, 384 or 512"))
    if r % 16:
        found.append(no("width", f"{r} rotary columns, not a multiple of 16"))
    if (size := shared_memory(c, r)) > SHARED_MEMORY:
        text = f"{size >> 10} KiB of shared memory of {SHARED_MEMORY >> 10} KiB"
        found.append(no("shared_memory", text))
    return all_of(*found)
