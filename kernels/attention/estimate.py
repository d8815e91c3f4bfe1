"""Estimates the time of attention by XLA, over blocks, by cuDNN and on Hopper.

XLA writes and reads all scores several times, whatever the mask. The loop over blocks
does so in float32 within a few blocks, and skips most hidden ones. cuDNN and our kernel
for Hopper GPUs multiply only what is seen. Both are equally fast within a tenth for
heads of 64, 128 and 256 (``tests/bench/results/hopper_attention_h200.json``); cuDNN is
compiled sooner, and so goes first. cuDNN pads heads of other widths more than our
kernel does. The constants are those of an H200. XLA's estimates on TPUs agree with
published rates of v5p, v6e and TPU7x within a factor of two.

b, t, n, h                          model and measured; ms
4 4096 16 128 full bf16   forward   cudnn  0.9  0.8   memory_bounded 7.4  6.7
4 4096 16 128 causal bf16 forward   cudnn  0.5  0.5   memory_bounded 5.1  5.2
4 2048 16 64 causal f32   forward   xla    1.9  1.7   memory_bounded 1.2  1.4
4 2048 16 64 causal f32   both      xla    5.3  4.9   memory_bounded 3.5  3.8
2 4096 16 256 full bf16   both      hopper 3.8  3.5   cudnn 4.4  4.2
4 4096 8 of 4 256, capped both      hopper 2.5  2.3   xla   11   10
2 4096 16 128 bias bf16   both      hopper 4.2  4.0   xla   6.6  6.9
4 4096 32 96 causal bf16  both      hopper 3.3  3.0   cudnn 3.7  3.6
32 729 16 72 full bf16    both      hopper 1.2  1.2   xla   2.2  4.7

The kernels' modules import this one. So what it needs of them is imported where it is
needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rewriter.kernels.attention.cost import cost
from rewriter.ops.device import Device
from rewriter.ops.estimate import item, seconds
from rewriter.ops.kernel import Spec

PASSES, MASKED = 4.5, 2.0
"""The number of times that XLA reads or writes the scores, in the operands' type;
further times under a mask, window or bias."""

CAPPED = 1.8
"""The factor of time with a soft cap."""

BLOCKED = 6.5
"""The number of times that the loop over blocks reads or writes scores, in float32."""

HIDDEN = 0.35
"""The time of a hidden block, as a share of a visible one's."""

BOTH = 2.8
"""The factor of time with gradients, for XLA and the loop."""

DENSE, FUSED, FUSED_BOTH = 0.6, 0.75, 0.62
"""Shares of the peak: XLA's products, cuDNN's forward, cuDNN's with gradients."""

OWN, TILE = 0.99, 128
"""The assumed share of cuDNN's rate that our Hopper kernel reaches, and the number of
queries of a head that it multiplies at once."""

CAPPED_OWN, TABLED, WIDE_CUDNN = 1.3, 2.2, 0.85
"""The factors of our kernel's time with a soft cap, and with the cotangent of a bias.
The last is the share of its rate that cuDNN reaches in gradients of heads wider than
128; ours loses nothing there."""

FEW = 64
"""Up to this many rows of a key head (all queries of its group), reading keys takes the
time. XLA reads them at `READ` of the bandwidth, or at `READ_ONCE` for one row, without
tensor cores. The loop over blocks reads at `LOOPED`, our decode kernel at `STREAMED`
(``tests/bench/results/hopper_decode_h200.json``, 32 MiB to 1 GiB of keys, and
``public_decode_h200.json``)."""

READ, READ_ONCE, LOOPED, STREAMED = 0.26, 0.65, 0.2, 0.95

LEAST = 16 << 20
"""The fewest bytes of keys and values for which decoding was measured."""

FULL_WIDTH = 128
"""Narrower heads reach smaller shares in cuDNN, by the root of their width."""

STEP_CUDNN = 64
"""cuDNN is assumed to pad heads to multiples of it: it takes 0.224 ms for heads of 80
and 0.225 for heads of 128, 0.928 for heads of 96 and 0.913 for heads of 128
(``tests/bench/results/hopper_attention_h200.json``; 1k keys, and 4k under a causal
mask)."""

