"""How long attention takes by XLA, over blocks, by cuDNN, on Hopper: a model of each.

XLA writes and reads the scores several times, all of them, whatever the mask. The loop
over blocks does so in float32 within a few blocks, and leaves out most hidden ones.
cuDNN and our kernel for Hopper GPUs multiply what is seen, equally fast within a tenth
(``tests/bench/results/hopper_attention_h200.json``); cuDNN is compiled sooner, and so
goes first. The constants are those of an H200; what XLA takes on TPUs agrees with
published rates of v5p, v6e and TPU7x within a factor of two.

b, t, n, h                          model and measured; ms
4 4096 16 128 full bf16   forward   cudnn  0.9  0.8   memory_bounded 7.4  6.7
4 4096 16 128 causal bf16 forward   cudnn  0.5  0.5   memory_bounded 5.1  5.2
4 2048 16 64 causal f32   forward   xla    1.9  1.7   memory_bounded 1.2  1.4
4 2048 16 64 causal f32   both      xla    5.3  4.9   memory_bounded 3.5  3.8
2 4096 16 256 full bf16   both      hopper 3.8  3.5   cudnn 4.4  4.2
4 4096 8 of 4 256, capped both      hopper 2.5  2.3   xla   11   10
2 4096 16 128 bias bf16   both      hopper 4.2  4.0   xla   6.6  6.9
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rewriter.device import Device
from rewriter.estimate import item, seconds
from rewriter.kernel import Spec
from rewriter.kernels.attention import hopper
from rewriter.kernels.attention.cost import cost
from rewriter.kernels.attention.cudnn import SMALL
from rewriter.kernels.attention.cudnn import untried as cudnn_untried

PASSES, MASKED = 4.5, 2.0
"""How often XLA reads or writes the scores, in the operands' type; how often more
under a mask, window or bias."""

CAPPED = 1.8
"""How much longer with a soft cap."""

BLOCKED = 6.5
"""How often the loop over blocks reads or writes scores, in float32."""

HIDDEN = 0.35
"""The share of the time of a block that is left to a hidden one."""

BOTH = 2.8
"""How much longer XLA and the loop take with gradients."""

DENSE, FUSED, FUSED_BOTH = 0.6, 0.75, 0.62
"""Shares of the peak: XLA's products, cuDNN's forward, cuDNN's with gradients."""

OWN, TILE = 0.99, 128
"""What of cuDNN's rate our kernel for Hopper GPUs is taken to reach, and how many
queries of a head it multiplies at once."""

CAPPED_OWN, TABLED, WIDE_CUDNN = 1.3, 2.2, 0.85
"""How much longer our kernel takes with a soft cap, and with the cotangent of a bias
besides the others; and what of its rate cuDNN reaches in gradients of heads wider than
128, of which ours loses nothing."""

FEW = 64
"""Up to so many rows of a key head, queries of its group together, keys are what takes
time: XLA reads them at `READ` of the bandwidth, or `READ_ONCE` for one row, which it
multiplies without tensor cores, the loop over blocks at `LOOPED`, our kernel for that
at `STREAMED` (``tests/bench/results/hopper_decode_h200.json``, 32 MiB to 1 GiB of keys,
and ``public_decode_h200.json``)."""

READ, READ_ONCE, LOOPED, STREAMED = 0.26, 0.65, 0.2, 0.95

LEAST = 16 << 20
"""Bytes of keys and values below which decoding was not measured."""

FULL_WIDTH = 128
"""Narrower heads have smaller shares in cuDNN, as the root of their width."""


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns seconds by name: of "xla" and the kernels in plain JAX and for GPUs."""
    (b, t, n, h), s = spec.shape("q"), spec.shape("k")[1]
    size, scores = item(spec, "q"), b * n * t * s
    shapes, dtypes, params = map(dict, (spec.shapes, spec.dtypes, spec.params))
    seen = cost(shapes, dtypes, params, passes)
    forward = cost(shapes, dtypes, params)
    whole = 2.0 * scores * (h + spec.shape("v")[3])
    share = min(1.0, forward.flops / whole) if whole else 1.0
    longer = BOTH if passes != "forward" else 1.0
    capped = CAPPED if params.get("softcap") is not None else 1.0
    moved = forward.bytes
    plain = set(spec.operands) == {"q", "k", "v"} and share > 0.99
    often = PASSES if plain else PASSES + MASKED
    xla = seconds(
        device, longer * whole, longer * (capped * often * size * scores + moved),
        compute=DENSE, item=size, launches=4 * longer, temporary=2.0 * size * scores,
    )  # fmt: skip
    blocks = BLOCKED * 4 * scores * (HIDDEN + (1 - HIDDEN) * share)
    loop = seconds(
        device, longer * whole * share, longer * (capped * blocks + moved),
        compute=DENSE, item=size, launches=longer * 4 * max(1.0, t / 2048),
    )  # fmt: skip
    fused = FUSED if passes == "forward" else FUSED_BOTH
    fused *= min(1.0, math.sqrt(h / FULL_WIDTH))
    launches = 3 if passes == "forward" else 8
    padded = seen.flops * max(1.0, TILE / max(t, 1))
    least = seconds(device, 0.0, seen.bytes)
    cudnn = seconds(device, seen.flops, 0.0, compute=fused, launches=launches)
    own = seconds(device, padded, 0.0, compute=OWN * fused, launches=launches)
    cudnn, own = max(cudnn, least), max(own, least)
    if capped > 1.0:
        own *= CAPPED_OWN
    if passes != "forward":
        own = _with_gradients(spec, device, own, loop * (1 - 1 / BOTH))
        cudnn /= WIDE_CUDNN if h > FULL_WIDTH else 1.0
    if cudnn_untried(spec):
        cudnn = math.inf
    if hopper.untried(spec) or 4 * scores < SMALL:  # as measured of cuDNN
        own = math.inf
    few = math.inf
    if passes == "forward" and device.platform == "cuda":
        rows = t * n // max(spec.shape("k")[2], 1)
        read = READ if rows > 1 else READ_ONCE
        if moved >= LEAST:
            few = seconds(device, 0.0, moved, memory=STREAMED, launches=2)
        if rows <= FEW:
            loop = max(loop, seconds(device, 0.0, moved, memory=LOOPED))
            streamed = seconds(device, 0.0, moved, memory=read)
            xla = max(xla, streamed) if rows > 1 else streamed
    made = {"xla": xla, "memory_bounded": loop, "cudnn": cudnn}
    return made | {"hopper": own, "hopper_decode": few}


def _with_gradients(spec: Spec, device: Device, own: float, loop: float) -> float:
    """Returns seconds of our kernels for Hopper GPUs, gradients of the loop included.

    Args:
        spec: A use.
        device: A Hopper GPU.
        own: Seconds of both passes by kernels.
        loop: Seconds of the gradients alone by the loop.
    """
    tiles = hopper.backward_default(spec, device)
    if not hopper.fits_backward(tiles, spec, device).ok:
        return estimate(spec, device, "forward")["hopper"] + loop
    asked = spec.has("bias") and 1 not in spec.shape("bias")[2:]
    return own * (TABLED if asked else 1.0)
