"""Estimates the time of a product of 8-bit rows and an 8-bit matrix.

XLA multiplies such numbers on tensor cores too. It writes the sums, and scales them in
a kernel of its own. It reads both operands along the summed axis, so that it transposes
a matrix [k, n], as our kernel does. In µs on an H200:

m, k, n             numbers        XLA: model, measured   ours: model, measured
8192 8192 8192      int8           853  837               688  679
1024 4096 14336     int8           108  113                85   80
256 4096 14336      int8            29   34                24   26
64 4096 14336       int8            21   21                19   18
8192 8192 8192      fp8            811  803
8192 8192 8192      fp8, exact     883  876               830  847
1024 4096 14336     fp8            103  105
64 4096 14336       fp8             21   21
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax.numpy as jnp

from rewriter.kernels.shared.hopper import processors
from rewriter.ops.device import Device
from rewriter.ops.estimate import LAUNCH_S, seconds
from rewriter.ops.kernel import Spec
from rewriter.ops.widening import JOINS

FASTER = 2.0
"""How many times as many products of 8 bits as of 16 bits tensor cores make."""

XLA = {"int8": 0.87, "fast": 0.92, "float32": 0.92, "exact": 0.84}
"""The share of the peak that XLA's products reach, by kinds of sums."""

OURS = {"int8": 0.965, "fast": 0.895, "float32": 0.82, "exact": 0.79}
"""That of the kernel's, while all processors are busy."""

SCALED, TURNED, READ = 0.98, 0.62, 0.9
"""The shares of the bandwidth of scaling sums, of transposing a matrix, and of a
product that takes the time of reading its matrix."""

FAST = "ANY_F8_ANY_F8_F32_FAST_ACCUM"
"""The precision at which sums of 8-bit floats may have 14 bits."""


def narrow(spec: Spec) -> bool:
    """Returns whether the rows are stored in few bits too."""
    return jnp.dtype(spec.dtype("x")).itemsize == 1


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"`` and of ``"hopper_eight_bits"``.

    Gradients are XLA's.
    """
    once, rest = _by_xla(spec, device), 0.0
    if passes != "forward":
        rest = 2 * once
    return {"xla": once + rest, "hopper_eight_bits": _by_kernel(spec, device) + rest}


def _sizes(spec: Spec) -> tuple[int, int, int]:
    *rows, k = spec.shape("x")
    n = spec.shape("w")[0 if spec.param("mode") == "transposed" else 1]
    return math.prod(rows), k, n


def _sums(spec: Spec) -> str:
    """The kind of sums."""
    if spec.dtype("x") == "int8":
        return "int8"
    kinds = {None: "float32", FAST: "fast"}
    return kinds.get(spec.param("precision"), "exact")


def _turned(spec: Spec, device: Device) -> float:
    """Seconds of a transposed copy of the matrix, if there is one."""
    _, k, n = _sizes(spec)
    if spec.param("mode") == "transposed":
        return 0.0
    return seconds(device, 0.0, 2.0 * k * n, memory=TURNED, launches=0)


def _read(spec: Spec, device: Device) -> float:
    """Seconds of reading both operands."""
    m, k, n = _sizes(spec)
    return seconds(device, 0.0, float(m * k + k * n), memory=READ)


def _by_xla(spec: Spec, device: Device) -> float:
    m, k, n = _sizes(spec)
    flops = 2.0 * m * k * n / FASTER
    products = seconds(device, flops, 0.0, compute=XLA[_sums(spec)])
    made = max(products, _read(spec, device)) + _turned(spec, device)
    behind = str(spec.param("behind") or "").split()
    if not any(step[0] in JOINS for step in behind):
        return made
    moved = m * n * (4.0 + 2.0)
    return made + seconds(device, 0.0, moved, memory=SCALED, launches=0)


def _by_kernel(spec: Spec, device: Device) -> float:
    """Those of turns of tiles, which end together where warpgroups share a tile."""
    (m, k, n), sums = _sizes(spec), _sums(spec)
    rows, wide = 64 if m <= 64 else 128, 192 if sums == "exact" and m > 64 else 128
    apart = sums in ("int8", "fast") and m > 64
    tiles = -(-m // rows) * -(-n // wide)
    count = processors(device) * (2 if apart else 1)
    whole = -(-tiles // count)
    turns = (whole + tiles / count) / 2 if apart else whole
    flops = turns * count * 2.0 * rows * wide * k / FASTER
    products = seconds(device, flops, 0.0, compute=OURS[sums])
    if m <= 64:  # some of the processors are idle, or its summed axis is split
        products = min(products, _read(spec, device) + LAUNCH_S)
    return max(products, _read(spec, device)) + _turned(spec, device)
