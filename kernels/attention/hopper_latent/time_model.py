"""Estimates the time of attention to a latent cache on Hopper GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rewriter.kernels.attention.cost import cost
from rewriter.kernels.attention.estimate import LEAST, of_xla
from rewriter.kernels.attention.latent_form import as_attention
from rewriter.ops.device import Device
from rewriter.ops.estimate import seconds
from rewriter.ops.kernel import Spec
from rewriter.support.verdict import YES, Verdict, no

MIB = 1 << 20

COMPUTED, READ = 0.5, 0.8
"""Shares of the peak that products reach, and of the bandwidth that reading reaches."""


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"`` and ``"hopper_latent"``."""
    own = math.inf
    if modelled(spec, device, passes).ok:
        plain = as_attention(spec)
        flops = cost(*map(dict, (plain.shapes, plain.dtypes, plain.params))).flops
        own = seconds(
            device, flops, _read(spec), compute=COMPUTED, memory=READ, launches=2
        )
    return {"xla": of_xla(as_attention(spec), device, passes), "hopper_latent": own}


def modelled(spec: Spec, device: Device, passes: str) -> Verdict:
    """Returns whether it was measured: without gradients, of as many bytes."""
    if device.platform != "cuda":
        return no("platform", f"not measured on {device.platform}")
    if passes != "forward":
        return no("gradients", "it has no gradients of its own")
    if (read := _read(spec)) >= LEAST:
        return YES
    text = f"{read / MIB:.3g} MiB to read: not measured below {LEAST >> 20} MiB"
    return no("small", text)


def _read(spec: Spec) -> float:
    """Bytes of the cache, each once."""
    return float(sum(spec.nbytes(x) for x in ("latent", "k_rope") if spec.has(x)))
