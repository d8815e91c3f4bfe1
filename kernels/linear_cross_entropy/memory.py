"""Estimates the temporary memory of a loss over a vocabulary on NVIDIA GPUs.

XLA holds all logits, with gradients twice, and zeros in float32 into which the gradient
of a picked logit is scattered. The loop holds a block of logits, with gradients twice,
or the sums of the gradients of the weights if these are larger. On an H100 the program
as written took 0.75 to 1.02 of this, and the loop 0.85 to 1.3
(``tests/bench/results/vocabulary_loss_h100.json``).
"""

from __future__ import annotations

from collections.abc import Mapping

from rewriter.kernels.cross_entropy.estimate import scattered
from rewriter.kernels.linear_cross_entropy import chunks
from rewriter.kernels.shared.memory import on_nvidia_gpus
from rewriter.ops.device import Device
from rewriter.ops.kernel import Spec


@on_nvidia_gpus
def temporary(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns bytes of ``"xla"`` and ``"memory_bounded"``; nothing elsewhere."""
    k, v = spec.shape("w")
    gradients, size = passes != "forward", chunks.item_of(spec)
    logits = chunks.nbytes(spec) / 4.0
    held = (1 + gradients) * size * logits
    block = min(float(chunks.default(spec, device).budget), size * logits)
    if not gradients:
        return {"xla": held, "memory_bounded": block}
    zeros = 4 * logits * (scattered(spec, 4) > 0)
    return {"xla": held + zeros, "memory_bounded": max(2 * block, 4.0 * k * v)}
