"""Configs of the decode kernel, and which of them fit into an SM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rewriter.kernels.attention.hopper.dtypes import parts
from rewriter.kernels.attention.weights import PARAM
from rewriter.kernels.shared.hopper import PROCESSORS, SHARED_MEMORY, processors
from rewriter.support.verdict import Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec

ROWS = 64
"""Rows that a tensor core multiplies at once: queries of all heads of a key head."""

REGISTERS = {2: (216, 40), 3: (120, 40)}
"""Registers per lane, by number of readers: for the warpgroup of each that computes,
and for the one that copies. Together they are not more than both start with. A single
reader gets as many as it asks for."""

OTHERS = 40
"""Registers per lane beside tiles: maxima, sums, addresses."""

AT_START = {1: 255, 2: 128, 3: 80}
"""By number of readers: registers per lane that all warpgroups start with. ptxas needs
room in them for a product and `OTHERS` (12.9: 94 for 128 columns, 158 for 256)."""

BESIDES = 30

MOST_STAGES = 32
"""The most stages: a group of barriers has no more."""

BARRIERS = 2 << 10
"""Bytes for barriers, log-sum-exps and alignment, at most."""


@dataclass(frozen=True)
class Split:
    """The config of the kernel.

    Attributes:
        block_kv: Keys of a block.
        stages: Blocks of k and of v that shared memory holds for each reader.
        readers: Readers of a block of threads: pairs of a warpgroup that copies and
            one that computes, each with keys of its own.
        programs: Blocks of threads.
    """

    block_kv: int = 64
    stages: int = 2
    readers: int = 2
    programs: int = PROCESSORS


def rows_of(t: int, group: int) -> int:
    """Returns the rows of a key head's queries, in eights, as they are copied."""
    return -(-t * group // 8) * 8


def default(spec: Spec, device: Device) -> Split:
    """Returns the default config: the first of `configs` that fits."""
    return next(c for c in configs(spec, device) if fits(c, spec, device).ok)


def configs(spec: Spec, device: Device) -> list[Split]:
    """Returns configs worth measuring, most promising first.

    Blocks of 128 keys and one reader make half as many pieces. On an H100, heads of 128
    then took 0.85 to 1.01 of the time, and heads of 64 1.01 to 1.08
    (``tests/bench/results/attention_in_place_h100.json``).
    """
    here, wide = processors(device), max(spec.shape(x)[3] for x in "qv") > 64
    first = [(128, 2, 1), (64, 2, 2)][:: 1 if wide else -1]
    return [
        Split(*sizes, here)
        for sizes in (
            *first, (32, 5, 2), (64, 5, 1), (32, 4, 2), (32, 3, 3),
            (64, 4, 2), (64, 3, 3), (128, 2, 2), (32, 8, 2), (64, 3, 1), (64, 2, 1),
            (32, 2, 2), (32, 2, 1), (16, 2, 1),
        )
    ]  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Sizes on which shared memory and registers depend.

    Attributes:
        rows: As `rows_of` gives them.
        h: Width of q and k.
        e: Width of v.
        masked: Whether there is a mask of keys.
        weights: The parts of a weight.
    """

    rows: int
    h: int
    e: int
    masked: bool = False
    weights: int = 1


def shared_memory(config: Split, sizes: Sizes) -> int:
    """Returns bytes of shared memory."""
    rows, h, e = sizes.rows, sizes.h, sizes.e
    blocks = config.readers * config.stages * config.block_kv * (h + e)
    queries = (ROWS + (QUERIES * config.readers - 1) * rows) * h
    stored = config.readers * STORED * ROWS * stored_columns(e)
    keys = config.readers * config.stages * mask_columns(config.block_kv)
    return 2 * (blocks + queries) + 4 * (stored + keys * sizes.masked) + BARRIERS


QUERIES = 2
"""Pieces whose queries shared memory holds for each reader."""

STORED = 2
"""Parts of a result that shared memory holds for each reader, on their way out."""


def stored_columns(e: int) -> int:
    """Returns the columns of a part of a float32 result: a row of 128 bytes, or 64."""
    return 16 if e % 32 else 32


def mask_columns(block: int) -> int:
    """Returns the float32 numbers of a mask in a block: a multiple of 128 bytes.

    Copies into shared memory begin at multiples of 128 bytes.
    """
    return -(-block // 32) * 32


def fits(config: Split, spec: Spec, device: Device) -> Verdict:
    """Returns whether a config can run: shared memory, registers, block sizes."""
    del device
    b, t, n, h = spec.shape("q")
    del b
    heads, e = spec.shape("k")[2], spec.shape("v")[3]
    rows, count = rows_of(t, n // heads), parts(spec.param(PARAM))
    return fits_sizes(config, Sizes(rows, h, e, spec.has("mask"), count))


def fits_sizes(config: Split, sizes: Sizes) -> Verdict:
    """Returns the same for some sizes."""
    found = []
    block = config.block_kv
    if block % 16 or not 16 <= block <= 256:
        found.append(no("block_kv", f"{block} is not a multiple of 16 to 256"))
    if config.stages < 2:
        found.append(no("stages", f"{config.stages} stages, fewer than 2"))
    if (count := config.stages * config.readers) > MOST_STAGES:
        found.append(no("stages", f"{count} stages of all readers, of {MOST_STAGES}"))
    if not 1 <= config.readers <= 3:
        found.append(no("readers", f"{config.readers} readers, not 1, 2 or 3"))
        return all_of(*found)
    if (size := shared_memory(config, sizes)) > SHARED_MEMORY:
        text = f"{size >> 10} KiB of shared memory of {SHARED_MEMORY >> 10} KiB"
        found.append(no("shared_memory", text))
    # An accumulator of 64 rows has half a register of float32 per column and lane.
    most = REGISTERS.get(config.readers, (240,))[0] - OTHERS
    # Parts of weights of 16 bits have a quarter. So have a mask's numbers, read before.
    # With these too, ptxas 13.0 spilled nothing at the edges of this rule.
    if (used := block // 2 + sizes.weights * block // 4 + sizes.e // 2) > most:
        found.append(no("registers", f"{used} registers for tiles, of {most}"))
    start = AT_START[config.readers] - BESIDES
    if (used := max(block, sizes.e) // 2) > start:
        found.append(no("registers", f"{used} registers for a product, of {start}"))
    return all_of(*found)
