"""Estimates the time of a cross-entropy of given logits, from bytes.

Either way logits are read for the maximum, for the sum of exponentials, and for the
gradient, which is written. Where an entry is picked by an index, XLA scatters its
gradient into zeros. The kernel picks by comparing, in the passes that are there anyway.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax.numpy as jnp

from rewriter.ops.device import Device
from rewriter.ops.estimate import item, seconds
from rewriter.ops.kernel import Spec


def scattered(spec: Spec, itemsize: int) -> int:
    """Returns the bytes that pass for each logit where its gradient is scattered.

    Zeros are written, and read again with the gradient; for log-probabilities they are
    also read for their sum over the classes. One-hot rows are fused instead.

    Args:
        spec: The use of a loss over classes.
        itemsize: Bytes of a number of what is picked.
    """
    if spec.param("outside", "nan") == "zero":
        return 0
    return itemsize * (3 if spec.param("of_log_probabilities", False) else 2)


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"`` and ``"memory_bounded"``."""
    count, size = float(math.prod(spec.shape("logits"))), item(spec, "logits")
    wide = jnp.promote_types(spec.dtype("logits"), jnp.float32).itemsize
    touched = {"forward": 2, "vjp": 3, "forward_and_vjp": 4}[passes] * size * count
    gradients = passes != "forward"
    more = scattered(spec, wide) * count * gradients
    xla = seconds(device, 0.0, touched + more, launches=3 + 4 * gradients)
    ours = seconds(device, 0.0, touched, launches=3 + gradients)
    return {"xla": xla, "memory_bounded": ours}
