"""Tiles of the kernel of few rows: what fits, and which are worth measuring."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rewriter.kernels.shared.hopper import (
    BUSY,
    SHARED_MEMORY,
    processors,
    with_stages,
)
from rewriter.ops.cost import FOUR_BITS
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec

MOST = 64
"""The most rows: from there on, widening once for 128 rows is faster."""

FEW = 32
"""The most rows for tensor cores of warps, each of which loads them for itself."""

ONE_TILE = 8
"""Rows that warps' tensor cores multiply at once, faster than those of warpgroups."""

IN_FOUR, ALONE = 16, ("int8", 128, 1)
"""The most rows for which four warpgroups in turns, by warps, are faster, and the
matrix, columns and blocks for which they were measured."""

WIDTHS = 128, 256, 512
"""Columns of a block. Four bits of 512 lie in as many bytes as eight bits of 256."""

DEEP = 32 << 10, 8
"""Bytes of the matrix that a step of one tile of rows should have, and the fewest steps
of a block for which that was measured."""

CHUNK = 64
"""What tensor cores take of the summed axis at once: rows of 128 bytes."""

LINE_BYTES = 16
"""The fewest bytes of a line of a copy."""

CLUSTER = 8
"""The most blocks that can read each other's shared memory on every Hopper GPU."""

BARRIERS = 1 << 10
"""Bytes for barriers."""


