"""Estimates the time of a norm by XLA and by the kernel, from its bytes.

XLA fuses the norm, and both were as fast on an H200 (``tests/bench/results/
tuned_h200.json``): 0.7 to 0.9 of the bandwidth forward. With gradients XLA took from
0.8 to 1.2 of the kernel's time, without a pattern by shape, so they count as equal.

The kernel for Hopper GPUs `adds_to` x. The gain from a fused addition is not included
here; see `rewriter.choose.residual_add_cost`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rewriter.kernels.norms import forward_time, hopper_measured
from rewriter.kernels.norms.cost import cost
from rewriter.kernels.norms.forms import is_centred
from rewriter.ops.device import Device
from rewriter.ops.estimate import seconds
from rewriter.ops.kernel import Spec

FORWARD = 0.85
"""The share of the bandwidth of a forward."""

WITH_GRADIENTS = {True: 0.3, False: 0.65}
"""The same with gradients, by whether rows are centred."""

ON_HOPPER = {True: 0.85, False: 0.89}
"""The share that our kernel for Hopper GPUs reached there, by whether rows are centred
(``tests/bench/results/hopper_norms_h200.json``)."""

SMALL = 3
"""XLA's kernels with gradients of arrays that the chip's cache holds, as many as take
`rewriter.ops.estimate.LAUNCH_S` each."""

NARROW = {"xla": 0.46, "hopper": 0.65}
"""The shares of both, of layer norms of 256 to 768 columns with gradients
(``tests/bench/results/choices_h100.json``)."""

ON_TPU = {True: 5 / 9, False: 5 / 7}
"""The TPU kernel's time with gradients, as a share of XLA's, by whether rows are
centred: it reads and writes arrays of rows five times, XLA's programs for TPUs nine or
seven times."""


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns seconds by name: of ``"xla"`` and the platform's kernels."""
    centred = is_centred(spec)
    shapes, dtypes, params = map(dict, (spec.shapes, spec.dtypes, spec.params))
    work = cost(shapes, dtypes, params, passes, centred=centred)
    reached = FORWARD if passes == "forward" else WITH_GRADIENTS[centred]
    each = seconds(device, 0.0, work.bytes, memory=reached)
    forward = device.platform == "cuda" and passes == "forward"
    if forward and forward_time.is_modelled(spec):
        times = forward_time.seconds(spec, device)
        return {**times, "memory_bounded": times["xla"]}
    if device.platform != "tpu":
        both, share = passes != "forward", ON_HOPPER[centred]
        launches = SMALL if both and hopper_measured.is_small(spec) else 1
        if hopper_measured.is_narrow(spec, passes):
            reached, share = NARROW["xla"], NARROW["hopper"]
        each = seconds(device, 0.0, work.bytes, memory=reached, launches=launches)
        own = math.inf
        if hopper_measured.measured(spec, passes).ok:
            own = seconds(device, 0.0, work.bytes, memory=share)
        return {"xla": each, "memory_bounded": each, "hopper": own}
    share = 1.0 if passes == "forward" else ON_TPU[centred]
    launch = seconds(device, 0.0, 0.0)
    ours = launch + (each - launch) * share
    return {"xla": each, "memory_bounded": each, "mosaic_tpu": ours}
