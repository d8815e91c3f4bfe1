"""Estimates the time of a group norm by XLA and by the kernel, from its bytes."""

from __future__ import annotations

from collections.abc import Mapping

from rewriter.kernels.group_norm.cost import cost
from rewriter.ops.device import Device
from rewriter.ops.estimate import seconds
from rewriter.ops.kernel import Spec


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns seconds by name: of ``"xla"`` and the plain kernel."""
    shapes, dtypes, params = map(dict, (spec.shapes, spec.dtypes, spec.params))
    work = cost(shapes, dtypes, params, passes)
    each = seconds(device, 0.0, work.bytes, memory=0.5)
    return {"xla": each, "memory_bounded": each}
