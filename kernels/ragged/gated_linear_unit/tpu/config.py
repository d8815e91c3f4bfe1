"""Configs of the TPU kernel, and which of them fit into VMEM and SMEM."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp

from rewriter.kernels.ragged.dot.products import Product
from rewriter.kernels.ragged.dot.tpu import config as ragged_dot
from rewriter.kernels.ragged.dot.tpu.config import Blocks, Tiles
from rewriter.kernels.ragged.dot.tpu.schedule import most_steps
from rewriter.kernels.ragged.gated_linear_unit.by_parts import part_of
from rewriter.ops import tpu
from rewriter.ops.device import Device
from rewriter.ops.kernel import Spec
from rewriter.support.verdict import YES, Verdict, all_of, no

NAME = "ragged_gated_linear_unit"
"""The name of the kernel in profiles."""


@dataclass(frozen=True)
class Unit:
    """A use's sizes.

    Attributes:
        product: The sizes of one of its ragged dots, with the whole unit's result.
        kept: Bytes of a number of a branch that is saved for gradients.
        halves: Whether both branches' matrices are side by side.
    """

    product: Product
    kept: int
    halves: bool


def unit_of(spec: Spec) -> Unit:
    """Returns the sizes of a use."""
    (m, k), (groups,) = spec.shape("x"), spec.shape("group_sizes")
    halves = bool(spec.param("halves"))
    f = spec.shape("w")[2] // (2 if halves else 1)
    matrices = [spec.dtype(n) for n in ("w", "w_up") if spec.has(n)]
    item = lambda dtype: jnp.dtype(dtype).itemsize
    out = item(spec.param("out_dtype") or spec.dtype("x"))
    items = item(spec.dtype("x")), max(map(item, matrices)), out
    kept = jnp.result_type(spec.dtype("x"), *matrices).itemsize
    return Unit(Product("forward", m, k, f, groups, items), kept, halves)


def blocks(unit: Unit, tiles: Tiles) -> Blocks:
    """Returns the blocks of a use; with halves, a block of columns divides one half.

    Example:
        >>> product = Product("forward", 1000, 1536, 1408, 8, (2, 2, 2))
        >>> blocks(Unit(product, 2, False), Tiles(512, 1024, 512)).n
        512
        >>> blocks(Unit(product, 2, True), Tiles(512, 1024, 512)).n
        128
    """
    made, f = ragged_dot.blocks(unit.product, tiles), unit.product.n
    if not unit.halves:
        return made
    sizes = range(tpu.LANES, tiles.block_n + 1, tpu.LANES)
    return replace(made, n=max((n for n in sizes if f % n == 0), default=tpu.LANES))


def vmem(unit: Unit, tiles: Tiles) -> int:
    """Returns the bytes of VMEM that a use takes, including saved branches.

    It counts blocks twice, sums once, and operands, both branches and activations once
    more on their way to and from registers.
    """
    b, (left, right, out) = blocks(unit, tiles), unit.product.items
    n, k = (-(-x // tpu.LANES) * tpu.LANES for x in (b.n, b.k))
    m = -(-b.m // 16) * 16
    operands, made = m * k * left + 2 * k * n * right, out + 2 * unit.kept
    return 3 * operands + 2 * m * n * made + 6 * m * n * 4 + ragged_dot.MORE


def fits(config: Tiles, spec: Spec, device: Device) -> Verdict:
    """Returns whether the forward can run: alignment, VMEM, SMEM."""
    found = [ragged_dot.aligned(config)]
    if not found[0].ok:
        return found[0]
    unit, room = unit_of(spec), tpu.generation(device).vmem
    if (size := vmem(unit, config)) > room:
        found.append(no("vmem", f"{size >> 10} KiB of VMEM of {room >> 10} KiB"))
    found.append(ragged_dot.table_fits(unit.product, blocks(unit, config).m))
    return all_of(YES, *found)


def default(spec: Spec, device: Device) -> Tiles:
    """Returns the largest tiles that fit, among those with the fewest cycles."""
    fitting = (t for t in _ladder(spec, device) if fits(t, spec, device).ok)
    return next(fitting, SMALLEST)


SMALLEST = Tiles(256, 256, 256, 256, 128)
"""Fits every TPU."""


def _ladder(spec: Spec, device: Device) -> list[Tiles]:
    """Returns tiles worth having, from the largest to the smallest."""
    mean = spec.shape("x")[0] // spec.shape("group_sizes")[0]
    dtypes = spec.dtype("x"), spec.dtype("w")
    rows, step, chunk = ragged_dot.pieces(mean, dtypes, device)
    made = [Tiles(rows, k, 512, min(k, step), chunk) for k in (8192, 4096, 2048, 1024)]
    return made + [Tiles(256, k, 512, min(k, step), chunk) for k in (1024, 512)]


def configs(spec: Spec, device: Device) -> list[Tiles]:
    """Returns tiles worth measuring, the largest first."""
    made = _ladder(spec, device)
    made += [replace(t, block_n=2 * t.block_n) for t in made[:2]]
    return made + [replace(t, chunk=t.chunk // 2) for t in made[:2]]


def smallest(spec: Spec) -> Verdict:
    """Returns whether every TPU can run both passes with the smallest tiles."""
    anywhere = Device("", "tpu")
    return all_of(
        fits(SMALLEST, spec, anywhere),
        ragged_dot.fits_backward(SMALLEST, part_of(spec), anywhere),
    )


def steps(
    spec: Spec, config: Tiles, backward_config: Tiles, passes: str
) -> dict[str, int]:
    """Returns how often each kernel's code runs: once for each piece that is summed."""
    made: dict[str, int] = {}
    if passes != "vjp":
        unit = unit_of(spec)
        b, p = blocks(unit, config), unit.product
        turns = most_steps(p.m, p.groups, b.m)
        made[NAME] = turns * -(-p.n // b.n) * -(-p.k // b.step)
    if passes != "forward":
        made |= steps_of_parts(spec, config, backward_config, "vjp")
    return made


def steps_of_parts(
    spec: Spec, config: Tiles, backward_config: Tiles, passes: str
) -> dict[str, int]:
    """Returns how often the code of each kernel of a ragged dot runs."""
    return ragged_dot.steps(part_of(spec), config, backward_config, passes)