COPIED = 0.6
"""The share of the bandwidth that padding and slicing copies reach. It is fitted to our
kernels with copies for heads of 72 and 40 in the same record, minus the estimated
products of 80 and 48. The copies that make lengths even for cuDNN were not measured,
and are assumed to reach it too."""


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns seconds by name: of "xla" and the kernels in plain JAX and for GPUs."""
    (b, t, n, h), s = spec.shape("q"), spec.shape("k")[1]
    size, scores = item(spec, "q"), b * n * t * s
    shapes, dtypes, params = map(dict, (spec.shapes, spec.dtypes, spec.params))
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
    cudnn = _cudnn(spec, device, passes)
    own = _own(spec, device, passes, loop * (1 - 1 / BOTH))
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


def _cudnn(spec: Spec, device: Device, passes: str) -> float:
    """Returns seconds of cuDNN, copies that make lengths even included."""
    from rewriter.kernels.attention.cudnn import untried

    if untried(spec):
        return math.inf
    both, h = passes != "forward", spec.shape("q")[3]
    flops = _widened(spec, passes, STEP_CUDNN)
    share = _share(passes, -(-h // STEP_CUDNN) * STEP_CUDNN)
    share *= WIDE_CUDNN if both and h > FULL_WIDTH else 1.0
    made = seconds(device, flops, 0.0, compute=share, launches=8 if both else 3)
    made = max(made, _least(spec, device, passes))
    return made + _copies(device, _made_even(spec, both))


def _own(spec: Spec, device: Device, passes: str, loop: float) -> float:
    """Returns seconds of our kernels for Hopper GPUs, copies of operands included.

    Args:
        spec: A use.
        device: A Hopper GPU.
        passes: ``forward`` or ``forward_and_vjp``.
        loop: Seconds of the gradients alone by the loop over blocks.
    """
    from rewriter.kernels.attention.cudnn import SMALL
    from rewriter.kernels.attention.hopper.config import STEP, filled

    (b, t, n, h), s = spec.shape("q"), spec.shape("k")[1]
    if 4 * b * n * t * s < SMALL:  # as measured for cuDNN
        return math.inf
    both = passes != "forward"
    flops = _widened(spec, passes, STEP) * -(-t // TILE) * TILE / max(t, 1)
    share = OWN * _share(passes, filled(h))
    made = seconds(device, flops, 0.0, compute=share, launches=8 if both else 3)
    made = max(made, _least(spec, device, passes))
    made *= CAPPED_OWN if spec.param("softcap") is not None else 1.0
    made += _copies(device, max(_made_wider(spec, both), _made_whole(spec, both)))
    return _with_gradients(spec, device, made, loop) if both else made


def _share(passes: str, width: int) -> float:
    """Returns the share of the peak that heads of a width reach in cuDNN."""
    share = FUSED if passes == "forward" else FUSED_BOTH
    return share * min(1.0, math.sqrt(width / FULL_WIDTH))


def _widened(spec: Spec, passes: str, step: int) -> float:
    """Returns operations of heads that are padded to multiples of some columns."""
    shapes, dtypes, params = map(dict, (spec.shapes, spec.dtypes, spec.params))
    wider = {
        name: (*shapes[name][:3], -(-shapes[name][3] // step) * step) for name in "qkv"
    }
    return cost({**shapes, **wider}, dtypes, params, passes).flops


def _least(spec: Spec, device: Device, passes: str) -> float:
    """Returns seconds in which operands and results are read and written once."""
    shapes, dtypes, params = map(dict, (spec.shapes, spec.dtypes, spec.params))
    return seconds(device, 0.0, cost(shapes, dtypes, params, passes).bytes)


def _copies(device: Device, nbytes: float) -> float:
    return seconds(device, 0.0, nbytes, memory=COPIED, launches=0)


def _made_even(spec: Spec, both: bool, step: int = 2) -> float:
    """Returns bytes of the copies that make numbers of rows multiples of a step.

    Operands get rows, and the result loses them. So do gradients, and the cotangent
    gets them.
    """
    (b, t, n, h), (_, s, heads, e) = spec.shape("q"), spec.shape("v")
    queries, keys = (x * (x % step > 0) for x in (t, s))
    numbers = b * (h + e) * (queries * n + keys * heads)
    return 2.0 * item(spec, "q") * numbers * (2 if both else 1)


def _made_whole(spec: Spec, both: bool) -> float:
    """Returns bytes of the copies that fill the last tile of our kernel.

    Heads as wide as a tile are copied row by row, and need none.
    """
    from rewriter.kernels.attention.hopper.config import BY_ROWS, EDGE

    narrow = all(spec.shape(name)[3] in BY_ROWS for name in "qv")
    return 0.0 if narrow else _made_even(spec, both, EDGE)


def _made_wider(spec: Spec, both: bool) -> float:
    """Returns bytes of the copies that pad heads to widths that our kernel reads.

    q, k and v are padded once for both passes, and the result is sliced. For gradients
    the result and its cotangent are padded, and three results sliced.
    """
    from rewriter.kernels.attention.hopper.config import filled

    (b, t, n, h), (_, s, heads, e) = spec.shape("q"), spec.shape("v")
    wide, wide_values = (x + filled(x) if filled(x) > x else 0 for x in (h, e))
    times, results = (2, 3) if both else (1, 1)
    queries, keys = b * t * n, b * s * heads
    numbers = times * (queries + keys) * wide
    numbers += (times * keys + results * queries) * wide_values
    return float(item(spec, "q") * numbers)


def _with_gradients(spec: Spec, device: Device, own: float, loop: float) -> float:
    """Returns seconds of our kernels for Hopper GPUs, gradients of the loop included.

    Args:
        spec: A use.
        device: A Hopper GPU.
        own: Seconds of both passes by kernels.
        loop: Seconds of the gradients alone by the loop.
    """
    from rewriter.kernels.attention import hopper

    tiles = hopper.backward_default(spec, device)
    if not hopper.fits_backward(tiles, spec, device).ok:
        return estimate(spec, device, "forward")["hopper"] + loop
    asked = spec.has("bias") and 1 not in spec.shape("bias")[2:]
    return own * (TABLED if asked else 1.0)
