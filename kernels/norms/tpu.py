"""Norms of rows on TPUs: what the kernel supports, its config, and what fits.

Pallas takes half a second to import, so the kernels themselves are imported where
they are first traced.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax.numpy as jnp

from rewriter.kernels.norms import by_rows
from rewriter.kernels.norms.by_rows import Call
from rewriter.kernels.norms.estimate import estimate
from rewriter.kernels.norms.forms import kernels, refusals
from rewriter.kernels.shared.limits import SYMBOLIC
from rewriter.ops import tpu
from rewriter.ops.device import Device
from rewriter.ops.kernel import Limits, Space, Speed, Traits, saves_nothing
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from jax import Array

    from rewriter.kernels.norms.tpu_kernel import Norm
    from rewriter.ops.kernel import Spec

DTYPES = ("bfloat16", "float32")

CHUNKS = ((8192, 64), (16384, 16))
"""(columns, rows): up to these columns, so many rows are computed at once; of wider
rows 8.

Statistics over a whole row are known late. With more rows the kernel waits for them
less often. 8192 layer norms of 4096 columns take 228k cycles on v6e with chunks of 16
rows, 143k with 32 and 114k with 64. The TPU compiler's simulator says so (libtpu
0.0.50, `rewriter.measure.static_cost`, with these numbers changed).
"""

SUMS = 8
"""Rows of sums over rows: those of a 32-bit register."""

MORE = 1 << 19
"""Bytes of VMEM for everything but blocks."""


@dataclass(frozen=True)
class Rows:
    """The config of both passes.

    Attributes:
        rows: Rows of a block at most.
        parts: The number of parts of rows that may run at once, one per core.
    """

    rows: int = 64
    parts: int = 1


def chunk_of(width: int) -> int:
    """Returns the number of rows that are computed at once, by their columns.

    Example:
        >>> chunk_of(4096), chunk_of(32768)
        (64, 8)
    """
    return next((rows for most, rows in CHUNKS if width <= most), SUMS)


def smallest(width: int) -> Rows:
    """Returns the config that takes the least VMEM."""
    return Rows(chunk_of(width))


def rows_of(m: int, width: int, config: Rows) -> int:
    """Returns the rows of a block: whole chunks, or all.

    Example:
        >>> [rows_of(m, 512, Rows(256)) for m in (100, 7, 8192)]
        [64, 7, 256]
    """
    chunk = chunk_of(width)
    return m if m < chunk else min(m, config.rows) // chunk * chunk


def vmem(width: int, rows: int, items: int) -> int:
    """Returns the bytes of VMEM that blocks take, and sums over rows.

    Args:
        width: Columns.
        rows: Rows of a block.
        items: Bytes of a number of all arrays of rows together.
    """
    lanes = -(-width // tpu.LANES) * tpu.LANES
    padded = -(-rows // SUMS) * SUMS
    return 2 * lanes * (padded * items + 2 * SUMS * 4 + 2 * SUMS * 4) + MORE


def with_addend(m: int, width: int, config: Rows, items: int, more: int) -> Rows | None:
    """Returns a config for rows and a sum that fits into the VMEM of every TPU.

    Args:
        m: Rows.
        width: Columns.
        config: The config without.
        items: Bytes of a number in all arrays of rows together, without the sum.
        more: Further bytes because of the sum.

    Returns:
        The config, or one with fewer rows if it would take more VMEM than without the
        sum and more than every TPU has. None if even the fewest rows do.

    Example:
        >>> with_addend(8192, 4096, Rows(256), 4, 4)
        Rows(rows=128, parts=1)
    """
    chunk, rows = chunk_of(width), config.rows
    most = max(tpu.UNKNOWN.vmem, vmem(width, rows_of(m, width, config), items))
    while rows >= chunk:
        made = replace(config, rows=rows // chunk * chunk)
        size = vmem(width, rows_of(m, width, made), items + more)
        if size <= most:
            return made
        rows //= 2
    return None


def _items(spec: Spec) -> int:
    """Bytes of x, the cotangent, and x's cotangent, or the result."""
    item = lambda dtype: jnp.dtype(dtype).itemsize
    x = item(spec.dtype("x"))
    return 2 * x + item(spec.param("out_dtype") or spec.dtype("x"))


def supports(spec: Spec) -> Verdict:
    """Returns whether the kernel supports a use: bfloat16 or float32 rows."""
    if spec.symbolic:
        return SYMBOLIC
    found = refusals(spec, DTYPES)
    if found:
        return all_of(*found)
    return fits(smallest(spec.shape("x")[-1]), spec, Device("", "tpu"))


