"""Estimates the time of a quantized dot: by XLA, over blocks, and on Hopper.

XLA reads the stored numbers, writes the widened matrix, and reads it again. It casts
within the product what is only cast. The loop does the same block by block. The kernel
for Hopper GPUs reads the stored numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rewriter.ops.device import Device
from rewriter.ops.estimate import item, seconds
from rewriter.ops.kernel import Spec
from rewriter.ops.widening import JOINS

STREAMED = 0.8
"""The share of the bandwidth of widening and of reading the widened matrix."""

FUSED = 0.5
"""The share of the bandwidth of a product that casts: a gated unit of 64 rows and two
matrices of 4096 by 14336 int8 took 77 µs on an H100."""

NARROW = 0.5
"""The share of the bandwidth of reading stored numbers, as of ragged dots."""

WIDENED = 0.5
"""The share of the peak of products of numbers that are widened in shared memory."""

TILE = 64
"""Rows of a tile on Hopper, which is multiplied as a whole."""


def stored_bytes(spec: Spec) -> float:
    """Returns the bytes of the stored numbers."""
    packed = spec.dtype("w") in ("int4", "uint4")
    return math.prod(spec.shape("w")) * (0.5 if packed else 1.0)


def only_cast(spec: Spec) -> bool:
    """Returns whether the numbers are only cast before they are multiplied."""
    widen = spec.param("widen")
    if widen is None:
        return not (spec.has("w_scale") or spec.has("w_zero"))
    return not any(step[0] in JOINS for step in widen.split())


def flops(spec: Spec) -> float:
    """Returns the operations of the product."""
    return 2.0 * math.prod(spec.shape("x")[:-1]) * math.prod(spec.shape("w"))


def written(spec: Spec, device: Device) -> float:
    """Returns the seconds in which the widened matrix is written and read."""
    wide = float(math.prod(spec.shape("w")) * item(spec, "x"))
    return seconds(device, 0.0, stored_bytes(spec) + 2 * wide, memory=STREAMED)


def multiplied(spec: Spec, device: Device) -> float:
    """Returns the seconds of the product of a matrix that is in the caches."""
    *rows, k = spec.shape("x")
    size = item(spec, "x")
    n = math.prod(spec.shape("w")) // max(k, 1)
    moved = float(math.prod(rows) * (k + n) * size)
    return seconds(device, flops(spec), moved, compute=0.87, item=size)


TIMES = {"forward": 1.0, "vjp": 1.0, "forward_and_vjp": 2.0}
"""Products of the forward's size, each of a matrix that is read."""


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"``, ``"memory_bounded"`` and ``"hopper"``.

    The gradient of rows is XLA's, whatever the kernel.
    """
    times = TIMES[passes]
    before = written(spec, device) + multiplied(spec, device)
    if only_cast(spec):
        read = seconds(device, 0.0, stored_bytes(spec), memory=FUSED, launches=0)
        before = min(before, read + multiplied(spec, device))
    rows = max(math.prod(spec.shape("x")[:-1]), 1)
    padded = flops(spec) / rows * (-(-rows // TILE) * TILE)
    ours = max(
        seconds(device, padded, 0.0, compute=WIDENED, launches=2),
        seconds(device, 0.0, stored_bytes(spec), memory=NARROW, launches=2),
    )
    if passes != "forward":
        ours += before
    return {"xla": times * before, "memory_bounded": 1.05 * times * before,
            "hopper": ours}  # fmt: skip
