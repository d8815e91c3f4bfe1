"""How long a ragged dot takes on a GPU: a model of three ways to compute it.

XLA multiplies every row by every group's matrix. A loop over the groups launches a
few kernels for each. Tiles copy a matrix for each tile of rows. The constants are
those of an H200 (``tests/bench/results/tuned_h200.json``), which the model meets
within a fifth for 8 to 128 groups in bfloat16, but for the loop over few rows:

m, k, n, g               XLA           loop          tiles    (model, measured; ms)
8192 4096 4096 16        5.5  5.0      1.0  1.0      1.9  1.9
32768 2048 1536 128     33.0  32.3     3.1  3.1      1.9  2.0
8192 4096 14336 8        9.6  8.4      2.6  2.5      5.5  5.0
256 2048 1536 128        0.3  0.3      2.6  1.2      1.0  1.0
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax.numpy as jnp

from rewriter.verdict import YES, Verdict, no

if TYPE_CHECKING:
    from rewriter.kernel import Spec

DENSE = 800e12
"""FLOP/s of large products in 16 bits."""

PARTED = 400e12
"""FLOP/s of products of some hundred rows in 16 bits."""

SLOWER = 2.0
"""How much longer products take in float32, as the tensor cores round them."""

STEP_S = 20e-6
"""Seconds of a group's turn in a loop."""

BANDWIDTH = 3.5e12
"""Bytes a second, read or written."""

TILE = 256
"""Rows of a tile."""


def seconds(spec: Spec) -> dict[str, float]:
    """Returns the seconds of ``"xla"``, ``"memory_bounded"`` and ``"tiled"``."""
    m, k = spec.shape("lhs")
    (groups,) = spec.shape("group_sizes")
    n = spec.shape("rhs")[1 if spec.param("mode") == "transposed" else -1]
    item = jnp.dtype(spec.dtype("lhs")).itemsize
    slower = SLOWER if item > 2 else 1.0
    flops = 2.0 * m * k * n
    tiles = m // TILE + min(m, groups)
    copied = 3 * tiles * k * n * item  # read, written, read
    return {
        "xla": slower * flops * groups / DENSE,
        "memory_bounded": groups * STEP_S + slower * flops / PARTED,
        "tiled": copied / BANDWIDTH + slower * flops * tiles * TILE / max(m, 1) / DENSE,
    }


def best(spec: Spec, platform: str, name: str) -> Verdict:
    """Returns yes on CUDA where a kernel is the fastest of the three by a fifth."""
    if platform != "cuda":
        return no("platform", f"not measured to be faster than XLA on {platform}")
    if spec.symbolic:
        return no("symbolic", "sizes must be known to tell whether it pays")
    found = seconds(spec)
    fastest = min(found, key=found.__getitem__)
    if fastest == name and found[name] < 0.8 * found["xla"]:
        return YES
    mine, theirs = (math.ceil(1e6 * found[x]) for x in (name, fastest))
    if fastest == name:
        theirs = math.ceil(1e6 * found["xla"])
        return no("model", f"estimated to take {mine} µs, and XLA {theirs} µs")
    return no("model", f"estimated to take {mine} µs, and {fastest} {theirs} µs")
