"""Sizes of tiles of scores, and which of them are worth measuring."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax.numpy as jnp

if TYPE_CHECKING:
    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec


@dataclass(frozen=True)
class Blocks:
    """The sizes of tiles of scores: the config of both passes.

    Attributes:
        rows: Rows of a tile, for one query head per key head.
        keys: Columns of a tile.
        tile: Scores held at once, for all heads and batch entries of a step: 2 MiB in
            f32, so that a tile stays in a CPU's cache.
        lines: Entries of k held at once, the bound for a tile of few rows.
        dense_below: Bytes of float32 scores below which the reference computes a use
            whose sizes are known only when the program runs.
    """

    rows: int = 512
    keys: int = 512
    tile: int = 1 << 19
    lines: int = 1 << 19
    dense_below: int = 0


DEFAULT = Blocks()


LARGE = Blocks(1024, 1024, 1 << 26, 1 << 26)
"""For GPUs, where a step costs a launch and no cache holds a tile."""

LARGER = Blocks(2048, 2048, 1 << 28, 1 << 28)
"""For GPUs, if no block can be skipped."""


def configs(spec: Spec, device: Device) -> list[Blocks]:
    """Returns a few blocks worth measuring: each takes seconds to compile."""
    t, s = spec.shape("q")[1], spec.shape("k")[1]
    if device.platform == "cpu":
        sizes = [(256, 512), (512, 1024), (1024, 512), (1024, 1024)]
        found = [Blocks(r, k, 1 << 19) for r, k in sizes]
        found += [Blocks(512, 512, 1 << 21, 1 << 20)]
    else:
        found = [LARGE, LARGER, Blocks(4096, 4096, 1 << 28, 1 << 28)]
    return [b for b in found if b.rows < 2 * t or b.keys < 2 * s]


def default(spec: Spec, device: Device) -> Blocks:
    """Returns blocks for a CPU's cache, or for a GPU's many cores."""
    if device.platform == "cpu":
        return DEFAULT
    blocks = LARGER if spec.param("window") == (None, None) else LARGE
    if not spec.symbolic:
        return blocks
    return replace(blocks, dense_below=least_scores(spec, device.platform))


def least_scores(spec: Spec, platform: str) -> int:
    """Returns from how many bytes of float32 scores on `forward` is worth it on a GPU.

    On a TPU, where it was not measured, it is a fourth of a small chip's memory.
    """
    if platform != "cuda":
        return 4 << 30
    dense = spec.has("mask") and spec.shape("mask")[2] != 1
    return 32 << 30 if dense or _in_16_bits(spec) else 128 << 20


def _in_16_bits(spec: Spec) -> bool:
    return jnp.dtype(spec.dtype("q")).itemsize <= 2
