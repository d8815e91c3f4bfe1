"""Estimates the time of products with scales of blocks, by XLA and on Hopper.

XLA writes the product of each part of the sum in 32 bits, and reads all of them to
scale and add them up. The loop does so with the sum instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax.numpy as jnp

from rewriter.kernels.quantized_dot.by_blocks import sizes
from rewriter.kernels.shared.hopper import processors
from rewriter.ops.device import Device
from rewriter.ops.estimate import item, seconds
from rewriter.ops.kernel import Spec
from rewriter.support.verdict import YES, Verdict, no

FASTER = 2.0
"""How many times as many products of 8 bits as of 16 bits tensor cores make."""

FUSED = 0.46
"""The share of the bandwidth, where a number is a byte, of XLA's products that widen
numbers. With 64 rows they took 1.8 times as long on an H200."""

XLA, WRITTEN = 0.5, 0.78
"""The share of the peak of XLA's products of parts, and of the bandwidth at which these
are written and read: 2048 rows by 4096 x 14336 took 2.0 ms on an H200."""

OURS, READ = 0.6, 0.8
"""The same of the kernel's products, and of reading both operands."""


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"``, of the loop and of kernels for Hopper."""
    m, k, n = sizes(spec)
    z, narrow = int(spec.param("groups")), jnp.dtype(spec.dtype("x")).itemsize == 1
    flops = 2.0 * m * k * n / (FASTER if narrow else 1.0)
    read = m * k * item(spec, "x") + k * n * item(spec, "w")
    product = seconds(device, flops, float(read), compute=XLA, memory=READ)
    moved = seconds(device, 0.0, 4.0 * z * m * n, memory=WRITTEN)
    looped = z * seconds(device, 0.0, 8.0 * m * n, memory=WRITTEN, launches=2)
    written = max(product, moved) + moved
    rest = 0.0 if passes == "forward" else 2 * written
    own = few = math.inf
    if not narrow:  # the matrix is widened in the product
        share = FUSED if m <= 32 else FUSED / 1.8
        product = max(product, seconds(device, 0.0, float(k * n), memory=share))
        written = max(product, moved) + moved
    if modelled(spec, device, passes).ok:
        few = seconds(device, 0.0, float(read), memory=READ)
        count = processors(device)
        tiles = -(-m // 128) * -(-n // 128)
        full = -(-tiles // count) * count / tiles
        own = seconds(
            device, full * flops, float(read), compute=OURS, memory=READ
        )  # fmt: skip
    return {
        "xla": written + rest,
        "memory_bounded": product + looped + rest,
        "hopper": own + rest,
        "hopper_few_rows": few + rest,
    }


def modelled(spec: Spec, device: Device, passes: str) -> Verdict:
    """Returns whether such sizes were measured."""
    del device, passes
    _, k, n = sizes(spec)
    if k * n < LEAST:
        text = f"a matrix of {k} x {n}: not measured below {LEAST >> 20} Mi numbers"
        return no("small", text)
    return YES


LEAST = 1 << 24
"""The fewest numbers of a matrix that were measured."""
