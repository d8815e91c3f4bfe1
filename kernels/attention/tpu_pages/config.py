"""Configs of the paged TPU kernel: how many pages a step reads, and what fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp

from rewriter.kernels.attention.pages import AXES
from rewriter.kernels.attention.tpu_pages.schedule import many
from rewriter.ops.device import Device
from rewriter.ops.tpu import LANES, UNKNOWN, generation
from rewriter.support.verdict import Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.kernel import Spec

ANY = Device(UNKNOWN.kind, "tpu")
"""A TPU of unknown kind."""

SMEM = 512 << 10
"""Bytes of SMEM for the steps; there is 1 MiB on every TPU."""

MOST_PAGES = 16
"""Pages of a step: each is an operand of its own."""

COLUMNS = 1024
"""Keys of all heads in a step, if there are that many.

Measured with 32 queries, 8 heads of 128 and pages of 16 in bfloat16, on a v5e (libtpu
0.0.50). A step of 1, 2, 4 and 8 pages takes 408, 504, 821 and 1411 instruction bundles.
Reading 8 pages takes 960 cycles.
"""


@dataclass(frozen=True)
class Chunk:
    """The config of the kernel.

    Attributes:
        pages: Pages of a step.
    """

    pages: int = 1


@dataclass(frozen=True)
class Sizes:
    """The sizes of a use.

    Attributes:
        b: Sequences.
        rows: Queries of all heads.
        p: Pages of a sequence.
        columns: Keys of all heads on a page.
        h: Width of keys.
        e: Width of values.
        itemsize: Bytes of a number of keys or values, the larger.
    """

    b: int
    rows: int
    p: int
    columns: int
    h: int
    e: int
    itemsize: int


def sizes(spec: Spec) -> Sizes:
    """Returns the sizes of a use."""
    b, t, n, h = spec.shape("q")
    axes = AXES[spec.param("heads_axis", 2)]
    pool = dict(zip(axes, spec.shape("k_pages"), strict=True))
    e = spec.shape("v_pages")[3]
    types = (jnp.dtype(spec.dtype(n)) for n in ("k_pages", "v_pages"))
    itemsize = max(x.itemsize for x in types)
    p = spec.shape("table")[1]
    return Sizes(b, n * t, p, pool["z"] * pool["k"], h, e, itemsize)


def default(spec: Spec, device: Device) -> Chunk:
    """Returns enough pages for a long step, if they fit."""
    made = configs(spec, device)
    return made[0] if made else Chunk()


def configs(spec: Spec, device: Device) -> list[Chunk]:
    """Returns configs worth measuring, most promising first."""
    use = sizes(spec)
    most = min(use.p, MOST_PAGES)
    wanted = min(most, max(1, COLUMNS // use.columns))
    proposed = dict.fromkeys([wanted, wanted // 2, min(2 * wanted, most), 1])
    return [c for c in map(Chunk, filter(None, proposed)) if fits(c, spec, device).ok]


def fits(config: Chunk, spec: Spec, device: Device) -> Verdict:
    """Returns whether a step fits: VMEM for its pages, SMEM for the list."""
    use, room = sizes(spec), generation(device).vmem
    found = []
    if (need := vmem(config, use)) > room:
        text = f"{need >> 20} MiB of VMEM of {room >> 20} MiB for {config.pages} pages"
        found.append(no("vmem", text))
    if (words := 4 * many(use.b, use.p, config.pages)) > SMEM:
        text = f"{words >> 10} KiB of SMEM of {SMEM >> 10} KiB for the steps"
        found.append(no("smem", text))
    return all_of(*found)


def vmem(config: Chunk, use: Sizes) -> int:
    """Returns the bytes of VMEM that a step takes.

    It counts pages twice, and once more joined and widened; scores and weights a few
    times; queries and results.
    """
    wide, columns = _lanes(use.h) + _lanes(use.e), config.pages * use.columns
    rows = -(-use.rows // 16) * 16
    pages = columns * wide * (2 * use.itemsize + 4)
    scores = 6 * 4 * rows * _lanes(columns)
    return pages + scores + 4 * rows * (4 * wide + 2 * LANES) + (1 << 20)


def _lanes(width: int) -> int:
    return -(-width // LANES) * LANES
