"""Estimates the time of a product of 8-bit rows and an 8-bit matrix.

XLA multiplies such numbers on tensor cores too. It writes the sums, and scales them in
a kernel of its own. It reads both operands along the summed axis, so that it transposes
a matrix [k, n], as our kernel does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax.numpy as jnp

from rewriter.ops.device import Device
from rewriter.ops.estimate import seconds
from rewriter.ops.kernel import Spec
from rewriter.ops.widening import JOINS

FASTER = 2.0
"""How many times as many products of 8 bits as of 16 bits tensor cores make."""

XLA, OURS, PROMOTED = 0.7, 0.72, 0.6
"""The shares of the peak of products: by XLA, by the kernel, with float32 sums."""

MOVED = 0.8
"""The share of the bandwidth of a kernel that reads, scales and writes."""

READ = 0.75
"""The share of the bandwidth of a product that takes the time of reading its matrix."""


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


def _turned(spec: Spec, device: Device) -> float:
    """Seconds of a transposed copy of the matrix, if there is one."""
    _, k, n = _sizes(spec)
    if spec.param("mode") == "transposed":
        return 0.0
    return seconds(device, 0.0, 2.0 * k * n, memory=MOVED)


def _by_xla(spec: Spec, device: Device) -> float:
    m, k, n = _sizes(spec)
    products = max(
        seconds(device, 2.0 * m * k * n / FASTER, 0.0, compute=XLA),
        seconds(device, 0.0, float(m * k + k * n), memory=READ),
    )
    behind = str(spec.param("behind") or "").split()
    if not any(step[0] in JOINS for step in behind):
        return products + _turned(spec, device)
    scaled = seconds(device, 0.0, m * n * (4.0 + 2.0), memory=MOVED)
    return products + scaled + _turned(spec, device)


def _by_kernel(spec: Spec, device: Device) -> float:
    m, k, n = _sizes(spec)
    padded = 2.0 * -(-m // 64) * 64 * k * n
    products = max(
        seconds(device, padded / FASTER, 0.0, compute=OURS),
        seconds(device, 0.0, float(m * k + k * n), memory=READ),
    )
    return products + _turned(spec, device)
