"""Estimates the temporary memory of norms on NVIDIA GPUs.

A forward holds nothing. The gradient of a layer norm in 16 bits by XLA holds all
numbers in float32, and the kernel for Hopper GPUs some sums of rows for each column. So
it is in all shipped measurements. Of other gradients little is held either way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rewriter.kernels.norms.forms import is_centred
from rewriter.kernels.shared.memory import on_nvidia_gpus
from rewriter.ops.device import Device
from rewriter.ops.estimate import item
from rewriter.ops.kernel import Spec

SUMS = 512
"""Bytes that the kernel for Hopper GPUs holds for each column, with gradients."""


@on_nvidia_gpus
def temporary(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns bytes by ``"xla"`` and by kernels; nothing where they are not known."""
    if passes == "forward":
        return {"xla": 0.0, "memory_bounded": 0.0, "hopper": 0.0}
    if not is_centred(spec) or item(spec, "x") != 2:
        return {}
    shape = spec.shape("x")
    wide = 4.0 * math.prod(shape)
    return {"xla": wide, "memory_bounded": wide, "hopper": float(SUMS * shape[-1])}
