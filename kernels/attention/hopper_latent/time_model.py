"""Estimates the time of attention to a latent cache on Hopper GPUs.

With 128 heads products take the time, both here and in XLA. On an H200 it took these
µs, all sequences full (``tests/bench/results/latent_decode_h200.json``)::

    sequences  tokens    XLA: model, measured    this kernel: model, measured
           64    4096           338       366                 166         164
          128    8192          1304      1211                 613         581
           64   32768          2592      2375                1210        1130
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rewriter.kernels.attention.estimate import FEW_ROWS, LEAST, of_xla
from rewriter.kernels.attention.hopper_latent.config import ROWS, groups_of
from rewriter.kernels.attention.latent_form import as_attention
from rewriter.ops.device import Device
from rewriter.ops.estimate import item, seconds
from rewriter.ops.kernel import Spec
from rewriter.support.verdict import YES, Verdict, no

MIB = 1 << 20

XLA, COMPUTED = 0.27, 0.583
"""Shares of the peak that XLA's products reach, and those of this kernel."""

READ = 0.8
"""The share of the bandwidth at which the cache is read; not seen: products last."""

APART = 5e-6
"""Seconds beside blocks of keys: the first ones, and results that are written."""


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"`` and ``"hopper_latent"``."""
    (b, t, n, c), (_, s, _) = spec.shape("q"), spec.shape("latent")
    r, size = (spec.shape("q_rope")[3] if spec.has("q_rope") else 0), item(spec, "q")
    each = 2.0 * b * s * (2 * c + r)
    xla = of_xla(as_attention(spec), device, passes)
    if t * n > FEW_ROWS and passes == "forward":
        xla = seconds(device, each * t * n, 0.0, compute=XLA, item=size, launches=4)
    own = math.inf
    if modelled(spec, device, passes).ok:
        rows = ROWS * groups_of(t, n)
        own = APART + max(  # keys are copied while others are multiplied
            seconds(device, each * rows, 0.0, compute=COMPUTED, item=size, launches=3),
            seconds(device, 0.0, _read(spec), memory=READ, launches=3),
        )
    return {"xla": xla, "hopper_latent": own}


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
