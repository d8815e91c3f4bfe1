"""Estimates the time of sums of rows by their ids, from bytes and collisions."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rewriter.ops.device import Device
from rewriter.ops.estimate import item, seconds
from rewriter.ops.kernel import Spec

SWAPS = 4e-9
"""Seconds of one round of compare-and-swap that rows of one id wait for each other."""


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns seconds by name: of ``"xla"`` and the kernels."""
    del passes
    rows = math.prod(spec.shape("rows"))
    m, d = math.prod(spec.shape("rows")[:-1]), spec.shape("rows")[-1]
    table = spec.param("size") * math.prod(spec.shape("rows")[:-2]) * d
    size = item(spec, "rows")
    plain = seconds(device, 0.0, (rows + 2 * table) * size, launches=2.0)
    found = {"xla": plain, "counted": math.inf, "in_float32": math.inf}
    found["in_order"] = math.inf
    if device.platform not in ("cuda", "rocm"):
        return found
    if size == 2:
        found["xla"] = plain + rows * 4e-9
    if not spec.has("ids"):
        found["counted"] = seconds(device, 0.0, (rows + table) * size, launches=2.0)
        if size == 4:
            found["xla"] = 2 * plain
        return found
    kept = min(m * d, table)
    bytes_ = rows * size + 12 * kept + (table if table <= m * d else 2 * table) * size
    found["in_float32"] = seconds(device, 0.0, bytes_, launches=4.0)
    return found
