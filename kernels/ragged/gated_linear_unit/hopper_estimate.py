"""Estimates the time of a gated linear unit of experts on a Hopper GPU.

Whole and by parts, products are equally fast; joining the branches by itself reads them
from memory. On an H200 (``tests/bench/results/hopper_glu_h200.json``; model and
measured, ms):

m k f by g               whole         by parts
8192 4096 14336 8        2.7  2.6      2.8  2.8
8192 4096 4096 16        0.8  0.9      0.9  0.9
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rewriter.kernels.ragged.dot.estimate import estimate as of_dot
from rewriter.kernels.ragged.gated_linear_unit.by_parts import part_of
from rewriter.ops.device import Device
from rewriter.ops.estimate import item, seconds
from rewriter.ops.kernel import Spec
from rewriter.support.verdict import YES, Verdict, no

TOUCHED = 3
"""Arrays of a branch's size that joining reads and writes."""


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"``, ``"by_parts_hopper"`` and ``"hopper"``.

    With gradients the branches are needed, so the unit is computed by parts.
    """
    part, dots = part_of(spec), 1 if spec.param("halves") else 2
    times = of_dot(part, device, passes)
    size, columns = item(spec, "x"), spec.shape("w")[2] * dots // 2
    joined = seconds(device, 0.0, TOUCHED * size * spec.shape("x")[0] * columns)
    whole = dots * times["hopper"] if passes == "forward" else math.inf
    return {
        "xla": dots * times["xla"] + joined,
        "by_parts_hopper": dots * times["hopper"] + joined,
        "hopper": whole,
    }


def modelled(spec: Spec, device: Device, passes: str) -> Verdict:
    """Returns yes without gradients."""
    del spec, device
    if passes == "forward":
        return YES
    return no("gradients", "gradients read the branches, which it does not write")
