"""Estimates the temporary memory of a ragged dot's forward on NVIDIA GPUs.

XLA holds all rows once for each group, with those of other groups set to zero. Its
products take some memory of their own. The kernel for Hopper GPUs holds a few numbers
for each group, and halves of float32 numbers. In the shipped measurements XLA took 1
to 1.1 times as much. With
gradients it took two to eight times the forward's, so nothing is said of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rewriter.kernels.shared.memory import on_nvidia_gpus
from rewriter.ops.device import Device
from rewriter.ops.estimate import PRODUCTS_BYTES, item
from rewriter.ops.kernel import Spec


@on_nvidia_gpus
def temporary(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns bytes of ``"xla"`` and ``"hopper"``; nothing where they are not known."""
    if passes != "forward":
        return {}
    (m, k), (groups,) = spec.shape("lhs"), spec.shape("group_sizes")
    rows = float(m * k * groups * item(spec, "lhs"))
    split = 0.0
    if spec.dtype("lhs") == "float32":  # three numbers of 16 bits for each
        split = 6.0 * (m * k + math.prod(spec.shape("rhs")))
    return {"xla": rows + PRODUCTS_BYTES, "hopper": split}
