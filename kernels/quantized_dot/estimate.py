"""Estimates the time of a quantized dot: by XLA, over blocks, and on Hopper.

XLA reads the stored numbers, writes the widened matrix, and reads it again. It casts
within the product what is only cast. The loop writes and reads a block at a time. The
kernel for Hopper GPUs widens in shared memory, at a rate of numbers.

m, k, n             stored         model and measured on an H100; µs
16 4096 14336       int8           xla 125 121   hopper 37 34
16 4096 14336       int8, cast     xla  30  30   hopper 37 35
16 4096 14336       int8, groups   xla 125 122   hopper 47 44
16 4096 14336       int4, groups   xla 112 106   hopper 47 33
256 4096 14336      int8           xla 125 123   hopper 79 82

Few rows: each number is read once, and widened in registers, at the rate of memory. All
blocks of columns read the rows again, from the cache.

16 4096 14336       int8           24 23         64 4096 14336   int8   26 27
16 4096 14336       int4, groups   14 16         64 8192 28672   int8   90 83
16 8192 28672       int8           84 84         16 4096 14336   fp8    24 24

(``tests/bench/results/quantized_dot_h100.json``)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rewriter.kernels.quantized_dot import eight_bits_estimate
from rewriter.ops.cost import FOUR_BITS
from rewriter.ops.device import Device
from rewriter.ops.estimate import LAUNCH_S, item, seconds
from rewriter.ops.kernel import Spec
from rewriter.ops.stored import usual_steps
from rewriter.ops.widening import JOINS
from rewriter.support.verdict import YES, Verdict, no

WRITTEN = 0.75
"""The share of the bandwidth of widening."""

READ = 0.9
"""The share of the bandwidth of a product of few rows that reads a widened matrix."""

FUSED = 0.68
"""The share of the bandwidth of a product of one row that casts what it reads. With 256
rows it takes twice as long."""

NARROW = 0.68
"""The share of the bandwidth of the kernel for Hopper, where a number is a byte: it
widens no more of four bits."""

GROUPED = 0.5
"""The same with scales of groups, which each step reads."""

WIDENED = 0.5
"""The share of the peak of products of numbers that are widened in shared memory."""

PRODUCT = 0.87
"""The share of the peak of XLA's products."""

TILE = 64
"""Rows of a tile on Hopper, which is multiplied as a whole."""

TURN_S = 8e-6
"""Seconds of a block's turn in a loop on a GPU."""


def numbers(spec: Spec) -> float:
    """Returns how many numbers the matrix has."""
    return float(math.prod(spec.shape("w")))


def stored_bytes(spec: Spec) -> float:
    """Returns the bytes of the stored numbers."""
    return numbers(spec) * (0.5 if spec.dtype("w") in FOUR_BITS else 1.0)


def rows_of(spec: Spec) -> int:
    """Returns the number of rows."""
    return math.prod(spec.shape("x")[:-1])


def joins(spec: Spec) -> list[str]:
    """Returns the steps that join something to the numbers."""
    widen = spec.param("widen")
    if widen is None:
        widen = usual_steps(spec.has("w_scale"), spec.has("w_zero"), spec.dtype("x"))
    return [step for step in widen.split() if step[0] in JOINS]


def fuses(spec: Spec) -> bool:
    """Returns whether XLA may widen within the product: no array is joined.

    Products with a single number were not measured, and count as casts.
    """
    arrays = (f"w_{step[1:]}" for step in joins(spec))
    return all(not spec.has(a) or math.prod(spec.shape(a)) == 1 for a in arrays)


def as_written(spec: Spec, device: Device) -> float:
    """Returns the seconds of one product by XLA."""
    products = seconds(
        device, 2 * numbers(spec) * rows_of(spec), 0.0, compute=PRODUCT,
        item=item(spec, "x"),
    )  # fmt: skip
    wide = numbers(spec) * item(spec, "x")
    before = seconds(device, 0.0, stored_bytes(spec) + wide, memory=WRITTEN, launches=0)
    apart = before + max(products, seconds(device, 0.0, wide, memory=READ))
    if not fuses(spec):
        return apart
    share = FUSED / (1 + rows_of(spec) / 256)
    within = seconds(device, 0.0, stored_bytes(spec), memory=share)
    return min(apart, max(products, within))


def on_hopper(spec: Spec, device: Device) -> float:
    """Returns the seconds of one product by the kernel for Hopper."""
    grouped = spec.has("w_scale") and spec.shape("w_scale")[0] > 1
    padded = -(-rows_of(spec) // TILE) * TILE
    share = GROUPED if grouped else NARROW
    return max(
        seconds(device, 2 * numbers(spec) * padded, 0.0, compute=WIDENED, launches=2),
        seconds(device, 0.0, numbers(spec), memory=share, launches=2),
    )


CACHED = 0.15
"""How long reading a byte from the cache takes, in that of memory."""


RATE = 3.9e12
"""Numbers a second that are widened where a thread reads one or two bytes at once."""


def of_few_rows(spec: Spec, device: Device) -> float:
    """Returns the seconds of one product by the kernel of few rows."""
    count, rows = numbers(spec), rows_of(spec)
    again = count / 128 * rows * item(spec, "x")
    read = seconds(device, 0.0, stored_bytes(spec) + CACHED * again)
    four = stored_bytes(spec) < count
    if four and (rows > 32 or spec.param("mode") == "transposed"):
        return max(read, count / RATE + LAUNCH_S)
    return read


TIMES = {"forward": 1.0, "vjp": 1.0, "forward_and_vjp": 2.0}
"""Products of the forward's size, each of a matrix that is read."""


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"`` and of the kernels.

    The gradient of rows is XLA's, whatever the kernel.
    """
    if eight_bits_estimate.narrow(spec):
        return eight_bits_estimate.estimate(spec, device, passes)
    once = as_written(spec, device)
    k = max(spec.shape("x")[-1], 1)
    turns = numbers(spec) / k / min(256, max(64, (1 << 20) / k))
    loop = 1.05 * once + turns * (TURN_S if device.platform != "cpu" else 0.0)
    ours = on_hopper(spec, device) if modelled(spec, device, passes).ok else math.inf
    rest = 0.0 if passes == "forward" else once
    times = TIMES[passes]
    return {
        "xla": times * once,
        "memory_bounded": times * loop,
        "hopper": ours + rest,
        "hopper_few_rows": of_few_rows(spec, device) + rest,
    }


def modelled(spec: Spec, device: Device, passes: str) -> Verdict:
    """Returns whether the kernel for Hopper was measured in such a use."""
    del device, passes
    if any(step[0] in "-+" for step in joins(spec)):
        return no("measured", "zero points were not measured: chosen only by name")
    return YES