@dataclass(frozen=True)
class Tiles:
    """The config.

    Attributes:
        block_n: Columns of a block, 128, 256 or 512.
        depth: Rows of the matrix of a step.
        stages: Steps that shared memory holds, a multiple of `turns`.
        turns: Warpgroups that take steps in turns.
        across: Warpgroups that share a step, each with columns of its own.
        splits: Blocks that share columns, each with a part of the summed axis.
        by_warps: Whether tensor cores of warps multiply, and not those of warpgroups.
    """

    block_n: int = 128
    depth: int = 128
    stages: int = 4
    turns: int = 2
    across: int = 1
    splits: int = 1
    by_warps: bool = False

    @property
    def computing(self) -> int:
        """Warpgroups that compute; one more copies."""
        return self.turns * self.across

    @property
    def columns(self) -> int:
        """Columns of a warpgroup."""
        return self.block_n // self.across

    @property
    def chunks(self) -> int:
        """The parts of a step that tensor cores take at once."""
        return self.depth // CHUNK

    def width(self, stored: str, transposed: bool = False) -> int:
        """Columns of a tile of the matrix: a row of 128 bytes, or of 64.

        A transposed matrix is copied whole columns at a time.
        """
        if transposed:
            return self.columns
        wide = 256 if stored in FOUR_BITS and self.columns % 256 == 0 else 128
        return min(wide, self.columns)

    def copies(self, width: int, arrays: int) -> int:
        """The number of copies of a step, if `arrays` are joined to the matrix."""
        lines = -(-self.block_n // WIDTHS[1])  # a copy has no longer ones
        return self.block_n // width + self.chunks + arrays * lines

    def shared_memory(self, spec: Spec) -> int:
        """Bytes of shared memory of a use."""
        rows = padded(math.prod(spec.shape("x")[:-1]))
        step = self.depth * (self.block_n * bits_of(spec) // 8 + 2 * rows)
        for name in ("w_scale", "w_zero"):
            if spec.has(name):
                group = spec.shape("x")[-1] // spec.shape(name)[0]
                line = 4 * max(1, self.depth // group)
                line = max(line, LINE_BYTES) if transposed(spec) else line
                step += line * self.block_n
        sums = 4 * self.turns * rows * self.block_n
        return self.stages * step + sums + BARRIERS


def bits_of(spec: Spec) -> int:
    """Returns the bits of a number of the matrix."""
    return 4 if spec.dtype("w") in FOUR_BITS else 8


def padded(rows: int) -> int:
    """Returns the rows that tensor cores compute."""
    return -(-rows // 8) * 8


def sizes(spec: Spec) -> tuple[int, int, int]:
    """Returns the rows, the summed axis and the columns."""
    *rows, k = spec.shape("x")
    return math.prod(rows), k, spec.shape("w")[0 if transposed(spec) else 1]


def transposed(spec: Spec) -> bool:
    """Returns whether the matrix is [n, k]."""
    return spec.param("mode") == "transposed"


def default(spec: Spec, device: Device) -> Tiles:
    """Returns the default config: of few rows, by tensor cores of warps.

    On an H200, of scales [z, n] and matrices [k, n], µs by rows
    (``tests/bench/results/few_rows_tried_h200.json``)::

                              4096 x 14336       8192 x 28672
                              1        16        1        16
        int8, warpgroups      17.9     18.9      56.4     57.3
        int8, warps           16.9     18.6      57.0     56.3
        and four in turns     17.7     17.8
        fp8, warpgroups       18.2     18.9      55.7     58.6
        fp8, warps            16.9     18.6      56.1     60.0
        int4, warpgroups      13.4     14.6      43.0     45.5
        int4, warps           12.5               40.2     47.2

    Differences of less than 1 µs on the right are noise. Later, steps of 256 of the
    summed axis took 15.7 in place of 16.8 of int8, and 12.3 and 38.2 in place of 12.6
    and 40.3 of int4 (``tests/bench/results/few_rows_tried_later_h200.json``).
    """
    own = wanted = of_warpgroups(spec, device)
    rows = padded(sizes(spec)[0])
    if transposed(spec):  # not measured
        return own
    if rows <= ONE_TILE:
        wanted = replace(_deeper(own, spec), by_warps=True)
    elif rows <= IN_FOUR and (spec.dtype("w"), own.block_n, own.splits) == ALONE:
        wanted = replace(own, turns=4, stages=8, by_warps=True)
    return wanted if fits(wanted, spec, device).ok else own


def _deeper(config: Tiles, spec: Spec) -> Tiles:
    """A config with steps twice as deep, where these are no larger than `DEEP`."""
    k, depth, (most, fewest) = sizes(spec)[1], 2 * config.depth, DEEP
    large = depth * config.block_n * bits_of(spec) // 8 > most
    whole = k % depth == 0 and _whole_groups(spec, depth)
    if large or not whole or k // depth < fewest * config.splits:
        return config
    return replace(config, depth=depth, stages=4)


def of_warpgroups(spec: Spec, device: Device) -> Tiles:
    """Returns the config by tensor cores of warpgroups.

    Most processors have a block, and no more.

    Two warpgroups that share 256 columns read the rows half as often as blocks of 128.
    On an H100, blocks of 128 and of 256 took (rows, summed, columns; µs)::

        64  4096 14336    25  26
        64  8192 28672    96  83
    """
    m, k, n = sizes(spec)
    count = int(processors(device) * BUSY)
    four = spec.dtype("w") in FOUR_BITS
    few = four and padded(m) <= 32
    depth = 128 if k % 128 == 0 and _whole_groups(spec, 128) else 64
    base = Tiles(depth=depth, stages=8 if few else 4)
    if n % 256 == 0 and (few or n // 128 > count):
        base = replace(base, block_n=256)
        if padded(m) > 32:
            base = replace(base, turns=1, across=2)
    blocks = max(1, n // base.block_n)
    steps = k // depth // base.stages
    splits = max(s for s in SPLITS if s == 1 or s <= min(count // blocks, steps))
    return with_stages(replace(base, splits=splits), spec)


SPLITS = (1, 2, 3, 6)
"""Sizes of clusters that fill most of an H100: processors of a cluster lie together. 96
blocks in clusters of three took 24 µs, 128 in clusters of four 37, 112 of seven 49."""


def _whole_groups(spec: Spec, depth: int) -> bool:
    """Whether a step has whole groups, or is within one."""
    k = spec.shape("x")[-1]
    arrays = [spec.shape(n)[0] for n in ("w_scale", "w_zero") if spec.has(n)]
    groups = [k // z for z in arrays]
    return all(depth % g == 0 or g % depth == 0 for g in groups)


MORE = ({}, {"turns": 3, "stages": 6}, {"turns": 4, "stages": 8})
"""Warpgroups in turns that are worth measuring."""


def configs(spec: Spec, device: Device) -> list[Tiles]:
    """Returns configs worth measuring, most promising first."""
    own = of_warpgroups(spec, device)
    found = [default(spec, device), own]
    few = padded(sizes(spec)[0]) <= FEW
    for change in (
        *({"by_warps": True, **more} for more in MORE if few),
        *MORE[1:],
        {"block_n": 256, "turns": 1, "across": 2},
        {"block_n": 128, "turns": 2, "across": 1},
        {"block_n": 512, "across": 2, "splits": 2 * own.splits},
        {"depth": 64, "stages": 2 * own.stages},
        {"splits": max(1, own.splits // 2)}, {"splits": 2 * own.splits},
    ):  # fmt: skip
        found.append(with_stages(replace(own, **change), spec))
    return list(dict.fromkeys(found))


def fits(config: Tiles, spec: Spec, device: Device) -> Verdict:
    """Returns whether a config can run: shared memory, registers, sizes of steps."""
    del device
    (m, k, n), wide = sizes(spec), config.block_n
    found = [YES]
    if config.block_n not in WIDTHS or config.columns not in WIDTHS[:2] or n % wide:
        text = f"{config.across} times 128 or 256, and divide {n}"
        found.append(no("block_n", f"{wide} is not 128, 256 or 512, {text}"))
    whole = config.depth % CHUNK == 0 == k % config.depth
    whole &= not transposed(spec) or config.depth * bits_of(spec) in (512, 1024)
    if not (whole and _whole_groups(spec, config.depth)):
        found.append(no("depth", f"{config.depth} rows a step do not divide {k}"))
    if config.stages % config.turns:
        text = f"{config.stages} stages for {config.turns} warpgroups in turns"
        found.append(no("stages", text))
    if config.splits > min(CLUSTER, k // config.depth):
        found.append(no("splits", f"{config.splits} blocks for {k} summed numbers"))
    if (size := config.shared_memory(spec)) > SHARED_MEMORY:
        text = f"{size >> 10} KiB of shared memory of {SHARED_MEMORY >> 10} KiB"
        found.append(no("shared_memory", text))
    if config.by_warps and padded(m) > FEW:
        found.append(no("by_warps", f"{m} rows, of at most {FEW}"))
    most = {1: 64, 2: 64, 3: 32}.get(config.computing, 16)
    if config.by_warps:  # they hold fewer numbers of the matrix at once
        most = {1: 64, 2: 64, 3: 48, 4: 32}.get(config.computing, 16)
    if (sums := padded(m) * config.columns // 128) > most:
        found.append(no("registers", f"{sums} for sums, of at most {most}"))
    return all_of(*found)
