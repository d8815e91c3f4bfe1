"""Estimates the time of a group norm by XLA and by the kernels, from its bytes.

XLA reads x twice and writes the result; with gradients it reads x and the cotangent
twice more, and writes x's cotangent. Its sums over positions in front of channels reach
a third of the bandwidth (``tests/bench/results/group_norms_h100.json``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rewriter.kernels.group_norm.cost import cost
from rewriter.ops.device import Device
from rewriter.ops.estimate import seconds
from rewriter.ops.kernel import Spec
from rewriter.support.verdict import YES, Verdict, no

LEAST_BYTES = 4 << 20
"""The fewest bytes of x that were measured."""


def modelled(spec: Spec, device: Device, passes: str) -> Verdict:
    """Returns whether such sizes were measured."""
    del device, passes
    if spec.nbytes("x") >= LEAST_BYTES:
        return YES
    return no("unmeasured", f"measured for {LEAST_BYTES >> 20} MiB and more of x")


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns seconds by name: of ``"xla"`` and the kernels of the platform."""
    shapes, dtypes, params = map(dict, (spec.shapes, spec.dtypes, spec.params))
    work = cost(shapes, dtypes, params, passes)
    each = seconds(device, 0.0, work.bytes, memory=0.5)
    return {"xla": each, "memory_bounded": each, "hopper": math.inf}
