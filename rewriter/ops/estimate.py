"""Estimates seconds on a device where nothing is measured: a roofline.

``seconds = operations / (efficiency · peak) + bytes / (efficiency · bandwidth) +
launches · a launch``: the parts are added, since those of XLA's fusions and of loops
rarely overlap. Each op's ``estimate.py`` says what its implementations do. Its
efficiencies are fitted to measurements on an H200
(``tests/bench/results/tuned_h200.json``); for TPUs there are published rates of XLA
alone. A choice by it is called ``estimated``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax.numpy as jnp

from rewriter.ops.device import Device
from rewriter.ops.kernel import Spec

Estimate = Callable[[Spec, Device, str], Mapping[str, float]]
"""``estimate(spec, device, passes)``: seconds by ``"xla"`` and kernels' names."""

SHEET_FLOPS, SHEET_BANDWIDTH = 0.85, 0.9
"""Reachable shares of a data sheet's peaks: 840 of 989 TFLOP/s, 4.3 of 4.8 TB/s."""

PRODUCTS = 0.87
"""The share of the peak that large aligned products reach."""

LAUNCH_S = 4e-6
"""Seconds of a kernel that does nothing."""

WIDE = {"cuda": 2.0}
"""How many times longer 32-bit products take than 16-bit ones; 1 elsewhere."""

PRODUCTS_BYTES = 32 << 20
"""Bytes that XLA sets aside on Hopper GPUs for matrix products of that size or more
(``tests/bench/results/tuned_h200.json``)."""

ROOM = 0.8
"""The share of a device's memory that temporary arrays may take."""


def seconds(
    device: Device,
    flops: float,
    nbytes: float,
    *,
    compute: float = 1.0,
    memory: float = 1.0,
    item: int = 2,
    launches: float = 1.0,
    temporary: float = 0.0,
) -> float:
    """Returns how long some work takes; infinite if it does not fit.

    Args:
        device: The device; its figures must be known.
        flops: Floating-point operations of matrix products.
        nbytes: Bytes read and written.
        compute: The share of the peak that products reach.
        memory: The share of the bandwidth that is reached.
        item: Bytes of a number in the products.
        launches: The number of kernels launched one after the other.
        temporary: Bytes of temporary memory.

    Example:
        >>> from rewriter.ops.device import Device
        >>> fast = Device("d", "tpu", flops=1e12, bandwidth=1e12, measured=True)
        >>> seconds(fast, 1e12, 5e11, compute=0.5, launches=0)
        2.5
    """
    if device.memory and temporary > ROOM * device.memory:
        return math.inf
    peak, bandwidth = device.flops, device.bandwidth
    if not device.measured:
        peak, bandwidth = peak * SHEET_FLOPS, bandwidth * SHEET_BANDWIDTH
    slower = WIDE.get(device.platform, 1.0) if item > 2 else 1.0
    return (
        slower * flops / (compute * peak)
        + nbytes / (memory * bandwidth)
        + launches * LAUNCH_S
    )


def item(spec: Spec, operand: str) -> int:
    """Returns the bytes of a number of an operand."""
    return jnp.dtype(spec.dtype(operand)).itemsize