def fits(config: Rows, spec: Spec, device: Device) -> Verdict:
    """Returns whether a config can run: whole chunks, VMEM."""
    chunk = chunk_of(spec.shape("x")[-1])
    if config.rows <= 0 or config.rows % chunk:
        return no("rows", f"{config.rows} rows, not a multiple of {chunk}")
    if config.parts <= 0:
        return no("parts", f"{config.parts} parts, fewer than 1")
    shape = spec.shape("x")
    rows = rows_of(math.prod(shape[:-1]), shape[-1], config)
    size, room = vmem(shape[-1], rows, _items(spec)), tpu.generation(device).vmem
    if size > room:
        text = f"rows of {shape[-1]} take {size >> 10} KiB of VMEM of {room >> 10} KiB"
        return no("vmem", text)
    return YES


MOST = 12 << 20
"""The most bytes of VMEM for blocks: larger ones hide no more latency."""


def default(spec: Spec, device: Device) -> Rows:
    """Returns blocks of at most `MOST` bytes, and a part for each core."""
    width, items = spec.shape("x")[-1], _items(spec)
    parts = tpu.generation(device).cores
    least = chunk_of(width)
    sizes = (n for n in (512, 256, 128, 64, 32, 16) if n >= least)
    fitting = (n for n in sizes if vmem(width, n, items) <= MOST)
    return Rows(next(fitting, least), parts)


def configs(spec: Spec, device: Device) -> list[Rows]:
    """Returns blocks worth measuring."""
    usual, least = default(spec, device), chunk_of(spec.shape("x")[-1])
    sizes = (2 * usual.rows, max(least, usual.rows // 2))
    return [Rows(n, usual.parts) for n in sizes]


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns no: XLA fuses a norm with its neighbours."""
    del spec, platform
    return no("fused", "XLA fuses a norm with its neighbours, and is as good alone")


LEAST = 1 << 20
"""The fewest bytes of x whose gradient's passes over memory take longer than a
launch."""


def profitable_backward(spec: Spec, platform: str, count: int) -> Verdict:
    """Returns yes if x is larger than `LEAST`: the gradient reads it only once.

    XLA's program reads x four times and its cotangent twice, and ours x and the
    cotangent once. The table has thousands of cycles for [8192, 4096] bfloat16: XLA's
    forward and gradients, our gradients, and the least for the bytes of those. A
    forward adds two thirds to the last. They are by the compiler's simulation (libtpu
    0.0.50), which ignores the memory's bandwidth.

                 v5e                     v6e
                 XLA   ours   least      XLA   ours   least
    rms_norm     477    205     369      302    178     214
    layer_norm   892    270     369      482    244     214
    """
    del platform, count
    size = math.prod(spec.shape("x")) * jnp.dtype(spec.dtype("x")).itemsize
    if size < LEAST:
        return no("small", f"{size >> 10} KiB of x are so small that XLA is as fast")
    return YES


# ------------------------------------------------------------------- both passes
def _normalized(call: Call, config: Rows | None) -> tuple[Array, Array | None]:
    """The norm of rows and, with an addend, the sums that it normalises."""
    from rewriter.kernels.norms.tpu_kernel import normalized

    norm, rows = _of_call(call), call.x
    dtype = jnp.dtype(call.out_dtype)
    config = config or smallest(norm.d)
    total, added = None, None
    if call.addend is not None:
        items = rows.dtype.itemsize + dtype.itemsize
        fitting = with_addend(norm.m, norm.d, config, items, 2 * rows.dtype.itemsize)
        if fitting is None:  # x alone fits
            rows = total = call.of_sum().x
        else:
            config, added = fitting, call.addend
    out, *sums = normalized(norm, rows, call.given, dtype, config, added)
    return out, sums[0] if sums else total


def _cotangents(call: Call, up: Array, config: Rows | None) -> dict[str, Array]:
    """The cotangents of operands."""
    from rewriter.kernels.norms.tpu_kernel import cotangents

    norm = _of_call(call)
    config = config or smallest(norm.d)
    added, later = None, None
    if call.addend is not None:
        size = call.x.dtype.itemsize
        items = 2 * size + up.dtype.itemsize
        fitting = with_addend(norm.m, norm.d, config, items, size)
        if fitting is None:
            later = call.addend
        else:
            config, added = fitting, call.addend
    made = cotangents(norm, call.x, up, call.given, config, added)
    made["x"] = made["x"] if later is None else made["x"] + later
    return made


def _of_call(call: Call) -> Norm:
    from rewriter.kernels.norms.tpu_kernel import Norm

    return Norm(call.centred, call.eps, call.of_squares, *call.x.shape)


forward = functools.partial(by_rows.forward, _normalized)
"""The result by the kernel of rows."""

backward = functools.partial(by_rows.backward, _cotangents)
"""The cotangents by the kernel of rows."""


SPACE = Space(Rows, default, configs, fits)

KERNELS = kernels(
    forward,
    backward,
    name="mosaic_tpu",
    platforms=("tpu",),
    version=1,
    limits=Limits(supports),
    speed=Speed(profitable, profitable_backward, estimate=estimate),
    traits=Traits(
        memory_bounded=True,
        saves_out=False,
        saves=saves_nothing,
        adds_to="x",
        tried=False,
    ),
    space=SPACE,
    backward_space=SPACE,
)
