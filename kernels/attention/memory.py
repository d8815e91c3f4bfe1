"""Estimates the temporary memory of attention on NVIDIA GPUs.

XLA holds all scores twice, as products and as weights; with gradients four times. The
kernels hold two numbers for each row of scores, and these with gradients alone. cuDNN
then also adds up the gradient of queries in float32. In the shipped measurements XLA
took from half to 1.3 times as much, and in most of them exactly as much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rewriter.kernels.attention.estimate import FEW_ROWS
from rewriter.kernels.shared.memory import on_nvidia_gpus
from rewriter.ops.device import Device
from rewriter.ops.estimate import item
from rewriter.ops.kernel import Spec

HELD = {"forward": 2.0}
"""How often XLA holds all scores; with gradients `HELD_WITH_GRADIENTS`."""

HELD_WITH_GRADIENTS = 4.0

PLAIN = frozenset({"q", "k", "v", "kv_lengths"})
"""The operands with which cuDNN needs no further arrays."""


@on_nvidia_gpus
def temporary(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns bytes by ``"xla"`` and by kernels; nothing for few rows of a key head."""
    (b, t, n, h), (_, s, heads, _) = spec.shape("q"), spec.shape("k")
    if t * n // max(heads, 1) <= FEW_ROWS:
        return {}
    scores = float(item(spec, "q") * math.prod((b, n, t, s)))
    rows = 0.0 if passes == "forward" else float(b * n * t)
    found = {
        "xla": HELD.get(passes, HELD_WITH_GRADIENTS) * scores,
        "hopper": 8 * rows + _halves(spec, passes),
    }
    if set(spec.operands) <= PLAIN:
        found["cudnn"] = (8 + 4 * h) * rows
    return found


def _halves(spec: Spec, passes: str) -> float:
    """Bytes of float32 operands, and of the cotangent, in two parts each."""
    if spec.dtype("q") != "float32":
        return 0.0
    sizes = sum(math.prod(spec.shape(name)) for name in "qkv")
    if passes != "forward":
        sizes += math.prod(spec.shape("q")[:3]) * spec.shape("v")[3]
    return 4.0 * sizes
