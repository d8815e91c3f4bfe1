"""Estimates the time of a gated linear unit by XLA and over blocks.

Products reach most of the peak either way. XLA writes both branches and reads them
again. So does the loop, block by block: it saves memory, and no time. With gradients it
computes both again, and its sums pass in float32. Of 589824 rows of 128 columns and 256
hidden ones, XLA took some 0.7 ms with gradients and the loop 5.

rows, k, f                          model and measured on an H200; ms
8192 4096 14336   forward bf16      xla 2.8  2.6   memory_bounded 2.9  2.8
16384 2048 8192   forward bf16      xla 1.7  1.7   memory_bounded 1.8  1.9
16 4096 14336     forward bf16      xla 0.06 0.06  memory_bounded 0.06 0.06
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rewriter.kernels.gated_linear_unit.cost import cost
from rewriter.ops.device import Device
from rewriter.ops.estimate import item, seconds
from rewriter.ops.kernel import Spec

PRODUCTS = 0.87
"""The share of the peak that products reach."""

AGAIN = 8 / 6
"""Products of the loop with gradients, which computes both branches twice."""

TOUCHED = {"forward": 4.0, "vjp": 10.0, "forward_and_vjp": 10.0}
"""The number of times that XLA reads or writes a branch."""


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"`` and ``"memory_bounded"``."""
    shapes, dtypes, params = map(dict, (spec.shapes, spec.dtypes, spec.params))
    work = cost(shapes, dtypes, params, passes)
    (*rows, _), f = spec.shape("x"), spec.shape("w_gate")[1]
    size = item(spec, "x")
    branch = float(math.prod(rows)) * f * size
    # Weights are read while products run, unless there are few rows.
    idle = max(0.0, work.bytes - work.flops / device.flops * device.bandwidth)
    xla = seconds(
        device, work.flops, idle + TOUCHED[passes] / 2 * branch, compute=PRODUCTS,
        item=size, launches=3, temporary=2 * branch,
    )  # fmt: skip
    again, wide = (1.0, 1.0) if passes == "forward" else (AGAIN, 2.0)
    loop = seconds(
        device, again * work.flops, idle + wide * TOUCHED[passes] / 2 * branch,
        compute=0.95 * PRODUCTS, item=size, launches=6,
    )  # fmt: skip
    return {"xla": xla, "memory_bounded": loop}
