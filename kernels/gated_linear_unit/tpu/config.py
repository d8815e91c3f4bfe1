"""Configs of the TPU kernel, and which of them fit into VMEM."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp

from rewriter.ops import tpu
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec

MORE = 3 << 20
"""Bytes of VMEM for everything but blocks."""


@dataclass(frozen=True)
class Tiles:
    """The config of both passes: the largest part of each axis in a block.

    Attributes:
        block_m: Rows of x.
        block_k: Columns of x, which are summed.
        block_n: Columns of each branch.
        step_k: Columns of a block that are summed in one piece of code. Code size and
            compile time grow with it.
    """

    block_m: int = 256
    block_k: int = 512
    block_n: int = 512
    step_k: int = 512


@dataclass(frozen=True)
class Sizes:
    """A use's sizes.

    Attributes:
        m: Rows.
        k: Columns of x.
        n: Columns of each branch.
        items: Bytes of a number of x, of a weight, of further arrays such as a
            cotangent, and of all results together.
    """

    m: int
    k: int
    n: int
    items: tuple[int, int, int, int]


@dataclass(frozen=True)
class Blocks:
    """The sizes of blocks of a use with some tiles.

    Attributes:
        m: Rows of x.
        k: Columns of x.
        n: Columns of each branch.
        step: Columns of x that are summed at once.
    """

    m: int
    k: int
    n: int
    step: int


def blocks(sizes: Sizes, tiles: Tiles) -> Blocks:
    """Returns the blocks of a use: whole registers, or all of an axis.

    Example:
        >>> blocks(Sizes(1000, 1536, 100, (2, 2, 0, 2)), Tiles(512, 1024, 512, 512))
        Blocks(m=512, k=768, n=100, step=512)
    """
    m = sizes.m if sizes.m <= tiles.block_m else tiles.block_m
    k = tpu.part(sizes.k, tiles.block_k)
    return Blocks(m, k, tpu.part(sizes.n, tiles.block_n), min(k, tiles.step_k))


def vmem(sizes: Sizes, tiles: Tiles) -> int:
    """Returns the bytes of VMEM that a use takes.

    It counts blocks twice, sums once, and operands and both branches once more on their
    way to and from registers.
    """
    b, (x, w, read, made) = blocks(sizes, tiles), sizes.items
    n, k = (-(-x // tpu.LANES) * tpu.LANES for x in (b.n, b.k))
    m = -(-b.m // 16) * 16
    operands = m * k * x + 2 * k * n * w
    return 3 * operands + 2 * m * n * (read + made) + 6 * m * n * 4 + MORE


def sizes_of(spec: Spec, backward: bool = False) -> Sizes:
    """Returns the sizes of the kernel's work in a pass."""
    x, f = spec.shape("x"), spec.shape("w_gate")[1]
    item = lambda dtype: jnp.dtype(dtype).itemsize
    out = item(spec.param("out_dtype") or spec.dtype("x"))
    wide = max(item(spec.dtype(n)) for n in ("w_gate", "w_up"))
    narrow = max(item(spec.dtype("x")), wide)
    read, made = (out, 2 * narrow) if backward else (0, out)
    return Sizes(math.prod(x[:-1]), x[-1], f, (item(spec.dtype("x")), wide, read, made))


def fits(config: Tiles, spec: Spec, device: Device) -> Verdict:
    """Returns whether the forward can run: alignment, VMEM."""
    return _fits(config, sizes_of(spec), device)


def fits_backward(config: Tiles, spec: Spec, device: Device) -> Verdict:
    """Returns whether the backward can run."""
    return _fits(config, sizes_of(spec, backward=True), device)


def _fits(config: Tiles, sizes: Sizes, device: Device) -> Verdict:
    found = [YES]
    for name, unit in (("block_m", 16), ("block_k", tpu.LANES),
                       ("block_n", tpu.LANES), ("step_k", tpu.LANES)):  # fmt: skip
        if (size := getattr(config, name)) % unit or size <= 0:
            found.append(no(name, f"{size} is not a multiple of {unit}"))
    if not all_of(*found).ok:
        return all_of(*found)
    room, size = tpu.generation(device).vmem, vmem(sizes, config)
    if size > room:
        text = f"{size >> 10} KiB of VMEM of {room >> 10} KiB"
        found.append(no("vmem", text))
    return all_of(*found)


SMALLEST = Tiles(256, 256, 256, 256)
"""Fits every TPU."""


def default(spec: Spec, device: Device) -> Tiles:
    """Returns the largest tiles that fit, among those with the fewest cycles."""
    return _largest(spec, device, backward=False)


def default_backward(spec: Spec, device: Device) -> Tiles:
    """Returns the same for the backward."""
    return _largest(spec, device, backward=True)


def _largest(spec: Spec, device: Device, backward: bool) -> Tiles:
    sizes = sizes_of(spec, backward)
    fitting = (t for t in _ladder(spec, device) if _fits(t, sizes, device).ok)
    return next(fitting, SMALLEST)


def _ladder(spec: Spec, device: Device) -> list[Tiles]:
    """Returns tiles worth having, from the largest to the smallest."""
    wide = tpu.generation(device).name in ("v6e", "7x")
    rows, step = (1024, 1024) if wide else (512, 512)
    if spec.dtype("x") == "float32":  # one product counts as several
        step //= 4
    made = [Tiles(rows, k, 1024, min(k, step)) for k in (8192, 4096, 2048, 1024)]
    return made + [Tiles(rows // 2, k, 512, min(k, step)) for k in (2048, 1024, 512)]


def configs(spec: Spec, device: Device) -> list[Tiles]:
    """Returns tiles worth measuring, the largest first."""
    return _ladder(spec, device)
