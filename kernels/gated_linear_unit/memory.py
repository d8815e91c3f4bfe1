"""Estimates the temporary memory of a gated linear unit's forward on NVIDIA GPUs.

XLA holds one branch, and its products take some memory of their own. The kernel for
Hopper GPUs holds nothing. In the shipped measurements XLA took just as much. With
gradients it took from one to four branches, so nothing is said of them.
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
    rows, f = math.prod(spec.shape("x")[:-1]), spec.shape("w_gate")[1]
    branch = float(rows * f * item(spec, "x"))
    if passes != "forward" or branch < PRODUCTS_BYTES:
        return {}
    return {"xla": branch + PRODUCTS_BYTES, "hopper": 0.0}
