"""Tiles of attention to stored keys and values, and which are worth measuring."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rewriter.kernels.shared.hopper import (
    SHARED_MEMORY,
    processors,
    with_stages,
)
from rewriter.ops.cost import FOUR_BITS
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec

KEYS = 64
"""The rows of a product of tensor cores, each of them a key."""

ROWS = 64
"""The most queries of a key head."""

LINE = 256
"""The most numbers of a line that one copy brings."""

BARRIERS = 1 << 10
"""Bytes for barriers."""

LEAST = 16
"""Blocks of keys that a block of threads should have."""

MANY = 3
"""Blocks of threads for each processor from which on one warpgroup computes."""


@dataclass(frozen=True)
class Tiles:
    """The config.

    Attributes:
        stages: Blocks of keys that shared memory holds, a multiple of `turns`.
        turns: Warpgroups that compute, and take blocks of keys in turns.
        splits: Blocks of threads of a cluster, which share a key head's queries.
        parts: Clusters that share them. Their results are merged by XLA.
        keys: Keys of a block, 64 or 128.
        reorders: Whether the kernel puts queries into the order of widened keys itself,
            where there is one for each head. Else a kernel of XLA does before.
        lines: Whether scales of all heads that lie beside each other are copied as
            lines of memory. Else each key's scales are a line of their own.
    """

    stages: int = 4
    turns: int = 2
    splits: int = 1
    parts: int = 1
    keys: int = KEYS
    reorders: bool = True
    lines: bool = True

    def shared_memory(self, spec: Spec) -> int:
        """Bytes of shared memory of a use."""
        rows, h, e = queries(spec), spec.shape("q")[3], spec.shape("v")[3]
        block = self.keys * (h + e + 8 * spec.shape("k")[2])  # with scales beside
        results = self.turns * rows * (4 * e + 2 * self.keys + 4 * 10)
        return self.stages * block + results + 2 * rows * h + BARRIERS


def queries(spec: Spec) -> int:
    """Returns the queries of a key head, in eights."""
    (_, t, n, _), heads = spec.shape("q"), spec.shape("k")[2]
    return -(-t * (n // heads) // 8) * 8


def default(spec: Spec, device: Device) -> Tiles:
    """Returns the default config: a block of threads for each processor, and no more.

    On an H200, with 8 heads of keys of 128, µs by sequences and tokens::

                                        16 4096    64 4096    4 32768    1 32768
        64 keys at a time                    41        157         78         34
        128 keys                             39        150         76         31
        and no more than two in a cluster                          75         27
        and scales in lines, and queries in order
                                             37        142         68         23

    On the right several blocks share a sequence's keys of a head. Those of 4 sequences
    are clusters of two. Those of one are all merged by XLA.

    Many more blocks than processors have one warpgroup that computes. Then two of them
    are on a processor: 64 sequences took 142.0 instead of 144.1 µs. 16 sequences, of a
    block for each processor, took 48 instead of 36
    (``tests/bench/results/quantized_cache_tried_h200.json``).
    """
    b, s, heads, _ = spec.shape("k")
    blocks = -(-s // KEYS) // LEAST
    parts = max(1, min(processors(device) // max(1, b * heads), blocks))
    splits = 2 if parts in (2, 4) else 1
    config = with_stages(Tiles(4, 2, splits, parts // splits), spec)
    wide = with_stages(replace(config, stages=4, keys=2 * KEYS), spec)
    eight = spec.dtype("k") not in FOUR_BITS
    if eight and b * heads >= MANY * processors(device):
        wide = replace(wide, stages=2, turns=1)
    return wide if fits(wide, spec, device).ok else config


def configs(spec: Spec, device: Device) -> list[Tiles]:
    """Returns configs worth measuring, most promising first."""
    own = default(spec, device)
    found = [own]
    for change in (
        {"keys": KEYS}, {"keys": KEYS, "turns": 4, "stages": 8},
        {"splits": 1, "parts": 1}, {"parts": 2 * own.parts}, {"splits": 2},
        {"turns": 4}, {"splits": 1, "parts": own.splits * own.parts},
        {"reorders": not own.reorders}, {"lines": not own.lines},
    ):  # fmt: skip
        found.append(with_stages(replace(own, **change), spec))
    return list(dict.fromkeys(found))


def fits(config: Tiles, spec: Spec, device: Device) -> Verdict:
    """Returns whether a config can run: shared memory, and turns of barriers."""
    del device
    found = [YES]
    if config.stages % config.turns:
        text = f"{config.stages} stages for {config.turns} warpgroups in turns"
        found.append(no("stages", text))
    if config.keys not in (KEYS, 2 * KEYS):
        found.append(no("keys", f"{config.keys} keys of a block, not 64 or 128"))
    if not 1 <= config.splits <= 8:
        found.append(no("splits", f"{config.splits} blocks of a cluster, not 1 to 8"))
    if config.parts < 1:
        found.append(no("parts", f"{config.parts} clusters, not one or more"))
    if (size := config.shared_memory(spec)) > SHARED_MEMORY:
        text = f"{size >> 10} KiB of shared memory of {SHARED_MEMORY >> 10} KiB"
        found.append(no("shared_memory", text))
    most = {1: 64, 2: 64, 3: 32, 4: 16}.get(config.turns, 0)
    if queries(spec) > most:
        text = f"{config.turns} warpgroups have registers for {most} queries each"
        found.append(no("registers", text))
    return all_of(*found)
