"""Configs of the TPU kernels, and which of them fit into VMEM and SMEM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rewriter.kernels.ragged.dot.products import Product, products
from rewriter.kernels.ragged.dot.tpu.schedule import FIELDS, most_steps
from rewriter.ops import tpu
from rewriter.ops.device import Device
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.kernel import Spec

MORE = 3 << 20
"""Bytes of VMEM for everything but blocks."""

MOST_ROWS = 2048
"""The most rows in a block of a group's product. Larger blocks take fewer instructions
for each sum, but this many rows by 1024 columns take 6 s to compile, twice as many 15
s."""

SMEM = 512 << 10
"""Bytes of SMEM for the table of steps; there is 1 MiB on every TPU."""


@dataclass(frozen=True)
class Tiles:
    """The config of both passes: the largest part of each axis in a block.

    Attributes:
        block_m: Rows of a tile.
        block_k: Columns of lhs, which are summed or are rows of the result; of the
            latter no more than `MOST_ROWS` are in a block.
        block_n: Columns of a block of the result.
        step_k: Columns of a block that are summed in one piece of code. Code size and
            compile time grow with it.
        chunk: Rows that are multiplied at once where groups share a tile.
    """

    block_m: int = 512
    block_k: int = 1024
    block_n: int = 512
    step_k: int = 1024
    chunk: int = 128


@dataclass(frozen=True)
class Blocks:
    """The sizes of blocks of a product with some tiles.

    Attributes:
        m: Rows of lhs.
        k: Columns of lhs.
        n: Columns of the result.
        step: Columns of lhs that are summed at once.
        chunk: Rows that are multiplied at once where groups share a tile.
    """

    m: int
    k: int
    n: int
    step: int
    chunk: int


def blocks(product: Product, tiles: Tiles) -> Blocks:
    """Returns the blocks of a product: whole chunks of rows, whole registers, or all.

    Example:
        >>> product = Product("forward", 1000, 1536, 100, 8, (2, 2, 2))
        >>> blocks(product, Tiles(512, 1024, 512))
        Blocks(m=512, k=768, n=100, step=768, chunk=128)
    """
    most = min(tiles.block_m, product.m)
    chunk = min(tiles.chunk, most)
    by_groups = product.mode == "contracting"
    widest = min(tiles.block_k, MOST_ROWS) if by_groups else tiles.block_k
    k, n = tpu.part(product.k, widest), tpu.part(product.n, tiles.block_n)
    step = k if by_groups else min(k, tiles.step_k)
    return Blocks(most // chunk * chunk, k, n, step, chunk)


def vmem(product: Product, tiles: Tiles) -> int:
    """Returns the bytes of VMEM that a product takes.

    It counts blocks and sums twice, and operands and products once more on their way to
    and from registers. That is more than the compiler was seen to take.
    """
    b, (left, right, out) = blocks(product, tiles), product.items
    n, k = (-(-x // tpu.LANES) * tpu.LANES for x in (b.n, b.k))
    m = -(-b.m // 16) * 16
    operands = m * k * left + (m if product.mode == "contracting" else k) * n * right
    made = (k if product.mode == "contracting" else m) * n
    return 3 * operands + 2 * made * out + 2 * made * 4 + MORE


def fits(config: Tiles, spec: Spec, device: Device) -> Verdict:
    """Returns whether the product can run: alignment, VMEM, SMEM."""
    return _fits(config, spec, device, backward=False)


def fits_backward(config: Tiles, spec: Spec, device: Device) -> Verdict:
    """Returns whether the products of both cotangents can run."""
    return _fits(config, spec, device, backward=True)


def _fits(config: Tiles, spec: Spec, device: Device, backward: bool) -> Verdict:
    if not (verdict := aligned(config)).ok:
        return verdict
    found, room = [YES], tpu.generation(device).vmem
    for product in products(spec, backward):
        if (size := vmem(product, config)) > room:
            text = f"{size >> 10} KiB of VMEM of {room >> 10} KiB"
            found.append(no("vmem", text))
        found.append(table_fits(product, blocks(product, config).m))
    return all_of(*found)


def aligned(config: Tiles) -> Verdict:
    """Returns whether tiles are whole registers."""
    found = [YES]
    for name, unit in (("block_m", 16), ("chunk", 16), ("block_k", tpu.LANES),
                       ("block_n", tpu.LANES), ("step_k", tpu.LANES)):  # fmt: skip
        if (size := getattr(config, name)) % unit or size <= 0:
            found.append(no(name, f"{size} is not a multiple of {unit}"))
    return all_of(*found)


def table_fits(product: Product, rows: int) -> Verdict:
    """Returns whether the table of steps over tiles of rows fits into SMEM."""
    size = 4 * FIELDS * most_steps(product.m, product.groups, rows)
    if size > SMEM:
        text = f"{size >> 10} KiB of SMEM of {SMEM >> 10} KiB for the steps"
        return no("smem", text)
    return YES


def default(spec: Spec, device: Device) -> Tiles:
    """Returns the largest tiles that fit, among those with the fewest cycles."""
    return _largest(spec, device, backward=False)


def default_backward(spec: Spec, device: Device) -> Tiles:
    """Returns the same for the products of both cotangents."""
    return _largest(spec, device, backward=True)


def _largest(spec: Spec, device: Device, backward: bool) -> Tiles:
    ladder = [*_ladder(spec, device), SMALLEST]
    fitting = (t for t in ladder if _fits(t, spec, device, backward).ok)
    return next(fitting, SMALLEST)


SMALLEST = Tiles(256, 256, 256, 256, 128)
"""Fits every TPU."""


def _ladder(spec: Spec, device: Device) -> list[Tiles]:
    """Returns tiles worth having, from the largest to the smallest.

    Cycles by the compiler's own simulation (libtpu 0.0.50), in bfloat16, for groups of
    1024 rows and m k n 4096 4096 2048. Those by steps are recorded in
    ``tests/bench/results/tpu_experts_cycles.json``. The peak is 523k on v5e, 262k on
    v5p and 131k on v6e:

    tiles                  v5e    v5p    v6e
    128 4096 256           728k                  XLA's own tiles
    512 1024 1024          566k
    512 4096 1024          571k   284k   174k    in steps of 1024
    512 4096 1024          565k   281k   165k    in steps of 2048
    512 4096 1024          550k   274k   154k    in steps of 4096
    512 4096 512           544k                  in steps of 4096
    1024 4096 1024                       149k    in steps of 4096
    512 4096 1024          598k          375k    groups of 128 rows, in chunks of 128
    512 4096 1024                        188k    groups of 256 rows, in chunks of 256

    of groups (the gradient of matrices)
    512 1024 1024          634k   318k   205k
    1024 1024 1024         551k   276k   156k
    512 1024 1024          822k                  groups of 128 rows, in chunks of 128

    Of groups, blocks of 2048 x 1024 sums take 0.96 (v5e) and 0.92 (v6e) of the
    instructions of 1024 x 1024.

    Each step of columns reads and writes the sums. A program takes 3.5 s to compile
    with steps of 4096, and 1.2 s with steps of 1024, those of the lines with chunks.
    """
    dtypes = spec.dtype("lhs"), spec.dtype("rhs")
    mean = spec.shape("lhs")[0] // spec.shape("group_sizes")[0]
    rows, step, chunk = pieces(mean, dtypes, device)
    made = [Tiles(rows, k, 1024, min(k, step), chunk) for k in (8192, 4096, 2048, 1024)]
    return made + [Tiles(512, k, 512, min(k, step), chunk) for k in (1024, 512)]


def pieces(mean: int, dtypes: Sequence[str], device: Device) -> tuple[int, int, int]:
    """Returns rows of a tile, columns of k to sum at once, and rows of a chunk.

    Args:
        mean: Rows of a group.
        dtypes: The operands'.
        device: The TPU.
    """
    # Tiles that groups share take longer: few of them should be shared.
    rows = 1024 if mean >= 4096 else 512
    # Products of float32 are several for one.
    step = 512 if "float32" in dtypes else 4096
    # Matrix units of 128 x 128 up to v5p, of 256 x 256 from v6e on.
    wide = tpu.generation(device).name in ("v6e", "7x")
    return rows, step, 256 if wide else 128


def configs(spec: Spec, device: Device) -> list[Tiles]:
    """Returns tiles worth measuring, the largest first."""
    made = _ladder(spec, device)
    made += [replace(t, block_m=2 * t.block_m) for t in made[:2]]
    made += [replace(t, block_n=t.block_n // 2) for t in made[:2]]
    made += [replace(t, chunk=t.chunk // 2) for t in made[:2]]
    return made


def smallest(spec: Spec) -> Verdict:
    """Returns whether every TPU can run both passes with the smallest tiles."""
    anywhere = Device("", "tpu")
    passes = (_fits(SMALLEST, spec, anywhere, backward) for backward in (False, True))
    return all_of(*passes)


NAMES = {
    "forward": "ragged_dot",
    "transposed": "ragged_dot_transposed",
    "contracting": "ragged_dot_of_groups",
}
"""The names of the kernels in profiles, by mode."""


def steps(
    spec: Spec, config: Tiles, backward_config: Tiles, passes: str
) -> dict[str, int]:
    """Returns how often each kernel's code runs: once for each piece that is summed."""
    made: dict[str, int] = {}
    for backward, tiles in ((False, config), (True, backward_config)):
        if passes == ("forward" if backward else "vjp"):
            continue
        for product in products(spec, backward):
            b = blocks(product, tiles)
            turns = most_steps(product.m, product.groups, b.m)
            made[NAMES[product.mode]] = (
                turns * -(-product.n // b.n) * -(-product.k // b.step)
            )
    return made
